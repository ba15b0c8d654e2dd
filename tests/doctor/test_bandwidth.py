"""The measurement: its formulas, its command, real ranks, and the time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tunebook.doctor import bandwidth as run
from tunebook.doctor.bandwidth import GLOO_SIZES, NCCL_SIZES, collectives_command, measure_bandwidth
from tunebook.hardware.bandwidth import ALL_GATHER, ALL_REDUCE, OPERATIONS, algorithm_gb_per_s, bus_factor, bus_gb_per_s


@pytest.mark.parametrize(
    ("operation", "num_ranks", "factor"),
    [(ALL_REDUCE, 2, 1.0), (ALL_REDUCE, 8, 1.75), (ALL_GATHER, 2, 0.5), (ALL_GATHER, 8, 0.875)],
)
def test_bus_factors_are_those_of_nccl_tests(operation: str, num_ranks: int, factor: float) -> None:
    assert bus_factor(operation, num_ranks) == factor


def test_bandwidths_by_hand() -> None:
    """1 GiB in 5 ms over 4 ranks: 214.7 GB/s, of which 2 x 3/4 or 3/4 is on each link."""
    assert algorithm_gb_per_s(2**30, 0.005) == pytest.approx(214.748, abs=1e-3)
    assert bus_gb_per_s(ALL_REDUCE, 2**30, 0.005, 4) == pytest.approx(322.123, abs=1e-3)
    assert bus_gb_per_s(ALL_GATHER, 2**30, 0.005, 4) == pytest.approx(161.061, abs=1e-3)


def test_the_command_starts_a_rank_for_each_gpu() -> None:
    assert collectives_command(4, "nccl", Path("/a/folder")) == [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4",
        "-m", "tunebook.doctor.bandwidth", "/a/folder", "nccl",
    ]  # fmt: skip


@pytest.mark.slow
def test_two_ranks_measure_every_size_with_both_operations() -> None:
    bandwidth = measure_bandwidth(2, "gloo")
    assert bandwidth.problem is None
    assert bandwidth.wrong is None
    assert [(one.bytes, one.operation) for one in bandwidth.measurements] == [
        (size, operation) for size in GLOO_SIZES for operation in OPERATIONS
    ]
    for one in bandwidth.measurements:
        assert one.runs >= 3
        assert one.algorithm_gb_per_s == pytest.approx(one.bytes / one.seconds / 1e9, abs=6e-4)
        assert one.bus_gb_per_s == pytest.approx(one.algorithm_gb_per_s * bus_factor(one.operation, 2), abs=2e-3)
    best = bandwidth.best(ALL_REDUCE)
    assert best is not None
    assert best.bus_gb_per_s == max(one.bus_gb_per_s for one in bandwidth.measurements if one.operation == ALL_REDUCE)
    assert bandwidth.to_json()["measurements"][0]["bytes"] == GLOO_SIZES[0]


@pytest.fixture
def instead_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    """`instead_of_torchrun(code)`: Python code that runs in its place, with the folder as its argument."""

    def install(code: str) -> None:
        def command(num_ranks: int, backend: str, folder: Path) -> list[str]:
            return [
                sys.executable,
                "-c",
                f"import sys, time, pathlib; folder = pathlib.Path(sys.argv[1]); {code}",
                str(folder),
            ]

        monkeypatch.setattr(run, "collectives_command", command)

    return install


LINE = (
    '{"operation": "all_reduce", "bytes": 8, "runs": 3, "seconds": 1.0, "algorithm_gb_per_s": 2.0, "bus_gb_per_s": 3.0}'
)


def test_a_link_that_hangs_is_given_up_and_what_was_measured_before_is_kept(instead_of_torchrun) -> None:
    instead_of_torchrun(f"(folder / 'measured.jsonl').write_text({LINE!r} + '\\n{{\"oper'); time.sleep(300)")
    bandwidth = measure_bandwidth(2, "nccl", timeout_s=3)
    assert (bandwidth.is_late, bandwidth.problem) == (True, "no answer within 3 s")
    assert [one.bus_gb_per_s for one in bandwidth.measurements] == [3.0]


def test_a_rank_that_fails_says_why(instead_of_torchrun) -> None:
    instead_of_torchrun("(folder / 'failed.1').write_text('NCCL error: unhandled system error'); sys.exit(1)")
    bandwidth = measure_bandwidth(2, "nccl", timeout_s=60)
    assert bandwidth.problem == "it ended with exit code 1; rank 1: NCCL error: unhandled system error"
    assert bandwidth.measurements == []


def test_a_torchrun_that_fails_without_a_rank_is_quoted(instead_of_torchrun) -> None:
    instead_of_torchrun("sys.exit('no module named torch')")
    assert measure_bandwidth(2, "nccl", timeout_s=60).problem == "it ended with exit code 1; no module named torch"


def test_ranks_with_wrong_sums_are_named(instead_of_torchrun) -> None:
    instead_of_torchrun("(folder / 'wrong.0').write_text('all_gather of 8 bytes')")
    assert measure_bandwidth(2, "nccl", timeout_s=60).wrong == ["rank 0: all_gather of 8 bytes"]


@pytest.mark.slow
def test_gpus_that_are_not_there_are_a_problem_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bandwidth = measure_bandwidth(2, "nccl")
    assert bandwidth.problem is not None
    assert "rank 0: " in bandwidth.problem or "rank 1: " in bandwidth.problem


@pytest.mark.multigpu
def test_real_gpus_measure_every_size_and_sum_right() -> None:
    from tunebook.hardware.detect import detect_machine

    num_gpus = len(detect_machine().gpus)
    bandwidth = measure_bandwidth(num_gpus, "nccl")
    assert (bandwidth.problem, bandwidth.wrong) == (None, None)
    assert [(one.bytes, one.operation) for one in bandwidth.measurements] == [
        (size, operation) for size in NCCL_SIZES for operation in OPERATIONS
    ]
