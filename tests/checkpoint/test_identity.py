"""What may differ between a checkpoint and the run that resumes from it, and what allows it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.identity import differences, identity_of, require_same
from tunebook.checkpoint.record import Identity, read_record
from tunebook.config.choices import Offload, PeftMethod, ResumeAnyway, Strategy
from tunebook.config.identity import result_settings
from tunebook.config.schema import FsdpConfig, ParallelismConfig, RunConfig, ZeroConfig
from tunebook.data.prepared import PartCounts, Prepared, PreparedPart
from tunebook.errors import RequestError

MakeCheckpoint = Callable[..., Path]


def changes(saved: Identity, current: Identity) -> dict[str, str | None]:
    """Each difference, and the value of `training.resume_anyway` that allows it; None if nothing does."""
    texts: dict[str, str | None] = {}
    for difference in differences(saved, current):
        texts.setdefault(difference.text, difference.allowed_by and difference.allowed_by.name)
    return texts


def with_settings(identity: Identity, **values: Any) -> Identity:
    """The identity with `section__key` of its settings changed."""
    settings = copy.deepcopy(identity.settings)
    for name, value in values.items():
        section, key = name.split("__")
        settings[section][key] = value
    return replace(identity, settings=settings)


def test_settings_that_change_nothing_are_not_compared(identity: Identity) -> None:
    changed = with_settings(
        identity,
        training__save_every_steps=7,
        training__keep_checkpoints=9,
        training__log_every_steps=3,
        evaluation__tasks=["arc"],
        hardware__memory_gib=3.0,
        model__path="/moved/to/here",
        dataset__path="/moved/too",
        peft__rank=4,  # of a whole model
    )
    assert changes(replace(changed, config_sha256="1" * 64), identity) == {}


@pytest.mark.parametrize(
    ("change", "text", "allowed_by"),
    [
        ({"data_sha256": "1" * 64}, "its data have the hash 111111111111..., not dddddddddddd...", "data"),
        ({"tokenizer_sha256": "1" * 64}, "its tokenizer is another", "data"),
        ({"chat_template_sha256": "1" * 64}, "its chat template is another", "template"),
        ({"world_size": 1}, "the number of ranks was 1 and is 2", "world_size"),
        ({"world_size": 1, "strategy": "single"}, "the number of ranks was 1 and is 2", "world_size"),
        ({"strategy": "zero2"}, "parallelism was zero2 and is single or ddp", None),
        ({"peft": "lora"}, "peft was lora and is full", None),
    ],
    ids=["data", "tokenizer", "template", "ranks", "single", "strategy", "adapter"],
)
def test_a_difference_and_its_name(
    identity: Identity, change: dict[str, Any], text: str, allowed_by: str | None
) -> None:
    assert changes(replace(identity, **change), identity)[text] == allowed_by


def test_settings_that_change_the_result_are_named_and_allowed_together(identity: Identity) -> None:
    rate, seed = identity.settings["optimizer"]["learning_rate"], identity.settings["training"]["seed"]
    changed = with_settings(identity, optimizer__learning_rate=0.5, training__seed=7)
    expected = f"optimizer.learning_rate was 0.5 and is {rate}, training.seed was 7 and is {seed}"
    assert changes(changed, identity) == {expected: "config"}


def test_a_refusal_names_all_that_must_be_allowed(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, identity: Identity
) -> None:
    theirs = replace(identity, data_sha256="1" * 64, chat_template_sha256="1" * 64)
    checkpoint = make_checkpoint(tmp_path, 4, identity=theirs)
    record = read_record(checkpoint)
    with pytest.raises(RequestError) as differs:
        require_same(checkpoint, record, identity, [ResumeAnyway.data])
    assert differs.value.problem_id == "checkpoint-differs"
    assert "'training.resume_anyway=[data,template]'" in differs.value.message
    require_same(checkpoint, record, identity, [ResumeAnyway.data, ResumeAnyway.template])
    with pytest.raises(RequestError) as impossible:
        require_same(checkpoint, record, replace(identity, peft="lora"), list(ResumeAnyway))
    assert impossible.value.problem_id == "checkpoint-of-another-run"
    adapter = make_checkpoint(tmp_path, 5, identity=replace(identity, peft="lora"))
    with pytest.raises(RequestError, match="tunebook export --merge"):
        require_same(adapter, read_record(adapter), identity, list(ResumeAnyway))


@pytest.mark.parametrize(
    ("peft", "key", "value"),
    [
        ("full", "optimizer__name", "adamw_8bit"),
        ("lora", "peft__rank", 4),
        ("lora", "peft__use_dora", True),
        ("lora", "peft__rank_pattern", {"q_proj": 4}),
        ("lora", "peft__target_modules", ["q_proj"]),
    ],
)
def test_an_optimizer_or_adapter_of_other_tensors_cannot_be_loaded(
    identity: Identity, peft: str, key: str, value: object
) -> None:
    own = replace(identity, peft=peft)
    assert set(changes(with_settings(own, **{key: value}), own).values()) == {None}


def test_a_model_that_was_moved_is_the_same(identity: Identity) -> None:
    assert changes(replace(identity, model=identity.model | {"name": "/elsewhere"}), identity) == {}
    other = replace(identity, model=identity.model | {"config_sha256": "1" * 64})
    assert set(changes(other, identity).values()) == {None}


ROUND_ROBIN = ZeroConfig(strategy=Strategy.zero2, round_robin_gradients=True)
NVME = ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.nvme)
SHARDED = FsdpConfig(strategy=Strategy.fsdp)


def identity_with(identity: Identity, config: RunConfig, parallelism: ParallelismConfig, ranks: int = 2) -> Identity:
    settings = result_settings(replace(config, parallelism=parallelism))
    return replace(identity, strategy=parallelism.strategy.name, world_size=ranks, settings=settings)


@pytest.mark.parametrize(
    ("parallelism", "allowed_by"),
    [(ROUND_ROBIN, "world_size"), (SHARDED, "world_size"), (NVME, None)],
    ids=["zero2", "fsdp", "nvme"],
)
def test_shards_are_resharded_for_another_number_of_ranks_but_not_those_on_nvme(
    identity: Identity, config: RunConfig, parallelism: ParallelismConfig, allowed_by: str | None
) -> None:
    two, four = (identity_with(identity, config, parallelism, ranks) for ranks in (2, 4))
    assert changes(two, four) == {"the number of ranks was 2 and is 4": allowed_by}


@pytest.mark.parametrize(
    ("saved", "current"),
    [(ROUND_ROBIN, ZeroConfig(strategy=Strategy.zero2)), (SHARDED, ROUND_ROBIN)],
    ids=["round robin", "strategies"],
)
def test_another_layout_cannot_be_loaded(
    identity: Identity, config: RunConfig, saved: ParallelismConfig, current: ParallelismConfig
) -> None:
    found = changes(*(identity_with(identity, config, parallelism) for parallelism in (saved, current)))
    assert None in found.values()


def test_the_identity_of_a_run(config: RunConfig, tmp_path: Path, identity: Identity) -> None:
    prepared = Prepared(
        folder=tmp_path, fingerprint="9" * 64, content_sha256="d" * 64, kind="conversations", max_length=64,
        tokenizer_sha256="e" * 64, chat_template_sha256="f" * 64, template_date=None, records=[], notes=[],
        seconds=0.0, train=PreparedPart(folder=tmp_path, counts=PartCounts()), validation=None, was_cached=False,
    )  # fmt: skip
    assert identity_of(config, prepared, None) == identity
    adapter = replace(config, peft=replace(config.peft, method=PeftMethod.lora))
    assert identity_of(adapter, prepared, "1" * 64).peft == "lora"
    assert identity_of(adapter, prepared, "1" * 64).model["weights_fingerprint"] == "1" * 64


@pytest.mark.parametrize(
    ("peft", "then", "is_same"),
    [("lora", "2", False), ("lora", "1", True), ("lora", None, True), ("full", "2", True)],
)
def test_only_an_adapter_needs_the_weights_that_it_started_from(
    identity: Identity, peft: str, then: str | None, is_same: bool
) -> None:
    """Unless they were not recorded."""
    own = replace(identity, peft=peft, model=identity.model | {"weights_fingerprint": "1"})
    theirs = replace(own, model=identity.model | {"weights_fingerprint": then})
    assert (changes(theirs, own) == {}) is is_same
