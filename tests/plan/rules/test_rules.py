"""Every rule, broken by the smallest change to a sound configuration."""

from __future__ import annotations

import re
import shlex

import pytest

from tunebook.config import schema
from tunebook.config.choices import (
    Attention,
    LauncherName,
    PackingMode,
    PeftMethod,
    Weights,
)
from tunebook.config.compose import parse_overrides
from tunebook.config.schema import (
    SlurmConfig,
)
from tunebook.plan.rules import (
    RULES,
    check,
)

from .rule_cases import (
    CASES,
    DDP,
    GPT_OSS,
    LEAKING,
    MEASURED,
    ON_1,
    PADDED,
    PADDED_DDP,
    SHARED_ROWS,
    SLURM,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}:{case.match[:30]}")
def test_a_change_breaks_its_rule(case, sound, changed):
    before = changed(sound, case.background)
    assert check(before) == [], "the background must be sound by itself"
    broken = changed(before, case.values)
    problems = check(broken)
    assert {problem.id for problem in problems} == {case.id}
    problem = problems[0]
    assert re.search(case.match, problem.message), problem.message
    assert problem.key.split(".")[0] in (*schema.GROUPS, "training")
    assert problem.fix


def test_every_rule_has_a_case():
    assert {rule.id for rule in RULES} == {case.id for case in CASES}


def test_no_two_rules_share_an_id():
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", id) for id in ids)


@pytest.mark.parametrize("limit", ["17", "16:01", "0:17:00", "0:0:1020", "0-1", "0-100", "0", None])
def test_a_time_limit_that_holds_start_warning_and_its_minute_is_sound(limit, sound, changed):
    assert check(changed(sound, SLURM | {"launcher.time_limit": limit})) == []  # 600 + 300 + 60 s, and Slurm rounds up


def test_a_sound_configuration_breaks_nothing(sound):
    assert check(sound) == []


def test_all_problems_are_reported_together_and_errors_first(sound, changed):
    config = changed(sound, {
        "training.deterministic": True,
        "training.resume": "nvr",
        "training.global_samples": None,
    })  # fmt: skip
    problems = check(config)
    assert [problem.id for problem in problems] == [
        "batch-one-way",
        "resume-not-found",
        "flash-attention-not-deterministic",
    ]
    assert [problem.is_error for problem in problems] == [True, True, False]


def test_a_problem_says_what_set_its_key(sound, changed):
    config = changed(sound, {"training.seed": 2**32})
    (problem,) = check(config, lambda key: f"override '{key}=...'")
    assert problem.text() == (
        "training.seed (from override 'training.seed=...'): 4294967296 must be at most 4,294,967,295\n"
        "    fix: training.seed=42   [out-of-range]"
    )


def test_warnings_are_the_ones_a_run_can_live_with():
    assert {rule.id for rule in RULES if not rule.is_error} == {
        "adapter-settings-ignored",
        "model-revision-ignored",
        "optimizer-settings-ignored",
        "dataset-field-ignored",
        "evaluation-never-runs",
        "fp8-scaling-ignored",
        "flash-attention-not-deterministic",
        "parallelism-setting-ignored",
        "system-prompt-ignored",
        "warm-up-ignored",
        "warm-up-longer-than-run",
    }


def fix_of(config, id):
    (found,) = [problem.fix for problem in check(config) if problem.id == id]
    return found


def test_options_that_only_resemble_reserved_ones_are_the_users(sound, changed):
    args = ["--time-min=5", "--nodelist=node1", "--wait-all-nodes=1", "--ntasks-per-core=1", "-HC a100", "-w node1"]
    assert check(changed(sound, SLURM | {"launcher.extra_args": args})) == []


def test_a_list_of_options_is_shown_as_hydra_reads_it(sound, changed):
    args = ["--qos=x", "-N 4", "--time=1", "--constraint=a|b"]
    problems = check(changed(sound, SLURM | {"launcher.extra_args": args}))
    assert {problem.fix for problem in problems} == {"""'launcher.extra_args=["--qos=x","--constraint=a|b"]'"""}
    (word,) = shlex.split(problems[0].fix)
    (override,) = parse_overrides([word])
    assert override.value() == ["--qos=x", "--constraint=a|b"]


def test_packing_that_leaks_is_given_up_at_once_whatever_counts_the_batch(sound, changed):
    bloom = LEAKING
    assert fix_of(changed(sound, bloom), "packing-leaks") == "packing.mode=padded packing.row_length=null"
    by_lengths = fix_of(
        changed(sound, bloom | {"attention.implementation": Attention.varlen_attention}), "packing-leaks"
    )
    assert by_lengths.endswith("attention.implementation=sdpa")


@pytest.mark.parametrize("packing", [PackingMode.isolated, PackingMode.padded])
def test_sinks_are_computed_by_the_varlen_kernel_in_packed_rows(sound, changed, packing):
    gpt_oss = changed(sound, GPT_OSS | {"packing.mode": packing})
    other = changed(gpt_oss, {"attention.implementation": Attention.flash_attention_2})
    kernel = "eager" if packing is PackingMode.padded else "varlen_attention"
    assert fix_of(other, "attention-not-in-model") == f"attention.implementation={kernel}"
    if packing is PackingMode.isolated:
        assert fix_of(gpt_oss, "packing-leaks").startswith("attention.implementation=varlen_attention or packing.mode=")


def test_rows_with_sinks_are_not_shared_and_no_attention_is_suggested_for_it(sound, changed):
    shared = changed(sound, GPT_OSS | SHARED_ROWS | {"attention.implementation": Attention.eager})
    alone = "parallelism.sequence_group_size=1"
    assert [fix_of(shared, f"sequence-group-{name}") for name in ("architecture", "attention")] == [alone, alone]


def test_the_best_model_gets_validations_and_checkpoints_at_once(sound, changed):
    values = {"training.load_best_at_end": True, "dataset.validation_share": 0.1}
    fix = fix_of(changed(sound, values), "best-needs-evaluations")
    assert fix == "training.evaluate_every_steps=100 training.save_every_steps=100"
    short = fix_of(changed(sound, values | {"training.max_steps": 20}), "best-needs-evaluations")
    assert short == "training.evaluate_every_steps=20 training.save_every_steps=20"


def test_a_batch_as_large_as_the_data_still_divides_among_the_gpus(sound, changed):
    values = PADDED_DDP | {"dataset.max_documents": 77, "training.global_samples": 80}
    assert fix_of(changed(sound, values), "batch-larger-than-data") == "training.global_samples=72"
    assert fix_of(changed(sound, values | {"dataset.max_documents": 77} | ON_1), "batch-larger-than-data").endswith(
        "77"
    )


def test_fewer_documents_than_gpus_need_fewer_gpus(sound, changed):
    few = changed(sound, DDP | {"dataset.max_documents": 3})
    assert "hardware.gpus_per_node" in fix_of(few, "batch-larger-than-data")


def test_a_step_of_one_document_is_told_as_one(sound, changed):
    one = DDP | {"training.global_samples": 1}
    assert [p.message for p in check(changed(sound, one))] == [
        "1 document a step is less than one for each of the 8 GPUs"
    ]
    padded = PADDED_DDP | {"training.global_samples": 1}
    assert [p.message for p in check(changed(sound, padded)) if p.id == "batch-not-divisible"] == [
        "1 document does not divide by 8 GPUs; 8 is the smallest that does"
    ]


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("Qwen/Qwen2.5-0.5B", False),
        ("gpt2", False),
        ("01-ai/Yi_1.5", False),
        ("a/b/c", True),
        ("Größe/Modell", True),
        ("org/模型", True),
        ("org/my model", True),
        ("org/", True),
        ("org/-name", True),
        ("org/na--me", True),
        ("org/name.git", True),
        ("org/" + 97 * "a", True),
        ("./folder", False),  # a path, which has its own rule
    ],
)
def test_a_name_that_the_hub_would_not_look_up(sound, changed, name, is_refused):
    assert ("model-name-form" in {p.id for p in check(changed(sound, {"model.name": name}))}) == is_refused


@pytest.mark.parametrize("key", ["dataset.name", "model.tokenizer"])
def test_a_data_set_or_a_tokenizer_is_a_name_or_a_folder(sound, changed, tmp_path, monkeypatch, key):
    """Where ranks start elsewhere it may be a folder that is there and not here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b/c").mkdir(parents=True)
    rule = {"dataset.name": "dataset-name-form", "model.tokenizer": "tokenizer-name-form"}[key]

    def is_refused(name, **other):
        return rule in {problem.id for problem in check(changed(sound, {key: name, **other}))}

    assert [is_refused(name) for name in ("org/name", "name", "a/b/c", str(tmp_path))] == 4 * [False]
    assert [is_refused(name) for name in ("a/b/d", "./name", "org/my data", "org/")] == 4 * [True]
    assert not is_refused("/scratch/d", launcher=SlurmConfig(name=LauncherName.slurm))


def test_a_folder_for_a_name_of_three_parts(sound, changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = changed(sound, {"model.name": "a/b/c"})
    assert fix_of(config, "model-name-form") == "model.name=ORG/NAME"
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/config.json").write_text("{}")
    assert fix_of(config, "model-name-form") == "model.name=null model.path=a/b/c"


def test_the_other_of_two_models_takes_the_place_of_both(sound, changed):
    config = changed(sound, {"model.path": "gptq", "peft.method": PeftMethod.lora})
    assert fix_of(config, "model-not-named").endswith(" or model=hub model.name=Qwen/Qwen2.5-0.5B model.path=null")


def test_a_kernel_that_shares_rows_is_offered_where_the_model_has_it(sound, changed):
    padded = SHARED_ROWS | PADDED | {"attention.implementation": Attention.sdpa}
    fix = "parallelism.sequence_group_size=1"
    assert fix_of(changed(sound, padded), "sequence-group-attention").endswith(f" packing.mode=isolated or {fix}")
    lacks = changed(sound, padded | {"model.facts.measured": MEASURED})
    assert fix_of(lacks, "sequence-group-attention") == fix


def test_random_weights_are_not_quantized(sound, changed):
    values = {"model.name": None, "model.path": "gptq", "peft.method": PeftMethod.lora}
    assert check(changed(sound, values | {"model.weights": Weights.random})) == []
