"""Facts of optimizers are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers.training_args import OptimizerNames

from tunebook.config.choices import OptimizerName
from tunebook.facts.optimizers import OPTIMIZERS


@pytest.mark.parametrize("name", OptimizerName)
def test_every_optimizer_has_facts_and_a_group_file_and_transformers_knows_it(
    name: OptimizerName, project_root: Path
) -> None:
    facts = OPTIMIZERS[name]
    assert facts.optim in {known.value for known in OptimizerNames}
    group = yaml.safe_load((project_root / "hydra_configs" / "optimizer" / f"{name.name}.yaml").read_text())
    assert group["name"] == name.name
