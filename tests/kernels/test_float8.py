"""float8 decoding: every code, every dtype, every layout."""

import pytest
import torch

from compress.kernels.float8 import decode_float8

FLOAT8 = torch.float8_e4m3fn
_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
EVERY_CODE = _BYTES.view(FLOAT8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_decode_float8_is_the_conversion_of_torch(dtype: torch.dtype) -> None:
    pairs = torch.stack((EVERY_CODE.repeat(3), _BYTES.flip(0).view(FLOAT8).repeat(3)), dim=-1)
    for x in (EVERY_CODE, pairs, EVERY_CODE[:, None], pairs.view(2, 3, 256)[:, 1:]):
        got = decode_float8(x, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(got, x.to(dtype), rtol=0, atol=0, equal_nan=True)
