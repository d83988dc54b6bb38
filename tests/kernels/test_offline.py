import pytest

from compress.kernels import offline


def variants(*arches):
    """Every kernel variant with every one of `arches` that it is for."""
    return [
        pytest.param(module, case, arch, id=f"sm_{arch}-{module}-{case.label}")
        for module in offline.KERNEL_MODULES
        for case in offline.module_cases(module)
        for arch in arches
        if arch in case.arches
    ]


def assert_as_meant(result):
    """No spills, shared memory within the chip, and the meant instructions are there."""
    assert result["faults"] == []
    assert 0 < result["registers"] <= 255
    assert result["occupancy"]["blocks"] > 0


@pytest.mark.parametrize("module, case, arch", variants(80, 90))
def test_variant_compiles_as_meant(module, case, arch, offline_results):
    assert_as_meant(offline_results[module, case.label, arch])


@pytest.mark.slow
@pytest.mark.parametrize("module, case, arch", variants(100))
def test_variant_compiles_as_meant_for_blackwell(module, case, arch, blackwell_results):
    assert_as_meant(blackwell_results[module, case.label, arch])


@pytest.mark.parametrize("module", offline.KERNEL_MODULES)
def test_some_variant_of_every_kernel_is_for_each_chip(module):
    for arch in offline.SHARED_LIMIT:
        assert any(arch in case.arches for case in offline.module_cases(module))


def test_matrix_kernels_are_meant_for_tensor_cores():
    meant = {
        (module, case.label): case.meant
        for module in ("paged_attention", "wna16")
        for case in offline.module_cases(module)
    }
    for (module, label), instructions in meant.items():
        assert "load16" in instructions
        if not label.startswith(("merge", "sum")):  # the one without a matrix product
            assert "mma" in instructions, (module, label)


def test_faults_name_what_is_wrong():
    result = offline.CompileResult(
        module="m",
        label="l",
        arch=80,
        num_warps=4,
        registers=255,
        spilled=8,
        static_shared=1_000,
        dynamic_shared=199_000,
        tensor_columns=0,
        counts={"mma": 0, "wgmma": 0, "load16": 1},
        meant=["mma", "wgmma", "load16"],
    )
    assert result.faults == [
        "spills 8 bytes of registers",
        "200000 bytes of shared memory, limit 166912",
        "no mma instruction",
    ]
