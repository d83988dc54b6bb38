"""compress: an offline model-compression toolkit for large language models."""

import os

__version__ = "0.1.0"

# Read by OpenMP when torch is imported. Threads that wait should sleep, or one that has lost its
# core makes the others spin for its whole time slice; but they should spin for some microseconds
# first, or waking them costs more than a small operation takes. The user's own choice comes first.
if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
