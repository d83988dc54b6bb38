"""How close a kernel must be to its oracle."""

import torch

# The interpreter computes with bf16 bit patterns as if they were integers, so bf16 needs a GPU.
DTYPES = (torch.float16, torch.float32) + (torch.bfloat16,) * torch.cuda.is_available()


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def assert_as_exact_as(got, torch_result, exact):
    """FlashAttention's rule: the largest error against the float64 oracle is at most twice that of
    plain torch in the same dtype, and one unit in the last place of the largest value."""
    assert got.dtype == torch_result.dtype and got.shape == exact.shape
    error, torch_error = ((x.double() - exact).abs().max() for x in (got, torch_result))
    last_place = torch.finfo(got.dtype).eps * exact.abs().max()
    assert error <= 2 * torch_error + last_place, f"{error=} {torch_error=} {last_place=}"
