"""Table of training methods: what each reads, its trainer, how it computes, and the numbers that it records.

To add a method: its entry here, its settings in `config.methods` and in `config.schema.CHOICE_SCHEMAS`, its file in
`hydra_configs/method`, and its trainer in `train/methods`; nothing else names it. Rules, plan, data and records read
this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number of metrics.jsonl that only some methods have; of a validation it is named `validation_NAME`.

    Metrics of one chart share its axes.
    """

    chart: str
    line: str
    y_label: str
    is_higher_better: bool = True


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """One method."""

    module: str  # with the functions `trainer_config` and `build`
    reads: str  # what a document of the data is: "documents" or "pairs"
    rows_per_document: int = 1  # in a padded batch; a packed row has all of them
    has_equal_tokens: bool = True  # all trained tokens have the same factor in the loss (see `train.one_pass_head`)
    has_dropout: bool = True
    has_reference: bool = False  # adapters are switched off for one more forward pass of each pair
    loss_label: str = "loss per trained token"
    score: str | None = None  # of `metrics`: a share of the held-out documents, which evidence keeps
    metrics: dict[str, Metric]

    @property
    def unit(self) -> str:
        """One of what it reads."""
        return self.reads.removesuffix("s")


METHODS: dict[str, MethodFacts] = {
    "sft": MethodFacts(module="tunebook.train.methods.sft", reads="documents", metrics={}),
    "dpo": MethodFacts(
        module="tunebook.train.methods.dpo",
        reads="pairs",
        rows_per_document=2,
        has_equal_tokens=False,
        has_dropout=False,
        has_reference=True,
        loss_label="loss per pair",
        score="reward_accuracy",
        metrics={
            "reward_accuracy": Metric(chart="Pairs that are right", line="by their rewards", y_label="share of pairs"),
            "reference_accuracy": Metric(
                chart="Pairs that are right", line="in the reference", y_label="share of pairs"
            ),
            "reward_margin": Metric(chart="Reward margin", line="margin", y_label="chosen - rejected reward"),
            "chosen_log_probability": Metric(chart="Answers", line="chosen", y_label="log-probability of an answer"),
            "rejected_log_probability": Metric(
                chart="Answers", line="rejected", y_label="log-probability of an answer", is_higher_better=False
            ),
        },
    ),
}


# Of every method, by the names that lines of a validation have.
VALIDATION_METRICS: dict[str, Metric] = {
    f"validation_{name}": metric for facts in METHODS.values() for name, metric in facts.metrics.items()
}


def is_higher_better(metric: str) -> bool:
    """Of a validation's metric; of its loss it is not."""
    return metric in VALIDATION_METRICS and VALIDATION_METRICS[metric].is_higher_better


def method_facts(config: RunConfig) -> MethodFacts:
    """The facts of a run's method. Raises: RequestError for a name that is none."""
    if config.method.name not in METHODS:
        names = " or ".join(f"method={name}" for name in METHODS)
        raise RequestError(
            f"method.name={config.method.name}: there is no such method; type {names}", problem_id="method-unknown"
        )
    return METHODS[config.method.name]


def recorded_method(config: Mapping[str, Any]) -> MethodFacts:
    """The facts of the method of a configuration in a run folder or in evidence; older files name none."""
    return METHODS[config.get("method", {}).get("name", "sft")]
