"""Findings as programs get them, and the exit code that they ask for."""

from __future__ import annotations

import pytest

from tunebook.doctor.findings import (
    Finding,
    Kind,
    Level,
    exit_code_of,
    finding_of,
    finding_of_error,
    listed,
    size_text,
)
from tunebook.errors import Problem, RequestError

OK = Finding(id="swap", kind=Kind.system, what="no swap")
WARNING = Finding(id="swap", kind=Kind.system, level=Level.warning, what="swap in use", fix="swapoff")
ERROR = Finding(id="swap", kind=Kind.system, level=Level.error, what="swap is broken", fix="reboot")


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
    with pytest.raises(AssertionError, match="a fix belongs to what is wrong"):
        Finding(id="swap", kind=Kind.system, level=level, what="x", fix=fix)


@pytest.mark.parametrize(("is_error", "level"), [(True, Level.error), (False, Level.warning)])
def test_a_rules_problem_keeps_its_id_and_fix(is_error: bool, level: Level) -> None:
    name = "bf16-on-volta"
    problem = Problem(id=name, key="precision.compute", message="no bf16", fix="precision=fp32", is_error=is_error)
    finding = finding_of(problem, Kind.recipe)
    assert (finding.id, finding.level, finding.fix) == ("bf16-on-volta", level, "precision=fp32")
    assert finding.what == "precision.compute: no bf16"


def test_an_error_says_where_more_is_said() -> None:
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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2**16, "64 KiB"), (2**26, "64 MiB"), (5 * 2**29, "2.5 GiB")],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
