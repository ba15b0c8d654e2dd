"""A configuration made without Hydra has every section, and only what is given differs from the schema's defaults."""

from __future__ import annotations

from dataclasses import fields

from omegaconf import MISSING

from tunebook.config.choices import Strategy
from tunebook.config.plain import plain_config
from tunebook.config.schema import GROUPS, HardwareConfig, RunConfig


def test_no_section_is_missing_and_the_given_ones_are_taken() -> None:
    hardware = HardwareConfig(gpus_per_node=3)
    config = plain_config(recipe="mine", hardware=hardware)
    assert (config.recipe, config.title, config.hardware) == ("mine", "", hardware)
    assert config.parallelism.strategy is Strategy.single
    missing = [one.name for one in fields(RunConfig) if getattr(config, one.name) == MISSING]
    assert missing == []
    assert {type(getattr(config, group)) for group in GROUPS} == {
        type(getattr(plain_config(), group)) for group in GROUPS
    }


def test_two_do_not_share_a_section() -> None:
    one, other = plain_config(), plain_config()
    one.training.seed += 1
    assert other.training.seed == plain_config().training.seed
