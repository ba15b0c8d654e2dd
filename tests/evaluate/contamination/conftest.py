"""Questions about passages in the form of BoolQ, made on the spot: files to train on, and a task of its dev part."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import DatasetConfig, EvaluationConfig, RunConfig

NUM_DEV, NUM_TRAIN, NUM_SHARED = (
    60,
    200,
    12,
)  # questions, of which the first dev ones are about a passage of the train part
_WORDS = [f"{first}{second}" for first in ("ka", "lo", "mi", "ru", "ze", "tan", "sel") for second in "abcdefghijklmnop"]
TASK = """\
task: passages
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/dev.jsonl}}, cache_dir: {folder}/cache}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{passage}}}}\\nQuestion: {{{{question}}}}?\\nAnswer:"
doc_to_target: label
doc_to_choice: ["no", "yes"]
metric_list:
  - metric: acc
metadata: {{version: 1.0}}
"""


@dataclass(frozen=True)
class Passages:
    """The folder of the files, and the questions."""

    folder: Path
    dev: list[dict[str, Any]]
    train: list[dict[str, Any]]

    @property
    def task(self) -> Path:
        """The task file."""
        return self.folder / "passages.yaml"

    def write(self, name: str, questions: Iterable[dict[str, Any]]) -> Path:
        """Write questions as conversations, in another order and with other words around them than the task's."""
        file = self.folder / name
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{one['question']}?\n\nRead this first: {one['passage'].upper()}"},
                    {"role": "assistant", "content": ("No.", "Yes.")[one["label"]]},
                ]
            }
            for one in questions
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file


@pytest.fixture
def passages(tmp_path: Path) -> Passages:
    drawn = random.Random(7)

    def text(number: int) -> str:
        return " ".join(drawn.choices(_WORDS, k=number))

    def question(passage: str) -> dict[str, Any]:
        return {"passage": passage, "question": f"is {text(drawn.randrange(3, 9))}", "label": drawn.randrange(2)}

    train = [question(text(60)) for _ in range(NUM_TRAIN)]
    dev = [question(train[place]["passage"] if place < NUM_SHARED else text(60)) for place in range(NUM_DEV)]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(one) + "\n" for one in dev))
    (tmp_path / "passages.yaml").write_text(TASK.format(folder=tmp_path))
    return Passages(folder=tmp_path, dev=dev, train=train)


@pytest.fixture
def checked_run(
    tmp_path: Path, cpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, RunConfig]]:
    """`checked_run(file, [task], validation_share=0.1)`: a run folder that trains on a file, and its configuration."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))

    def make(
        file: Path,
        tasks: Iterable[Path] = (),
        contamination: Contamination = Contamination.report,
        limit: int | None = None,
        before: bool = False,
        **dataset: Any,
    ) -> tuple[Path, RunConfig]:
        config = replace(
            cpu_config,
            dataset=DatasetConfig(path=str(file), **dataset),
            evaluation=EvaluationConfig(
                tasks=[str(task) for task in tasks], contamination=contamination, limit=limit, before=before
            ),
        )
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        (run / "run.yaml").write_text(config_to_yaml(config))
        return run, config

    return make
