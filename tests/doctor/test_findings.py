"""Findings as JSON and as a table, and their exit code."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tunebook.doctor.findings import (
    Finding,
    Kind,
    Level,
    exit_code_of,
    finding_of,
    finding_of_error,
    listed,
    show_findings,
)
from tunebook.errors import Problem, RequestError
from tunebook.hardware.bandwidth import Bandwidth
from tunebook.hardware.nvidia_smi import Topology

from .conftest import measured, topology_of

OK = Finding(id="swap", kind=Kind.system, what="no swap")
WARNING = Finding(id="swap", kind=Kind.system, level=Level.warning, what="swap in use", fix="swapoff")
ERROR = Finding(id="swap", kind=Kind.system, level=Level.error, what="swap is broken", fix="reboot")
LONG = (
    "a sentence about this machine that goes on and on for more than one line of a terminal, with a path /a/b/c in it"
)
FINDINGS = [
    Finding(id="swap", kind=Kind.system, what="no swap"),
    Finding(id="shm-size", kind=Kind.system, level=Level.error, what=LONG, fix="docker run --shm-size=16g"),
    Finding(id="gpus-found", kind=Kind.gpus, what="8 x NVIDIA H100 [80 GB]"),
    Finding(id="topology", kind=Kind.links, level=Level.warning, what="slow", fix="faster"),
]


@pytest.mark.parametrize(("findings", "code"), [([], 0), ([OK, WARNING], 0), ([OK, ERROR, WARNING], 2)])
def test_only_errors_end_with_2(findings: list[Finding], code: int) -> None:
    assert exit_code_of(findings) == code


def test_every_key_is_always_there() -> None:
    assert OK.to_json() == {
        "id": "swap", "kind": "system", "level": "ok", "what": "no swap", "fix": None, "data": {},
    }  # fmt: skip
    assert WARNING.to_json()["fix"] == "swapoff"


@pytest.mark.parametrize(("level", "fix"), [(Level.ok, "swapoff"), (Level.error, None), (Level.warning, None)])
def test_a_fix_belongs_to_what_is_wrong(level: Level, fix: str | None) -> None:
    with pytest.raises(AssertionError, match="warnings and errors have a fix"):
        Finding(id="swap", kind=Kind.system, level=level, what="x", fix=fix)


@pytest.mark.parametrize(("is_error", "level"), [(True, Level.error), (False, Level.warning)])
def test_a_rules_problem_keeps_its_id_and_fix(is_error: bool, level: Level) -> None:
    name = "bf16-on-volta"
    problem = Problem(id=name, key="precision.compute", message="no bf16", fix="precision=fp32", is_error=is_error)
    finding = finding_of(problem, Kind.recipe)
    assert (finding.id, finding.level, finding.fix) == ("bf16-on-volta", level, "precision=fp32")
    assert finding.what == "precision.compute: no bf16"


def test_error_refers_to_its_explanation() -> None:
    finding = finding_of_error(
        RequestError("no such recipe", problem_id="unknown-recipe"), Kind.recipe, otherwise="recipe"
    )
    assert (finding.id, finding.level, finding.fix) == (
        "unknown-recipe", Level.error, "tunebook explain unknown-recipe",
    )  # fmt: skip
    assert finding_of_error(RequestError("?"), Kind.recipe, otherwise="recipe").id == "recipe"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 1, 3, 5, 6, 7], "0-1, 3, 5-7")]
)
def test_numbers_for_people(numbers: list[int], text: str) -> None:
    assert listed(numbers) == text


def shown(findings: list[Finding], topology: Topology | None = None, bandwidth: Bandwidth | None = None) -> str:
    console = Console(file=io.StringIO(), width=80)
    show_findings(findings, topology, bandwidth, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_grouped_in_the_order_of_kinds_with_the_fix_below() -> None:
    lines = [line.rstrip() for line in shown(FINDINGS).splitlines()]
    assert lines == [
        "gpus",
        "ok       8 x NVIDIA H100 [80 GB]",
        "links",
        "warning  slow",
        "         fix: faster",
        "         more: tunebook explain topology",
        "system",
        "ok       no swap",
        "error    a sentence about this machine that goes on and on for more than one",
        "         line of a terminal, with a path /a/b/c in it",
        "         fix: docker run --shm-size=16g",
        "         more: tunebook explain shm-size",
        "1 error, 1 warning, 2 ok",
    ]


def test_explanation_is_referred_to_once() -> None:
    error = RequestError("there is no recipe 'nope'", problem_id="unknown-recipe")
    lines = [line.strip() for line in shown([finding_of_error(error, Kind.recipe, otherwise="recipe")]).splitlines()]
    assert lines == [
        "recipe", "error    there is no recipe 'nope'", "more: tunebook explain unknown-recipe",
        "1 error, 0 warnings, 0 ok",
    ]  # fmt: skip


def test_all_is_well() -> None:
    assert shown(FINDINGS[:1]).splitlines()[-1] == "0 errors, 0 warnings, 1 ok"


def test_the_matrix_of_eight_gpus_fits_with_their_cards() -> None:
    text = shown(FINDINGS, topology_of("h100x8"))
    lines = text.splitlines()
    (row,) = [line.split() for line in lines if line.lstrip().startswith("GPU5")]
    assert row[:9] == ["GPU5", *["NV18"] * 5, "-", "NV18", "NV18"]
    assert row[9:] == ["1", "mlx5_2", "PXB"]
    assert max(map(len, lines)) <= 80


def test_one_gpu_needs_no_matrix() -> None:
    assert "how the GPUs" not in shown(FINDINGS, topology_of("one_gpu"))


def test_what_was_measured() -> None:
    text = shown(FINDINGS, bandwidth=measured(25.0, 360.5, sizes=(2**20, 2**30)))
    table = [line.split() for line in text.splitlines() if "iB " in line]
    assert table == [
        ["1", "MiB", "25", "/", "25", "25", "/", "25"],
        ["1", "GiB", "360", "/", "360", "360", "/", "360"],
    ]
    assert "measured by nccl over 4 ranks, GB/s (algorithm / bus bandwidth)\n" in text
    assert "measured by" not in shown(FINDINGS, bandwidth=measured(sizes=()))
