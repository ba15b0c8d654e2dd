"""The configurations of a parity, and those that it refuses."""

import pytest

from tunebook.config.choices import MasterWeights
from tunebook.errors import DoesNotFitError, Problem, RequestError, RulesError
from tunebook.parity.cases import list_cases, mark_refused, weights_alike, words_set_aside


def names(*args, **kwargs):
    return [case.name for case in list_cases([], *args, **kwargs)]


def test_every_combination_the_gpus_changing_fastest():
    assert names(["parallelism=ddp,zero2"], "1,2", 20) == ["ddp-x1", "ddp-x2", "zero2-x1", "zero2-x2"]


def test_a_case_is_an_ordinary_run_of_so_many_steps():
    (case, _) = list_cases(["training.seed=3"], ["packing=padded,isolated"], None, 20)
    assert case.varied == ("packing=padded",)
    assert case.overrides[0] == "training.seed=3"
    assert case.overrides[-2:] == ("training.max_steps=20", "packing=padded")
    assert {"evaluation=none", "training.log_every_steps=1", "training.resume=never"} <= set(case.overrides)


def test_a_name_is_one_folder():
    assert names(["model.path=a/b,c d"], None, 1) == ["a_b", "c_d"]
    assert names(["model.path=a/b,a b,."], None, 1) == ["a_b-1", "a_b-2", ".-3"]


def test_a_name_that_no_file_system_takes_is_cut_and_numbered():
    assert names([f"title=x,{'y' * 300}"], "1,2", 1) == ["x-x1", "x-x2", f"{'y' * 80}-3", f"{'y' * 80}-4"]


def test_commas_inside_brackets_and_quotes_belong_to_a_value():
    listed = list_cases([], ["peft.target_modules=[q_proj],[q_proj,v_proj]", "title='a,b',c"], None, 1)
    assert [case.varied for case in listed] == [
        ("peft.target_modules=[q_proj]", "title='a,b'"),
        ("peft.target_modules=[q_proj]", "title=c"),
        ("peft.target_modules=[q_proj,v_proj]", "title='a,b'"),
        ("peft.target_modules=[q_proj,v_proj]", "title=c"),
    ]


def test_no_run_stops_early_or_loads_an_earlier_step():
    typed = ["training.load_best_at_end=true", "training.early_stopping_patience=3", "training.seed=3"]
    (case, _) = list_cases(typed, ["parallelism=ddp,zero2"], None, 20)
    assert {"training.load_best_at_end=false", "training.early_stopping_patience=null"} <= set(case.overrides)
    assert not set(typed[:2]) & set(case.overrides)


def test_the_words_that_no_configuration_gets_are_named():
    typed = [
        *["training.seed=3", "evaluation=quickstart", "evaluation.limit=5", "training.save_every_steps=5"],
        *["training.resume=never", "parallelism=ddp", "hardware.gpus_per_node=4"],
    ]
    aside = words_set_aside(typed, ["parallelism=ddp,zero2"], "1,2")
    assert aside == [*typed[1:4], "parallelism=ddp", "hardware.gpus_per_node=4"]
    (case, *_) = list_cases(typed, ["parallelism=ddp,zero2"], "1,2", 20)
    assert [word for word in case.overrides if word in typed] == [
        *["training.seed=3", "training.resume=never", "training.resume=never", "parallelism=ddp"]
    ]
    assert words_set_aside(["evaluation.limit=5", "parallelism=ddp"], ["evaluation=none,quickstart"], None) == []


@pytest.mark.parametrize(("typed", "steps"), [("7", 7), ("null", 20), ("0", 20)])
def test_how_long_the_runs_are_is_an_option(typed, steps):
    with pytest.raises(RequestError, match=rf"training.max_steps={typed}: .* type --steps {steps} in its place"):
        list_cases([f"training.max_steps={typed}"], ["parallelism=ddp,zero2"], None, 20)


@pytest.mark.parametrize(
    ("over", "gpus", "words"),
    [
        ([], None, "nothing to compare; say what to vary"),
        (["parallelism"], None, "write it as key=value,value"),
        (["parallelism="], None, "write it as key=value,value"),
        ([], "two", "write numbers of GPUs"),
        ([], "0,1", "write numbers of GPUs"),
        (["parallelism=ddp,ddp"], None, "the same name: ddp, ddp"),
        (
            ["training.seed=0"],
            None,
            "only one configuration is named, training.seed=0, .* --over training.seed=0,",
        ),
        ([], "2", "only one configuration is named, hardware.gpus_per_node=2, .* such as --gpus 2,4"),
        (["training.max_steps=5,10"], None, "training.max_steps=5: all runs .* type --steps 5 in its place"),
    ],
)
def test_words_that_cannot_be_read(over, gpus, words):
    with pytest.raises(RequestError, match=words) as caught:
        names(over, gpus, 20)
    assert caught.value.problem_id == "parity-request"


def refusing(*refused):
    def plan(case):
        if case.name in refused:
            raise RulesError([Problem(id="some-rule", key="a.key", message=f"{case.name} is forbidden", fix="a.key=b")])
        return case.name

    return plan


def test_a_case_that_a_rule_forbids_is_listed_with_its_reason():
    cases, reference = mark_refused(list_cases([], ["parallelism=single,ddp"], "1,2", 1), refusing("single-x2"))
    assert reference == "single-x1"
    assert [case.refused for case in cases] == [None, "single-x2 is forbidden", None, None]


def test_a_reference_that_cannot_run_is_an_error():
    with pytest.raises(RulesError, match="single-x2 is forbidden"):
        mark_refused(list_cases([], ["parallelism=single,ddp"], "2", 1), refusing("single-x2"))


def test_nothing_to_compare_with_is_an_error():
    with pytest.raises(RequestError, match=r"nothing to compare ddp-x1 with.*\n  single-x1: single-x1 is forbidden"):
        mark_refused(list_cases([], ["parallelism=ddp,single"], "1", 1), refusing("single-x1"))


@pytest.mark.parametrize(
    "error",
    [DoesNotFitError("needs 90 GiB"), RequestError("12 documents cannot be dealt to 8", problem_id="batch-too-small")],
)
def test_cases_that_do_not_fit_or_divide_are_refused(error):
    def plan(case):
        if case.name == "ddp-x8":
            raise error

    cases, _ = mark_refused(list_cases([], ["parallelism=ddp"], "1,2,8", 1), plan)
    assert cases[2].refused == error.message


def test_wrong_name_is_an_error_in_every_case():
    def plan(case):
        if case.name == "zreo2":
            raise RequestError("there is no parallelism 'zreo2'", problem_id="unknown-choice")

    with pytest.raises(RequestError, match="there is no parallelism 'zreo2'"):
        mark_refused(list_cases([], ["parallelism=ddp,zreo2"], None, 1), plan)


def test_a_frozen_base_is_in_one_format_in_all_that_are_compared():
    cases = list_cases(["peft=lora"], ["parallelism=ddp,zero2"], "1", 1)
    alike = weights_alike(cases, [MasterWeights.bf16, MasterWeights.fp32])
    assert [case.overrides[-1] for case in alike] == ["precision.master_weights=fp32"] * 2
    assert weights_alike(cases, [MasterWeights.bf16] * 2) == cases
    varied = list_cases(["peft=lora"], ["precision.master_weights=fp32,bf16"], None, 1)
    assert weights_alike(varied, [MasterWeights.bf16, MasterWeights.fp32]) == varied
