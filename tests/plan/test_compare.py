"""`plan --compare`: a row for each value, refusals with their reason, what is typed wrongly."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tunebook.errors import RequestError
from tunebook.plan import draft
from tunebook.plan.alternatives import compare_plans

from .plans import NO_GPU


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(draft, "detect_machine", lambda: NO_GPU)


def printed(recipe, overrides, compared, width=160):
    console = Console(file=io.StringIO(), width=width)
    code = compare_plans(recipe, overrides, [], [compared], console)
    return code, console.file.getvalue()


def table(recipe, overrides, compared):
    code, text = printed(recipe, overrides, compared)
    return code, [line.split() for line in text.splitlines()]


def test_strategies_side_by_side():
    code, lines = table("qwen3b_zero2", ["hardware=volta"], "parallelism=ddp,zero2,fsdp,hsdp")
    assert code == 0
    rows = {line[0].removeprefix("parallelism="): line[1:] for line in lines[1:]}
    assert int(rows["zero2"][0]) < int(rows["fsdp"][0])
    assert rows["ddp"][2:5] == ["does", "not", "fit:"]  # 16 bytes of states for 3.086 billion parameters are 46 GiB
    assert rows["zero2"][2] == rows["fsdp"][2] == "fits:"
    assert rows["hsdp"][:3] == ["-", "refused:", "hsdp-group"]


def test_the_exit_code_is_that_of_the_best():
    assert table("qwen3b_zero2", ["hardware=volta"], "parallelism=ddp,zero2")[0] == 0
    assert table("qwen3b_zero2", ["hardware=volta", "parallelism=ddp"], "training.seed=0,1")[0] == 3


@pytest.mark.parametrize(
    "compared",
    [["parallelism"], ["parallelism=ddp"], ["=a,b"], ["seed=1,1"], ["a=1,2", "b=1,2"]],
)
def test_what_is_no_comparison_is_refused(compared):
    with pytest.raises(RequestError) as raised:
        compare_plans("quickstart", [], [], compared, Console())
    assert raised.value.problem_id in ("compare-form", "override-form")
