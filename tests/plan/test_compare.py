"""`plan --compare`: a row for each value, refusals with their reason, what is typed wrongly."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tunebook.errors import RequestError
from tunebook.plan import draft
from tunebook.plan.compare import compare_plans, only_comparison, split_compared

from .plans import NO_GPU


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(draft, "detect_machine", lambda: NO_GPU)


def printed(recipe, overrides, compared, width=160):
    console = Console(file=io.StringIO(), width=width)
    code = compare_plans(recipe, overrides, [], compared, console)
    return code, console.file.getvalue()


def table(recipe, overrides, compared):
    code, text = printed(recipe, overrides, compared)
    return code, [line.split() for line in text.splitlines()]


def test_strategies_side_by_side():
    code, lines = table("qwen3b_zero2", ["hardware=volta"], "parallelism=ddp,zero2,fsdp,fsdp_offload,hsdp")
    assert code == 0
    rows = {line[0]: line[1:] for line in lines[2:]}
    # 3.086 billion parameters on 8 GPUs: 4 bytes each of weights and of gradients, 8 of moments, 4 of master copy.
    # ZeRO-2 has gradients twice: of one pass, and the sum of several.
    assert rows["ddp"][:4] == ["11.5", "11.5", "23.0", "11.5"]
    assert rows["ddp"][-1] == "no"
    assert int(rows["zero2"][-2]) < int(rows["fsdp"][-2])  # tokens/s: 17,289 for 17,578 where both were measured
    # It makes room for whole parameters of which a rank has a piece: 0.1 GiB more, of each of the two.
    assert rows["zero2"][:4] == ["11.5", "2.9", "4.3", "0.2"]
    assert rows["zero2"][-1] == "yes"
    assert rows["fsdp_offload"][-2] == "-"
    assert rows["hsdp"] == ["refused"]
    assert rows["hsdp:"] == ["refused"]
    assert rows["fix:"][:1] == ["parallelism.shard_group_size=4"]


def test_auto_is_one_of_them():
    _, lines = table("qwen3b_zero2", ["hardware=volta"], "parallelism=auto,ddp,fsdp_grad_op,fsdp")
    rows = {line[0]: line[1:] for line in lines[2:]}
    assert rows["auto"] == rows["fsdp"]  # alone it needs no activations recomputed
    assert rows["auto"] not in (rows["ddp"], rows["fsdp_grad_op"])


def test_the_exit_code_is_that_of_the_best():
    assert table("qwen3b_zero2", ["hardware=volta"], "parallelism=ddp,zero2")[0] == 0
    assert table("qwen3b_zero2", ["hardware=volta", "parallelism=ddp"], "training.seed=0,1")[0] == 3


def test_a_host_that_is_too_small_fits_nothing():
    overrides = ["hardware=hopper", "parallelism=zero3_offload"]
    code, text = printed("llama2_70b_fsdp_1node", overrides, "hardware.host_memory_gib=500,4000")
    assert code == 0
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert rows["500"].split()[-1] == "no"
    assert rows["4000"].split()[-1] == "yes"
    assert rows["500:"].endswith("to a host of 500 GiB")
    assert "4000:" not in rows


def test_what_is_refused_for_the_same_reason_is_named_together():
    _, text = printed("quickstart", ["training.seed=0,1"], "optimizer.learning_rate=1e-3,1e-4")
    assert text.count("lists several values") == 1
    assert "1e-3, 1e-4: refused\n  override 'training.seed=0,1' lists several values" in text


def test_no_word_or_number_is_cut_in_a_narrow_terminal():
    _, text = printed("qwen3b_zero2", ["hardware=volta"], "parallelism=fsdp_grad_op,zero2,none_such", width=80)
    title, parts, *lines = text.splitlines()
    assert title == "Each GPU or rank (estimated): memory in GiB and tokens/s by parallelism"
    width = int(parts.removeprefix("(its parts are shown in a terminal of ").removesuffix(" columns)"))
    rows = [line.split() for line in lines]
    assert rows[0] == ["parallelism", "total", "tokens/s", "fits"]
    assert [row[0] for row in rows[1:4]] == ["fsdp_grad_op", "zero2", "none_such"]
    assert rows[2][-1] == "yes"
    assert "…" not in text
    for columns, is_whole in ((width, True), (width - 1, False)):
        _, text = printed("qwen3b_zero2", ["hardware=volta"], "parallelism=fsdp_grad_op,zero2,none_such", columns)
        assert ("activations  overhead  total" in text) is is_whole


def test_a_second_key_is_refused_with_what_to_type():
    assert only_comparison(["parallelism=ddp,fsdp"]) == "parallelism=ddp,fsdp"
    with pytest.raises(RequestError, match=r"3 times.*such as parallelism=ddp packing=padded --compare hardware=a,b,"):
        only_comparison(["parallelism=ddp,fsdp", "packing=padded,isolated", "hardware=a,b"])


@pytest.mark.parametrize("compared", ["parallelism", "parallelism=", "parallelism=ddp", "=a,b", "a=b,,c"])
def test_what_is_no_comparison_is_refused_with_an_example(compared):
    with pytest.raises(RequestError, match="--compare parallelism=ddp,zero2,zero3,fsdp"):
        split_compared(compared)


@pytest.mark.parametrize(
    ("listed", "values"),
    [
        ("[q_proj],[q_proj,k_proj]", ["[q_proj]", "[q_proj,k_proj]"]),
        ("['a,b'],['c]']", ["['a,b']", "['c]']"]),
        ('"a,b",c', ['"a,b"', "c"]),
        (r"'it\'s, a',b", [r"'it\'s, a'", "b"]),
        ("{a:1,b:2},null", ["{a:1,b:2}", "null"]),
    ],
)
def test_commas_inside_a_value_are_its_own(listed, values):
    assert split_compared(f"key={listed}") == ("key", values)


def test_a_list_is_shown_as_it_is_typed():
    _, lines = table("zero2_lora", ["hardware=hopper"], "peft.target_modules=[q_proj],[q_proj,k_proj]")
    assert [line[0] for line in lines[2:]] == ["[q_proj]", "[q_proj,k_proj]"]


def test_a_value_that_is_there_twice():
    with pytest.raises(RequestError, match="a value is repeated"):
        split_compared("training.seed=1,1")
    assert split_compared("training.seed= 1, 2") == ("training.seed", ["1", "2"])
