from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tunebook.config.choices import (
    Contamination,
    LauncherName,
    ResumeAnyway,
    Strategy,
    TrackerName,
)
from tunebook.config.compose import compose
from tunebook.config.frozen import plain_config
from tunebook.config.identity import (
    changed_settings,
    config_hash,
    default_of,
    result_settings,
)
from tunebook.config.keys import ABSENT
from tunebook.config.launchers import LauncherConfig
from tunebook.config.schema import ModelConfig, RunConfig, TrackingConfig, ZeroConfig
from tunebook.files import sha256_text
from tunebook.plan.architecture import with_layers


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, title="another"),
        lambda config: replace(config, outputs="/elsewhere"),
        lambda config: replace(config, launcher=LauncherConfig(name=LauncherName.slurm)),
        lambda config: replace(config, tracking=TrackingConfig(name=TrackerName.wandb)),
        lambda config: replace(config, training=replace(config.training, resume="never")),
        lambda config: replace(config, training=replace(config.training, resume_anyway=[ResumeAnyway.data])),
        lambda config: replace(config, training=replace(config.training, save_in_background=False)),
        lambda config: replace(config, dataset=replace(config.dataset, num_workers=7)),
        lambda config: replace(config, evaluation=replace(config.evaluation, contamination=Contamination.disabled)),
        lambda config: replace(config, hardware=replace(config.hardware, memory_gib=8.0, host_memory_gib=64.0)),
        lambda config: replace(config, model=replace(config.model, one_pass_head=True)),
        lambda config: replace(config, activation=replace(config.activation, mlp_tile_tokens=64)),
    ],
)
def test_launcher_and_outputs_do_not_change_the_hash(
    run_config: RunConfig, change: Callable[[RunConfig], RunConfig]
) -> None:
    assert change(run_config) != run_config
    assert config_hash(change(run_config)) == config_hash(run_config)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, training=replace(config.training, seed=0)),
        lambda config: replace(config, optimizer=replace(config.optimizer, learning_rate=1e-3)),
        lambda config: replace(config, parallelism=ZeroConfig(strategy=Strategy.zero2)),
        lambda config: replace(config, model=replace(config.model, path="book:recipes/other/model")),
        lambda config: replace(config, model=replace(config.model, compile_layers=True)),
    ],
)
def test_what_a_run_trains_changes_its_hash(run_config: RunConfig, change: Callable[[RunConfig], RunConfig]) -> None:
    assert config_hash(change(run_config)) != config_hash(run_config)


def test_facts_of_layers_are_not_in_the_hash() -> None:
    config = compose("dolly3b_ray_zero3_offload", []).config
    assert config.model.facts is not None
    before = config_hash(config)
    config.model.facts = with_layers(config.model.facts)
    assert config_hash(config) == before
    config.model.facts.num_layers += 1
    assert config_hash(config) != before


def test_the_hash_is_of_the_settings_that_differ_from_their_defaults() -> None:
    """So a key that is added to the schema later changes no hash until it is set."""
    config = plain_config(model=ModelConfig(name="a/b"))
    changed = {
        "evaluation.tasks": [], "model.name": "a/b", "optimizer.learning_rate": 0.0, "parallelism.strategy": "single",
        "training.max_length": 0,
    }  # fmt: skip
    assert config_hash(config) == sha256_text(json.dumps(changed))


def test_missing_key_of_a_record_is_at_its_default(run_config: RunConfig) -> None:
    own = result_settings(run_config)
    recorded = copy.deepcopy(own)
    del recorded["model"]["template_date"], recorded["optimizer"]["beta2"]
    assert changed_settings(recorded, own) == []
    own["optimizer"]["beta2"] = 0.95
    assert changed_settings(recorded, own) == [("optimizer.beta2", 0.999, 0.95)]
    assert changed_settings(own, recorded) == [("optimizer.beta2", 0.95, 0.999)]


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("training.seed", 42),
        ("parallelism.mixed_precision", "autocast"),
        ("dataset.parts.mine.ignore_keys", []),
        ("dataset.synthetic.max_tokens", 4096),
        ("dataset.nothing", ABSENT),
        ("nothing.at.all", ABSENT),
    ],
)
def test_the_default_of_a_key(key: str, default: object) -> None:
    assert default_of(key) == default
