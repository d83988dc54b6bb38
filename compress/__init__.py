"""compress: an offline model-compression toolkit for large language models.

`LLM`, `SamplingParams` and `EngineConfig` can be imported from here; nothing heavy is loaded
before one of them is asked for.
"""

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

# Read by OpenMP when torch is imported. Threads that wait should sleep, or one that has lost its
# core makes the others spin for its whole time slice; but they should spin for some tenths of a
# millisecond first, or waking them costs more than a small operation takes. The user's own choice
# comes first.
if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
    os.environ.setdefault("GOMP_SPINCOUNT", "8000")
# Read when torch is imported, too: how many prepared products, one for each number of rows, torch
# and oneDNN keep. With their usual 1024 each, some hundred kB a piece, a server grows by hundreds
# of MB while it meets batches of new sizes; preparing one anew takes about 0.5 ms.
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

_HOMES = {
    "LLM": "compress.runtime.llm",
    "EngineConfig": "compress.runtime.engine_config",
    "SamplingParams": "compress.runtime.request",
}

if TYPE_CHECKING:
    from compress.runtime.engine_config import EngineConfig
    from compress.runtime.llm import LLM
    from compress.runtime.request import SamplingParams
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
