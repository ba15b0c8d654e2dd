"""What a run may differ in from the checkpoint that it goes on from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.identity import differences, identity_of, require_same
from tunebook.checkpoint.record import Identity, read_record
from tunebook.config.choices import Offload, PeftMethod, ResumeAnyway, StateDict, Strategy
from tunebook.config.identity import result_settings
from tunebook.config.schema import FsdpConfig, ParallelismConfig, RunConfig, ZeroConfig
from tunebook.data.prepared import PartCounts, Prepared, PreparedPart
from tunebook.errors import RequestError

MakeCheckpoint = Callable[..., Path]


def refusal(make_checkpoint: MakeCheckpoint, run: Path, theirs: Identity, own: Identity, *anyway: ResumeAnyway) -> str:
    """What is said of going on from a checkpoint of `theirs`; empty when it is allowed."""
    checkpoint = make_checkpoint(run, 4, identity=theirs)
    try:
        require_same(checkpoint, read_record(checkpoint), own, list(anyway))
    except RequestError as error:
        return f"{error.problem_id}: {error.message}"
    return ""


@pytest.fixture
def said(make_checkpoint: MakeCheckpoint, tmp_path: Path, identity: Identity) -> Callable[..., str]:
    """What is said when a checkpoint with some values changed is gone on from."""

    def refused(*anyway: ResumeAnyway, **changes: Any) -> str:
        return refusal(make_checkpoint, tmp_path, replace(identity, **changes), identity, *anyway)

    return refused


def with_settings(identity: Identity, **values: Any) -> dict[str, Any]:
    """The settings with `section__key` changed."""
    settings = copy.deepcopy(identity.settings)
    for name, value in values.items():
        section, key = name.split("__")
        settings[section][key] = value
    return settings


def test_its_own_is_gone_on_from(said: Callable[..., str]) -> None:
    assert said() == ""


def test_settings_that_change_nothing_are_not_compared(said: Callable[..., str], identity: Identity) -> None:
    changed = with_settings(
        identity,
        training__save_every_steps=7,
        training__keep_checkpoints=9,
        training__log_every_steps=3,
        evaluation__tasks=["arc"],
        hardware__memory_gib=3.0,
        model__path="/moved/to/here",
        dataset__path="/moved/too",
    )
    assert said(settings=changed, config_sha256="1" * 64) == ""


def test_settings_that_change_the_result_are_named(said: Callable[..., str], identity: Identity) -> None:
    rate = identity.settings["optimizer"]["learning_rate"]
    changed = with_settings(identity, optimizer__learning_rate=0.5, training__seed=7)
    text = said(settings=changed)
    assert text.startswith("checkpoint-differs: ")
    assert f"optimizer.learning_rate was 0.5 and is {rate}" in text
    assert f"training.seed was 7 and is {identity.settings['training']['seed']}" in text
    assert "'training.resume_anyway=[config]'; to start again: training.resume=never" in text
    assert said(ResumeAnyway.config, settings=changed) == ""
    assert said(ResumeAnyway.data, settings=changed) == text


@pytest.mark.parametrize(
    ("change", "text", "name"),
    [
        ({"data_sha256": "1" * 64}, "its data have the hash 111111111111..., not dddddddddddd...", "data"),
        ({"tokenizer_sha256": "1" * 64}, "its tokenizer is another", "data"),
        ({"chat_template_sha256": "1" * 64}, "its chat template is another", "template"),
        ({"world_size": 1}, "the number of ranks was 1 and is 2", "world_size"),
        ({"world_size": 1, "strategy": "single"}, "the number of ranks was 1 and is 2", "world_size"),
    ],
    ids=["data", "tokenizer", "template", "world_size", "single"],
)
def test_each_difference_is_allowed_by_its_name(
    said: Callable[..., str], change: dict[str, Any], text: str, name: str
) -> None:
    assert text in said(**change)
    assert f"'training.resume_anyway=[{name}]'" in said(**change)
    assert said(ResumeAnyway[name], **change) == ""
    others = [word for word in ResumeAnyway if word.name != name]
    assert text in said(*others, **change)


def test_all_that_must_be_named_is_said_at_once(said: Callable[..., str]) -> None:
    change = {"data_sha256": "1" * 64, "chat_template_sha256": "1" * 64}
    assert "'training.resume_anyway=[data,template]'" in said(ResumeAnyway.data, **change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"strategy": "zero2"}, "parallelism was zero2 and is single or ddp"),
        ({"peft": "lora"}, "peft was lora and is full"),
        (
            {"model": {"name": "other/model", "revision": "main", "config_sha256": None, "weights": "pretrained"}},
            "the model was other/model@main and is ",
        ),
    ],
    ids=["strategy", "adapter", "model"],
)
def test_what_cannot_be_loaded_is_refused_whatever_is_allowed(
    said: Callable[..., str], change: dict[str, Any], text: str
) -> None:
    refused = said(*ResumeAnyway, **change)
    assert refused.startswith("checkpoint-of-another-run: ")
    assert text in refused


@pytest.mark.parametrize(
    ("own_peft", "key", "value", "text"),
    [
        ("full", "optimizer__name", "adamw_8bit", "optimizer.name was adamw_8bit and is adamw"),
        ("lora", "peft__rank", 4, "peft.rank was 4 and is 16"),
        ("lora", "peft__use_dora", True, "peft.use_dora was true and is false"),
        ("lora", "peft__rank_pattern", {"q_proj": 4}, "was {'q_proj': 4} and is {}"),
        ("lora", "peft__target_modules", ["q_proj"], "target_modules was ['q_proj'] and is []"),
    ],
)
def test_an_optimizer_or_adapter_of_other_tensors_is_refused_whatever_is_allowed(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, identity: Identity,
    own_peft: str, key: str, value: object, text: str,
) -> None:  # fmt: skip
    own = replace(identity, peft=own_peft)
    theirs = replace(own, settings=with_settings(identity, **{key: value}))
    refused = refusal(make_checkpoint, tmp_path, theirs, own, *ResumeAnyway)
    assert refused.startswith("checkpoint-of-another-run: ")
    assert text in refused


def test_an_adapters_settings_are_nothing_to_a_whole_model(said: Callable[..., str], identity: Identity) -> None:
    assert said(settings=with_settings(identity, peft__rank=4)) == ""


def test_a_model_that_was_moved_is_the_same(said: Callable[..., str], identity: Identity) -> None:
    assert said(model=identity.model | {"name": "/elsewhere"}) == ""
    assert "the model was that with the config.json 111111111111..." in said(
        model=identity.model | {"config_sha256": "1" * 64}
    )


DEALT = ZeroConfig(strategy=Strategy.zero2, round_robin_gradients=True)
SHARDED, FULL = (FsdpConfig(strategy=Strategy.fsdp, state_dict=kind) for kind in (StateDict.sharded, StateDict.full))


def identity_with(identity: Identity, config: RunConfig, parallelism: ParallelismConfig, ranks: int) -> Identity:
    settings = result_settings(replace(config, parallelism=parallelism))
    return replace(identity, strategy=parallelism.strategy.name, world_size=ranks, settings=settings)


@pytest.mark.parametrize(
    "parallelism",
    [
        ZeroConfig(strategy=Strategy.zero1),
        ZeroConfig(strategy=Strategy.zero2, round_robin_gradients=True),
        ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.cpu),
        FsdpConfig(strategy=Strategy.fsdp),
    ],
    ids=["zero1", "zero2", "zero3-offload", "fsdp"],
)
def test_shards_are_cut_anew_for_another_number_of_ranks_if_that_is_allowed(
    identity: Identity, config: RunConfig, parallelism: ParallelismConfig
) -> None:
    two, four = (identity_with(identity, config, parallelism, ranks) for ranks in (2, 4))
    (found,) = differences(two, four)
    assert found.allowed_by is ResumeAnyway.world_size
    assert found.text == "the number of ranks was 2 and is 4"


def test_what_is_on_nvme_disks_fits_its_number_of_ranks_only(identity: Identity, config: RunConfig) -> None:
    zero = ZeroConfig(strategy=Strategy.zero3, offload_optimizer=Offload.nvme)
    two, four = (identity_with(identity, config, zero, ranks) for ranks in (2, 4))
    (found,) = differences(two, four)
    assert found.allowed_by is None
    assert list(differences(two, two)) == []


@pytest.mark.parametrize(
    ("theirs", "own", "text"),
    [
        (DEALT, ZeroConfig(strategy=Strategy.zero2), "parallelism.round_robin_gradients was true and is false"),
        (SHARDED, FULL, "parallelism.state_dict was sharded and is full"),
        (SHARDED, DEALT, "parallelism was fsdp and is zero2"),
    ],
    ids=["zero", "fsdp", "strategies"],
)
def test_a_checkpoint_that_is_laid_out_otherwise_cannot_be_loaded(
    identity: Identity, config: RunConfig, theirs: ParallelismConfig, own: ParallelismConfig, text: str
) -> None:
    found, *_ = differences(*(identity_with(identity, config, one, 2) for one in (theirs, own)))
    assert (found.text, found.allowed_by) == (text, None)


def test_the_identity_of_a_run(config: RunConfig, tmp_path: Path, identity: Identity) -> None:
    part = PreparedPart(folder=tmp_path, counts=PartCounts())
    prepared = Prepared(
        folder=tmp_path,
        fingerprint="9" * 64,
        content_sha256="d" * 64,
        kind="conversations",
        max_length=64,
        tokenizer_sha256="e" * 64,
        chat_template_sha256="f" * 64,
        template_date=None,
        records=[],
        notes=[],
        seconds=0.0,
        train=part,
        validation=None,
        was_cached=False,
    )
    assert identity_of(config, prepared, None) == identity
    adapter = replace(config, peft=replace(config.peft, method=PeftMethod.lora))
    assert identity_of(adapter, prepared, None).peft == "lora"
    assert identity_of(adapter, prepared, "1" * 64).model["weights_fingerprint"] == "1" * 64


def over(identity: Identity, peft: str, fingerprint: str | None) -> Identity:
    """The identity of a run that started from weights with this fingerprint."""
    return replace(identity, peft=peft, model=identity.model | {"weights_fingerprint": fingerprint})


def test_an_adapter_does_not_go_on_over_other_weights(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, identity: Identity
) -> None:
    theirs, own = over(identity, "lora", "1" * 64), over(identity, "lora", "2" * 64)
    refused = refusal(make_checkpoint, tmp_path, theirs, own, *ResumeAnyway)
    assert refused.startswith("checkpoint-of-another-run: ")
    assert "weights was 1111" in refused


def test_the_same_base_one_not_recorded_and_that_of_a_whole_model_are_no_difference(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, identity: Identity
) -> None:
    for peft, then in (("lora", "1" * 64), ("lora", None), ("full", "2" * 64)):
        theirs = over(identity, peft, then)
        assert refusal(make_checkpoint, tmp_path, theirs, over(identity, peft, "1" * 64)) == ""
