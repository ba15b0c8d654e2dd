"""What goes on with an evaluation: of a training the words that go on with that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import RunConfig
from tunebook.evaluate.going_on import what_goes_on


@pytest.mark.parametrize(
    ("resume", "when", "command"),
    [
        ("auto", "after", "the same command"),
        ("never", "after", "the same command without training.resume=never"),
        ("auto", "before", "the same command with --run-folder '{run}'"),
        ("never", "before", "the same command with --run-folder '{run}' without training.resume=never"),
        ("never", "eval-2026-11-21T10-00-00Z-17", "the same command"),
    ],
)
def test_what_was_typed_goes_on_where_a_training_does(
    cpu_config: RunConfig, tmp_path: Path, resume: str, when: str, command: str
) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    cpu_config.training.resume = resume
    (run / "run.yaml").write_text(config_to_yaml(cpu_config))
    assert what_goes_on(run, when) == command.format(run=run)
