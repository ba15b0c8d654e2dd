"""Rules about the model, its positions and its chat template."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.book import TRAINING_TEMPLATE
from tunebook.config.choices import ModelPart
from tunebook.config.schema import RunConfig, starts_elsewhere
from tunebook.errors import RequestError
from tunebook.model.base_config import model_folder_problem, non_causal_reason
from tunebook.model.positions import positions_of, yarn_refusal
from tunebook.model.tokenizer_files import read_chat_template
from tunebook.plan.rules.frame import Finding, rule


@rule("model-not-named", "model", "model=ORG/NAME, model=FOLDER, or a recipe")
def model_not_named(config: RunConfig) -> Iterator[str]:
    """Require exactly one of `model.name` and `model.path`: with both it is unclear which weights to train."""
    name, path = config.model.name, config.model.path
    if name and path:
        yield f"model.name={name} and model.path={path} name two models; set one of them to null"
    if not name and not path:
        yield "no model is named"


@rule("model-folder", "model.path", "model=FOLDER")
def model_folder(config: RunConfig) -> Iterator[str]:
    """Refuse a missing folder, or one without config.json; other machines may have what is missing here."""
    is_elsewhere = starts_elsewhere(config) and config.model.facts is not None
    if problem := None if is_elsewhere else model_folder_problem(config.model):
        yield problem


@rule("model-not-causal", fix="name a causal language model; of a model with images, a checkpoint of its text part")
def model_not_causal(config: RunConfig) -> Iterator[Finding]:
    """Refuse a config.json that names another head, which has another loss.

    What transformers has no causal language model for is found earlier.
    """
    if reason := non_causal_reason(config.model):
        yield Finding(reason, "model.path" if config.model.path else "model.name")


@rule("model-parts", "model.train", "'model.train=[language]'")
def model_parts(config: RunConfig) -> Iterator[str]:
    """Require a part to train, and that a model whose facts are known has the parts for images that are named."""
    facts, parts = config.model.facts, config.model.train
    if not parts:
        yield "it names no part to train"
    others = [part.name for part in parts if part is not ModelPart.language]
    if others and facts is not None and facts.measured is not None and not facts.unreached:
        yield f"{facts.architecture} has no {' and no '.join(others)}: it reads text alone"


@rule("length-beyond-model", "training.max_length")
def length_beyond_model(config: RunConfig) -> Iterator[Finding]:
    """Refuse documents longer than the model's positions; rows may be longer: positions restart per document.

    Beyond max_position_embeddings learned positions crash, and the loss at untrained rotary ones means nothing.
    """
    positions, length = positions_of(config.model), config.training.max_length
    if positions is not None and length > positions:
        fix = f"training.max_length={positions}, or a (larger) model.yarn_factor to stretch the positions"
        yield Finding(f"{length} tokens are more than the model's {positions} positions", fix=fix)


@rule("yarn-not-possible", "model.yarn_factor", "model.yarn_factor=null")
def yarn_not_possible(config: RunConfig) -> Iterator[str | Finding]:
    """Refuse to stretch positions that are not plain rotary ones.

    Other positions have no rotation speed to change, or would be stretched twice.
    """
    model = config.model
    if model.yarn_factor is not None and (reason := yarn_refusal(model)) is not None:
        yield f"YaRN cannot stretch this model's positions: {reason}"
    if model.yarn_factor is None and model.yarn_original_positions is not None:
        message = "this has no effect without model.yarn_factor"
        yield Finding(message, "model.yarn_original_positions", "model.yarn_factor=4")


@rule("chat-template-not-found", "model.chat_template", "model.chat_template=FILE, chatml, training or trl:NAME")
def chat_template_not_found(config: RunConfig) -> Iterator[str]:
    """Require the template's file, or the template of TRL, to exist: it decides which tokens are trained on."""
    template = config.model.chat_template
    if template in (None, TRAINING_TEMPLATE):
        return
    try:
        read_chat_template(template)
    except RequestError as error:
        yield str(error)
