"""What must be chosen before anything imports torch or triton: how OpenMP waits (by importing
`compress` first), and Triton's interpreter where there is no GPU.
"""

import os

import compress  # noqa: F401, isort: skip
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
