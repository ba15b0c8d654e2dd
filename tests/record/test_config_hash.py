from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config.book import resolve_path
from tunebook.config.choices import LauncherName, ResumeAnyway, Source, SpecialText, Strategy, TrackerName
from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import LauncherConfig, MixturePart, RunConfig, TrackingConfig, ZeroConfig
from tunebook.record.config_hash import comparable_config, config_hash, has_hash, hash_anywhere, hashed_settings


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, outputs="/elsewhere"),
        lambda config: replace(config, launcher=LauncherConfig(name=LauncherName.slurm)),
        lambda config: replace(config, tracking=TrackingConfig(name=TrackerName.wandb)),
        lambda config: replace(config, training=replace(config.training, resume="never")),
        lambda config: replace(config, training=replace(config.training, resume_anyway=[ResumeAnyway.data])),
        lambda config: replace(config, training=replace(config.training, save_in_background=False)),
        lambda config: replace(config, dataset=replace(config.dataset, num_workers=7)),
        lambda config: replace(config, model=replace(config.model, path=str(resolve_path(config.model.path)))),
        lambda config: replace(config, model=replace(config.model, one_pass_head=True)),
    ],
    ids=[
        "outputs",
        "launcher",
        "tracking",
        "resume",
        "resume_anyway",
        "save_in_background",
        "num_workers",
        "absolute book path",
        "one_pass_head",
    ],
)
def test_where_and_how_a_run_is_started_does_not_change_its_hash(
    run_config: RunConfig, change: Callable[[RunConfig], RunConfig]
) -> None:
    assert change(run_config) != run_config
    assert config_hash(change(run_config)) == config_hash(run_config)


def test_the_memory_that_was_found_makes_no_other_request_and_what_was_typed_does(run_config: RunConfig) -> None:
    here, there = (replace(run_config, hardware=replace(run_config.hardware, memory_gib=gib)) for gib in (8.0, 16.0))
    assert config_hash(here) != config_hash(there)
    assert hash_anywhere(here, set()) == hash_anywhere(there, set())
    asked = {"hardware.memory_gib"}
    assert hash_anywhere(here, asked) != hash_anywhere(there, asked)
    typed = replace(here, hardware=replace(here.hardware, host_memory_gib=64.0))  # null unless somebody types it
    assert hash_anywhere(typed, set()) != hash_anywhere(here, set())


def test_evidence_tells_how_the_head_is_computed_but_of_what_was_recorded_before(run_config: RunConfig) -> None:
    """Its speed and memory are not those of another way."""
    one, two = (replace(run_config, model=replace(run_config.model, one_pass_head=value)) for value in (True, False))
    assert comparable_config(one)["model"]["one_pass_head"] is True
    assert "one_pass_head" not in comparable_config(two)["model"]


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, training=replace(config.training, seed=0)),
        lambda config: replace(config, optimizer=replace(config.optimizer, learning_rate=1e-3)),
        lambda config: replace(config, parallelism=ZeroConfig(strategy=Strategy.single)),
        lambda config: replace(config, model=replace(config.model, path="book:recipes/other/model")),
        lambda config: replace(config, model=replace(config.model, compile_layers=True)),
    ],
    ids=["seed", "learning_rate", "parallelism", "model", "compile_layers"],
)
def test_what_a_run_trains_changes_its_hash(run_config: RunConfig, change: Callable[[RunConfig], RunConfig]) -> None:
    assert config_hash(change(run_config)) != config_hash(run_config)


def test_a_setting_that_came_later_is_told_only_where_it_is_used(run_config: RunConfig) -> None:
    """What was recorded before there was one still holds."""
    plain = replace(run_config, model=replace(run_config.model, compile_layers=False))
    assert "compile_layers" not in comparable_config(plain)["model"]
    compiled = replace(run_config, model=replace(run_config.model, compile_layers=True))
    assert comparable_config(compiled)["model"]["compile_layers"] is True


def test_the_hash_of_a_frozen_configuration_is_that_of_the_original(tmp_path: Path, run_config: RunConfig) -> None:
    config = replace(run_config, parallelism=ZeroConfig(strategy=Strategy.zero2, overlap_comm=True))
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    assert config_hash(load_config(tmp_path / "run.yaml")) == config_hash(config)


def test_a_hash_of_when_the_book_lay_elsewhere_is_known_again(run_config: RunConfig) -> None:
    there = replace(run_config, dataset=replace(run_config.dataset, path="/old/place/recipes/mine/train.jsonl"))
    then = replace(run_config, dataset=replace(run_config.dataset, path="book:recipes/mine/train.jsonl"))
    assert config_hash(there) != config_hash(then)
    assert has_hash(there, config_hash(then))
    assert has_hash(there, config_hash(there))
    edited = replace(there, optimizer=replace(there.optimizer, learning_rate=1e-3))
    assert not has_hash(edited, config_hash(then))


def test_what_is_counted_of_an_architecture_later_does_not_change_its_hash() -> None:
    config = compose("dolly3b_ray_zero3_offload", []).config
    before = config_hash(config)
    assert config.model.facts is not None and config.model.facts.measured is not None
    config.model.facts.measured.linear_parameters = 1
    config.model.facts.measured.active_parameters = 2
    config.model.facts.measured.largest_parameter = 5
    config.model.facts.measured.unreached_parameters = 3
    config.model.facts.measured.adapters = {"dense": [1, 2]}
    config.model.facts.measured.expert_adapters = {"w2": [3, 4]}
    config.model.facts.measured.saved_beside_experts = {"fp32/adapter/sdpa": [0, 1, 0, 0, 1, 0]}
    config.model.facts.measured.saved_without_autocast = {"cast/full/sdpa": [0, 1, 0, 0, 1, 0]}
    assert config_hash(config) == before
    config.model.facts.measured.parameters += 1
    assert config_hash(config) != before


def test_what_is_not_trained_changes_the_hash_and_nothing_of_models_without_such_parts() -> None:
    config = compose("dolly3b_ray_zero3_offload", []).config
    assert config.model.facts is not None and config.model.facts.measured is not None
    before = config_hash(config)
    assert "unreached" not in hashed_settings(config)["model"]["facts"]["measured"]  # as before there was such a key
    config.model.facts.measured.unreached = ["model.tower"]
    assert config_hash(config) != before


def test_settings_that_came_later_change_no_hash_until_they_are_set(run_config: RunConfig) -> None:
    parts = {"chat": MixturePart(path="chat.jsonl"), "code": MixturePart(path="code.jsonl")}
    mixed = replace(run_config, dataset=replace(run_config.dataset, source=Source.mixture, parts=parts))
    settings = hashed_settings(mixed)
    assert "template_date" not in settings["model"]
    assert {"ignore_keys", "special_tokens_in_content"}.isdisjoint(settings["dataset"])
    assert all("ignore_keys" not in part for part in settings["dataset"]["parts"].values())
    parts = parts | {"code": MixturePart(path="code.jsonl", ignore_keys=["tools"])}
    changes = [
        replace(mixed, model=replace(mixed.model, template_date="2031-12-01")),
        replace(mixed, dataset=replace(mixed.dataset, ignore_keys=["tools"])),
        replace(mixed, dataset=replace(mixed.dataset, special_tokens_in_content=SpecialText.keep)),
        replace(mixed, dataset=replace(mixed.dataset, parts=parts)),
    ]
    assert len({config_hash(config) for config in [mixed, *changes]}) == 5
