"""Several processes on one model: the result of one process, and one end for all of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import budget, run
from compress.calib.replay import BlockReplay
from compress.distributed import Ranks, deal_out
from compress.export.verify import verify_checkpoint
from compress.models.checkpoint import open_checkpoint
from tests.compress.test_quantize import files
from tests.factory import tiny_model
from tests.forked import start, start_ranks

# 5 samples in batches of 2: shares of 2 and 3 samples, the last batch smaller than the others.
SMALL = ["--calib-samples", "5", "--calib-length", "64", "--offline"]
BATCH_TOKENS = 128
GROUPS = ["--set", "scheme.weights.group_size=32"]
BASE = {name: ["--recipe", f"{name}-w4a16", *GROUPS] for name in ("rtn", "gptq", "awq")}
CASES: dict[str, list[str]] = {
    **BASE,
    "gptaq": [*BASE["gptq"], "--set", "method.asymmetry=1.0"],
    "gptq-sequential": [*BASE["gptq"], "--set", "true_sequential=true"],
    "rtn-kv": [*BASE["rtn"], "--set", "scheme.kv_cache.strategy=head"],
    "w8a8-static": ["--recipe", "w8a8", "--set", "scheme.activations.dynamic=false"],
    "budget": [*BASE["rtn"], "--set", "budget.bits_per_weight=4.5"],
}
# Rounded activations and a search between near ties magnify the last bits of a sum, so that only
# the first block can be compared code by code.
CHAOTIC = ("w8a8-static",)
EXACT = ("rtn", "rtn-kv", "budget")  # nothing but statistics in double precision enters


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m")


def command(model: Path, out: Path, *options: str) -> list[str]:
    return ["quantize", str(model), "-o", str(out), *SMALL, *options]


def small_batches() -> None:
    budget.BATCH_TOKENS = run.BATCH_TOKENS = BATCH_TOKENS  # type: ignore[attr-defined]


def rows(out: Path) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = json.loads((out / "compress.json").read_text())["report"][
        "layers"
    ]
    return [row | {"seconds": 0} for row in layers]


def sometimes(cases: Iterable[str], always: Collection[str]) -> list[Any]:
    """`cases` as parameters, those not in `always` for the slow tests."""
    return [
        name if name in always else pytest.param(name, marks=pytest.mark.slow) for name in cases
    ]


@pytest.mark.parametrize("name", sometimes(CASES, ("rtn", "gptq")))
def test_two_processes_give_what_one_gives(name: str, llama: Path, tmp_path: Path) -> None:
    from compress.export.formats import read_linear, read_scheme

    one, two = tmp_path / "one", tmp_path / "two"
    alone = start(tmp_path / "one.log", command(llama, one, *CASES[name]), prepare=small_batches)
    assert alone.wait() == 0, alone.output
    ranks = start_ranks(tmp_path, command(llama, two, *CASES[name]), 2, prepare=small_batches)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output + ranks[1].output
    assert ranks[1].output == ""
    assert "quantizing blocks: 2/2" in ranks[0].output
    assert verify_checkpoint(two).ok
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    if name in EXACT:
        expected, got = files(one), files(two)
        del expected["compress.json"], got["compress.json"]
        assert got == expected
        assert rows(two) == rows(one)
    first, second = open_checkpoint(one), open_checkpoint(two)
    assert first.tensors.keys() == second.tensors.keys()
    assert first.config == second.config
    scheme_for = read_scheme(first.config)
    changed = total = 0
    for row, other in zip(rows(one), rows(two), strict=True):
        assert other["relative_error"] == pytest.approx(row["relative_error"], rel=0.1)
        if name in CHAOTIC and ".layers.0." not in row["name"]:
            continue
        scheme = scheme_for(row["name"])
        assert scheme is not None
        a, b = (read_linear(each, row["name"], scheme) for each in (first, second))
        torch.testing.assert_close(b.scale, a.scale, rtol=1e-4, atol=0)
        torch.testing.assert_close(b.input_scale, a.input_scale, rtol=1e-5, atol=0)
        changed += int((a.codes != b.codes).sum())
        total += a.codes.numel()
    assert changed < 1e-3 * total


def fail_in_second_block() -> None:
    """On rank 1 the block with index 1 meets a value that is not finite."""
    small_batches()
    if os.environ.get("RANK") == "1":
        _at_second_call(lambda: (_ for _ in ()).throw(ValueError("down_proj: not finite")))


def bug_in_second_block() -> None:
    small_batches()
    if os.environ.get("RANK") == "1":
        _at_second_call(lambda: {}["missing"])  # type: ignore[index]


def killed_in_second_block() -> None:
    small_batches()
    if os.environ.get("RANK") == "1":
        _at_second_call(lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail_first_in_second_block() -> None:
    small_batches()
    if os.environ.get("RANK") == "0":
        _at_second_call(lambda: (_ for _ in ()).throw(ValueError("down_proj: not finite")))


def _at_second_call(act: Callable[[], object]) -> None:
    work, calls = BlockReplay.collect, iter((lambda: None, act))

    def collect(self: BlockReplay, *args: Any, **options: Any) -> torch.Tensor:
        next(calls)()
        return work(self, *args, **options)

    BlockReplay.collect = collect  # type: ignore[method-assign]


# Name -> what goes wrong, exit codes, and what the two ranks say.
ENDS: dict[str, tuple[Callable[[], None], list[int], list[str | None]]] = {
    "error": (
        fail_in_second_block,
        [2, 2],
        ["block 1: process 1: down_proj: not finite; finished", "block 1: down_proj: not finite"],
    ),
    "error-on-first": (
        fail_first_in_second_block,
        [2, 1],
        ["block 1: down_proj: not finite; finished", None],
    ),
    "bug": (bug_in_second_block, [1, 1], ["process 1: KeyError: 'missing'", "KeyError"]),
    "killed": (killed_in_second_block, [1, -9], ["another process of this run has ended", None]),
}


@pytest.mark.parametrize("name", sometimes(ENDS, ("error",)))
def test_the_end_of_one_process_is_the_end_of_all_and_the_run_resumes(
    name: str, llama: Path, tmp_path: Path
) -> None:
    prepare, codes, said = ENDS[name]
    out = tmp_path / "out"
    arguments = command(llama, out, *BASE["rtn"], "-q")
    ranks = start_ranks(tmp_path, arguments, 2, prepare=prepare)
    began = time.monotonic()
    assert [rank.wait() for rank in ranks] == codes
    assert time.monotonic() - began < 60
    for rank, text in zip(ranks, said, strict=True):
        if text is None:
            assert rank.output == ""
        else:
            assert rank.output.startswith("compress: error: ")
            assert text in rank.output
            assert "Traceback" not in rank.output
    assert not out.exists()
    again = start_ranks(tmp_path, [*arguments, "--resume"], 2, prepare=small_batches)
    assert [rank.wait() for rank in again] == [0, 0], again[0].output
    arguments = command(llama, tmp_path / "whole", *BASE["rtn"])
    whole = start(tmp_path / "whole.log", arguments, prepare=small_batches)
    assert whole.wait() == 0
    file = "model.safetensors"
    assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_resume_with_another_number_of_processes_is_refused(llama: Path, tmp_path: Path) -> None:
    arguments = command(llama, tmp_path / "out", *BASE["gptq"])
    ranks = start_ranks(tmp_path, arguments, 2, prepare=fail_in_second_block)
    assert [rank.wait() for rank in ranks] == [2, 2]
    alone = start(tmp_path / "one.log", [*arguments, "--resume"], prepare=small_batches)
    assert alone.wait() == 2
    assert "number of processes" in alone.output


def test_fewer_batches_than_processes_is_refused_before_the_work(
    llama: Path, tmp_path: Path
) -> None:
    arguments = command(llama, tmp_path / "out", *BASE["rtn"], "--calib-samples", "2")
    ranks = start_ranks(tmp_path, arguments, 2, prepare=small_batches)
    assert [rank.wait() for rank in ranks] == [2, 1]
    assert "2 samples in batches of 2 make 1, too few for 2 processes: use more" in ranks[0].output
    assert ranks[1].output == ""
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "size"), [(5, 2, 2), (5, 2, 3), (128, 8, 3), (17, 1, 4)]
)
def test_shares_are_whole_batches_and_cover_every_sample_once(
    num_samples: int, batch_size: int, size: int
) -> None:
    shares = [Ranks(rank=rank, size=size).share(num_samples, batch_size) for rank in range(size)]
    assert [i for share in shares for i in range(num_samples)[share]] == list(range(num_samples))
    assert all(share.start % batch_size == 0 for share in shares)
    sizes = [-(-(share.stop - share.start) // batch_size) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_deal_out_gives_the_dearest_work_to_the_idlest() -> None:
    assert deal_out([3, 9, 4, 2], 2) == [1, 0, 1, 1]
    assert deal_out([5, 1], 3) == [0, 1]
    assert deal_out([1, 2, 3], 1) == [0, 0, 0]


def test_one_rank_does_plain_work() -> None:
    alone, tensor = Ranks(), torch.ones(3)
    alone.add(tensor)
    alone.maximum(tensor)
    assert torch.equal(alone.concat(tensor), torch.ones(3))
    assert alone.first(lambda: 7) == alone.from_rank(7, 0) == 7
    with pytest.raises(ValueError, match="mine"), alone.together():
        raise ValueError("mine")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        "-m torch.distributed.run --nproc-per-node 2",
        "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
        " --mixed_precision no --dynamo_backend no",
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers_start_it(launcher: str, llama: Path, tmp_path: Path) -> None:
    options = [*BASE["rtn"], "--calib-samples", "3", "--calib-length", "2048"]
    arguments = {name: command(llama, tmp_path / name, *options) for name in ("one", "two")}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name, starter in (("one", []), ("two", launcher.split())):
        done = subprocess.run(
            [sys.executable, *starter, "-m", "compress", *arguments[name]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one.pop("compress.json") != two.pop("compress.json")  # it notes how many there were
    assert one == two
