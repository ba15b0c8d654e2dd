"""Rules about the method: what its trainer takes, and which of its losses read which settings."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import DpoLoss, Overlong, TrainOn
from tunebook.config.schema import CHOICE_SCHEMAS, DpoConfig, RunConfig
from tunebook.facts.methods import method_facts
from tunebook.plan.rules.frame import Finding, rule

_READ_SMOOTHING = (DpoLoss.sigmoid, DpoLoss.robust, DpoLoss.exo_pair)


@rule("method-settings-mismatch", "method.name", "method=dpo or method=sft")
def method_settings_mismatch(config: RunConfig) -> Iterator[str]:
    """Require the settings of the method: they come with its choice, `method=dpo`, and not with its name alone."""
    schema = CHOICE_SCHEMAS["method"][config.method.name]
    if type(config.method) is not schema:
        yield f"name={config.method.name} and the settings of another method"


@rule("method-without-sequence-groups", "parallelism.sequence_group_size", "parallelism.sequence_group_size=1")
def method_without_sequence_groups(config: RunConfig) -> Iterator[str]:
    """Refuse rows shared by several GPUs for a method that weights tokens: a GPU has a part of an answer only."""
    if config.parallelism.sequence_group_size > 1 and not method_facts(config).has_equal_tokens:
        yield f"method={config.method.name} weights each answer's tokens by its loss, and a GPU would have a part of it"


@rule("method-without-one-pass-head", "model.one_pass_head", "model.one_pass_head=false")
def method_without_one_pass_head(config: RunConfig) -> Iterator[str]:
    """Refuse the head in one pass for a method that weights tokens: it needs one factor for all of a step."""
    if config.model.one_pass_head and not method_facts(config).has_equal_tokens:
        yield f"method={config.method.name} weights each answer's tokens by its loss"


@rule("method-without-dropout", "peft.dropout", "peft.dropout=0")
def method_without_dropout(config: RunConfig) -> Iterator[str]:
    """Refuse dropout for a method that compares the model with its reference, as TRL: the difference would be noise."""
    if config.peft.dropout and not method_facts(config).has_dropout:
        yield f"method={config.method.name} trains without dropout, and dropout={config.peft.dropout:g}"


@rule("pairs-settings")
def pairs_settings(config: RunConfig) -> Iterator[Finding]:
    """Refuse settings of documents that pairs do not have.

    Only the answers are trained on: a prompt is the same on both sides. A side that is split has no other side."""
    if method_facts(config).reads != "pairs":
        return
    data, name = config.dataset, f"method={config.method.name}"
    if data.train_on is TrainOn.everything:
        yield Finding(f"{name} trains on the answers of pairs", "dataset.train_on", "dataset.train_on=auto")
    if data.overlong is Overlong.split:
        yield Finding(f"{name} cannot split a pair", "dataset.overlong", "dataset.overlong=cut, drop or refuse")


@rule("best-metric-unknown", "training.best_metric")
def best_metric_unknown(config: RunConfig) -> Iterator[Finding]:
    """Refuse a metric for the best model and early stopping that the method's validation does not compute."""
    known = ["validation_loss", *(f"validation_{name}" for name in method_facts(config).metrics)]
    if config.training.best_metric not in known:
        message = f"method={config.method.name} validates by {', '.join(known)}"
        yield Finding(message, fix="training.best_metric=validation_loss")


@rule("dpo-label-smoothing", "method.label_smoothing")
def dpo_label_smoothing(config: RunConfig) -> Iterator[Finding]:
    """Refuse label smoothing with a loss that does not read it, and exo_pair without it, which would be infinite."""
    method = config.method
    if not isinstance(method, DpoConfig):
        return
    loss, smoothing = method.loss_type, method.label_smoothing
    if smoothing and loss not in _READ_SMOOTHING:
        yield Finding(f"loss_type={loss.name} does not read {smoothing:g}", fix="method.label_smoothing=0")
    if loss is DpoLoss.exo_pair and not smoothing:
        yield Finding("loss_type=exo_pair needs more than 0", fix="method.label_smoothing=0.001")
