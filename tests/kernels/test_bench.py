"""The whole benchmark on small cases, on the GPU if there is one, else interpreted."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from compress.kernels import bench, measure
from compress.kernels.jit import BenchCase, tl, triton
from compress.kernels.measure import Ceilings, Machine, run_case
from compress.kernels.timing import CudaTimer, clock_seconds

SIZE = 130


# fmt: off
@triton.jit
def _add_kernel(
    x_ptr, y_ptr, out_ptr,
    size, added,
    BLOCK: tl.constexpr,
):
    # fmt: on
    offs = tl.arange(0, BLOCK)
    mask = offs < size
    total = tl.load(x_ptr + offs, mask=mask) + tl.load(y_ptr + offs, mask=mask) + added
    tl.store(out_ptr + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_triton(x, y, added=0.0):
    out = torch.empty_like(x)
    _add_kernel[(1,)](x, y, out, SIZE, added, BLOCK=256)
    return out


def make(device, dtype):
    return tuple(torch.randn(SIZE, device=device, dtype=dtype) for _ in range(2))


def refuse(x, y):
    raise ValueError("x must be something else,\nand more")


RIGHT = BenchCase(
    label="right",
    make=make,
    triton=add_triton,
    plain=torch.add,
    exact=lambda x, y: x.double() + y.double(),
    num_bytes=3 * 2 * SIZE,
    num_flops=SIZE,
    ceiling="memory",
)
EASY = replace(RIGHT, label="easy", goal=0.0)
HARD = replace(RIGHT, label="hard", goal=1e6, ceiling="matrix8")
WRONG = replace(RIGHT, label="wrong", triton=lambda x, y: add_triton(x, y, 0.25))
REFUSED = replace(RIGHT, label="refused", triton=refuse)


@pytest.fixture
def machine(device):
    return Machine(
        device=device,
        dtype=torch.float16,
        timer=CudaTimer() if device.type == "cuda" else clock_seconds,
        cache_bytes=1000,
        memory_bytes=10**6,
        copy_bytes=1 << 16,
        matrix_size=32,
        case_seconds=0.01,
    )


@pytest.fixture
def fast(monkeypatch):
    """The ceilings take the time of a few calls."""
    monkeypatch.setattr(measure, "_CEILING_SECONDS", 0.01)


def run(machine, folder, *cases, options=()):
    """Exit code and the JSON that was written."""
    file = folder / "bench.json"
    cases = [("add", case) for case in cases]
    code = bench.main([f"--json={file}", *options], machine=machine, cases=cases)
    return code, json.loads(file.read_text())


def test_every_case_is_checked_timed_printed_and_written(machine, fast, tmp_path, capsys):
    code, found = run(machine, tmp_path, RIGHT, EASY, HARD, WRONG, REFUSED)
    assert code == 1
    rows = {row["label"]: row for row in found["rows"]}
    statuses = [row["status"] for row in rows.values()]
    assert statuses == ["ok", "ok", "below goal", "wrong", "failed"]
    assert rows["refused"]["note"] == "ValueError: x must be something else,\nand more"
    assert rows["wrong"]["note"].startswith("output 0: error 0.25")
    assert rows["wrong"]["timing"] is None and rows["refused"]["timing"] is None
    timing, ceilings = rows["right"]["timing"], found["ceilings"]
    assert timing["seconds"] > 0 and timing["plain_seconds"] > 0
    assert timing["copies"] == 1 + 4 and timing["cold"]  # 520 bytes of inputs, a cache of 1000
    for row, peak, of in (
        (rows["right"], ceilings["bytes_per_second"] / (6 * SIZE), "of_copy"),
        (rows["right"], ceilings["flops_per_second"] / SIZE, "of_matrix"),
        (rows["right"], ceilings["bytes_per_second"] / (6 * SIZE), "of_goal"),
        (rows["hard"], 2 * ceilings["flops_per_second"] / SIZE, "of_goal"),
    ):
        assert row["timing"][of] == pytest.approx(1 / peak / row["timing"]["seconds"])
    assert found["device"]["triton"] == triton.__version__
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("name ") and printed[1].startswith("measured: copy ")
    assert [text.split()[1] for text in printed[3:8]] == [case["label"] for case in found["rows"]]
    assert "100000000% 2x matrix" in printed[5] and "below goal (" in printed[5]
    assert printed[7].endswith("failed: ValueError: x must be something else,")
    assert printed[8].startswith("2 ok, 1 below goal, 1 wrong, 1 failed; ")


@pytest.mark.parametrize("case", [WRONG, REFUSED], ids=["wrong", "refused"])
def test_one_bad_case_is_a_failure(case, machine, fast, tmp_path):
    assert run(machine, tmp_path, RIGHT, case)[0] == 1


def test_a_missed_goal_is_no_failure(machine, fast, tmp_path):
    assert run(machine, tmp_path, RIGHT, HARD)[0] == 0


def test_what_there_is_no_time_for_is_named(machine, fast, tmp_path):
    code, found = run(replace(machine, total_seconds=0.0), tmp_path, RIGHT)
    assert code == 0
    assert found["rows"][0]["status"] == "not run"
    assert found["rows"][0]["note"] == "out of time: name it with --only"


def test_only_chooses_by_file_and_label(machine, fast, tmp_path):
    _, found = run(machine, tmp_path, RIGHT, EASY, options=["--only", "add e*y"])
    assert [row["label"] for row in found["rows"]] == ["easy"]
    with pytest.raises(SystemExit) as stop:
        run(machine, tmp_path, RIGHT, options=["--only", "sub"])
    assert stop.value.code == 2


def test_each_form_has_inputs_of_its_own(machine):
    """An operation that writes in place, and gives its input back, is not compared with itself."""
    ceilings = Ceilings(bytes_per_second=1.0, flops_per_second=1.0)
    case = replace(
        RIGHT,
        plain=lambda x, y: x.add_(y),
        exact=lambda x, y: x.double() + y.double(),
        triton=lambda x, y: x.copy_(add_triton(x, y)),
    )
    assert run_case("add", case, machine, ceilings).status == "ok"
    case = replace(case, triton=lambda x, y: x)
    assert run_case("add", case, machine, ceilings).status == "wrong"


def test_a_case_that_needs_too_much_memory_is_not_run(machine, fast, tmp_path):
    def make_too_much(device, dtype):
        raise torch.OutOfMemoryError

    code, found = run(machine, tmp_path, replace(RIGHT, make=make_too_much), EASY)
    assert code == 0
    assert [row["status"] for row in found["rows"]] == ["not run", "ok"]
    assert found["rows"][0]["note"] == "out of memory"


def test_declared_cases_are_distinct_and_whole():
    cases = bench.declared_cases()
    assert len({(module, case.label) for module, case in cases}) == len(cases) > 0
    for _, case in cases:
        assert case.num_bytes > 0 and case.ceiling in ("memory", "matrix", "matrix8")
        assert case.ceiling == "memory" or case.num_flops > 0


CARD = SimpleNamespace(
    name="NVIDIA Card", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37,
    L2_cache_size=1 << 26, uuid="12-34",
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "clock"),
    [("echo 580.1, 345 MHz, 1980 MHz, 3201 MHz, '700.00 W'", "1980 MHz"), ("exit 6", None)],
    ids=["answers", "fails"],
)
def test_the_card_is_described(answer, clock, machine, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ $1 = --id=GPU-12-34 ] || exit 1\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: CARD)
    described = bench.describe(replace(machine, device=torch.device("cuda", 0)))
    assert described["name"] == "NVIDIA Card" and described["capability"] == "sm_90"
    assert described.get("clocks.max.sm") == clock
    assert described.get("power.limit") == (clock and "700.00 W")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_names_what_works(capsys):
    assert bench.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no GPU") and "--offline" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "nowhere/x.json"], "--json: 'nowhere' is no folder"),
        (["--arch", "90"], "--arch belongs to --offline"),
        (["--offline", "--arch", "70"], "invalid choice: 70"),
    ],
)
def test_bad_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2 and message in capsys.readouterr().err
