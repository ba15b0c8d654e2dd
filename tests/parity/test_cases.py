"""Which configurations a parity lists, and which it leaves out."""

import pytest

from tunebook.errors import DoesNotFitError, Problem, RequestError, RulesError
from tunebook.parity.cases import list_cases, mark_refused


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


@pytest.mark.parametrize(
    ("over", "gpus", "words"),
    [
        ([], None, "nothing to compare; say what to vary"),
        (["parallelism"], None, "write it as key=value,value"),
        (["parallelism="], None, "write it as key=value,value"),
        ([], "two", "write numbers of GPUs"),
        ([], "0,1", "write numbers of GPUs"),
        (["parallelism=ddp,ddp"], None, "the same name: ddp, ddp"),
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
def test_what_does_not_fit_or_divide_is_left_out(error):
    def plan(case):
        if case.name == "ddp-x8":
            raise error

    cases, _ = mark_refused(list_cases([], ["parallelism=ddp"], "1,2,8", 1), plan)
    assert cases[2].refused == error.message


def test_a_name_that_is_wrong_is_an_error_wherever_it_stands():
    def plan(case):
        if case.name == "zreo2":
            raise RequestError("there is no parallelism 'zreo2'", problem_id="unknown-choice")

    with pytest.raises(RequestError, match="there is no parallelism 'zreo2'"):
        mark_refused(list_cases([], ["parallelism=ddp,zreo2"], None, 1), plan)
