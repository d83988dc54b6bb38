"""Expected numbers are worked out by hand in the comments, or those of `cuda_occupancy.h`."""

import pytest

from compress.kernels.occupancy import SHARED_LIMIT, occupancy


@pytest.mark.parametrize(
    ("arch", "num_warps", "registers", "shared", "blocks", "limits"),
    [
        # 32 registers x 2048 threads are all 65536.
        pytest.param(90, 4, 32, 0, 16, ("registers", "threads"), id="full"),
        pytest.param(90, 1, 16, 0, 32, ("blocks",), id="32-blocks-of-one-warp"),
        # 168 x 32 = 5376 a warp, a quarter has 16384: 3 warps, 12 in all.
        pytest.param(90, 4, 168, 0, 3, ("registers",), id="168-registers"),
        # 88 x 32 = 2816: 23 warps by the whole file, but 5 in each quarter, 20 in all.
        pytest.param(80, 1, 88, 0, 20, ("registers",), id="88-registers-by-quarters"),
        # 81 x 32 = 2592, in units of 256 that is 2816 again.
        pytest.param(80, 1, 81, 0, 20, ("registers",), id="81-registers-are-88"),
        pytest.param(80, 1, 80, 0, 24, ("registers",), id="80-registers"),
        # 255 x 32 -> 8192 a warp, 8 warps in all; 12 warps cannot be launched.
        pytest.param(90, 8, 255, 0, 1, ("registers",), id="255-registers-8-warps"),
        pytest.param(90, 12, 255, 0, 0, ("registers",), id="255-registers-12-warps"),
        # 48 KB + 1 KB: 3 in 164 KB, 4 in 228 KB.
        pytest.param(80, 4, 32, 49152, 3, ("shared memory",), id="48KB-sm_80"),
        pytest.param(90, 4, 32, 49152, 4, ("shared memory",), id="48KB-sm_90"),
        # 228 KB / 6 - 1 KB = 37 KB fits six times, one byte more takes 128.
        pytest.param(90, 4, 32, 37 * 1024, 6, ("shared memory",), id="37KB"),
        pytest.param(90, 4, 32, 37 * 1024 + 1, 5, ("shared memory",), id="37KB-and-a-byte"),
        pytest.param(80, 4, 32, SHARED_LIMIT[80], 1, ("shared memory",), id="all-shared-sm_80"),
        pytest.param(80, 4, 32, SHARED_LIMIT[80] + 1, 0, ("shared memory",), id="too-much-shared"),
        pytest.param(90, 32, 32, 0, 2, ("registers", "threads"), id="1024-threads"),
        pytest.param(90, 33, 16, 0, 0, ("threads",), id="1056-threads"),
        # 4 warps x 64 registers: 2048 a warp, 32 warps; 27 KB: 8 in 228 KB as well.
        pytest.param(100, 4, 64, 27 * 1024, 8, ("registers", "shared memory"), id="both"),
    ],
)
def test_blocks_and_what_limits_them(arch, num_warps, registers, shared, blocks, limits):
    found = occupancy(arch, num_warps=num_warps, registers=registers, shared=shared)
    assert (found.blocks, found.limits) == (blocks, limits)
    assert found.warps == blocks * num_warps
    assert found.fraction == found.warps / 64


@pytest.mark.parametrize(("columns", "blocks"), [(0, 16), (16, 16), (33, 8), (128, 4), (512, 1)])
def test_tensor_memory_limits_blocks_on_sm_100(columns, blocks):
    found = occupancy(100, num_warps=4, registers=32, shared=0, tensor_columns=columns)
    assert found.blocks == blocks
    assert ("tensor memory" in found.limits) == (columns > 0)
