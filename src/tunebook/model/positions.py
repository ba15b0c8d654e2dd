"""How long a document a model can have; positions stretched by YaRN (arXiv:2309.00071); those of images in packed rows.

YaRN keeps the fast rotations, slows the slow ones by `model.yarn_factor`, and sharpens the attention. So a model whose
positions end at 32,768 learns documents of 131,072 tokens with a factor of 4. The weights stay as they are; the trained
model's config.json says how it was stretched.

Some models for images give a token three positions: time, height and width (M-RoPE, arXiv:2409.12191). transformers
counts them through a row, so in packed rows they are computed here for each document, by the model's own function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.facts.architectures import YARN_ARCHITECTURES
from tunebook.model.base_config import read_config

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_STRETCHED = ("rope_parameters", "max_position_embeddings")  # keys of a config that say how
_PLAIN = "default"  # transformers' word for rotary positions that nothing stretches


def positions_of(model: ModelConfig) -> int | None:
    """The most tokens of a document by the model's facts, stretched or not; None if the facts are unknown."""
    if model.facts is None:
        return None
    if model.yarn_factor is None:
        return model.facts.max_position_embeddings
    return round((model.yarn_original_positions or model.facts.max_position_embeddings) * model.yarn_factor)


def yarn_refusal(model: ModelConfig) -> str | None:
    """Why YaRN cannot stretch the model's positions; None if it can, as far as is known without loading it.

    Raises: as `read_config`.
    """
    facts = model.facts
    if facts is None:
        return None
    if facts.architecture not in YARN_ARCHITECTURES:
        return f"it has not been tested with {facts.architecture}"
    config = (read_config(model) if model.path is not None else None) or {}  # the hub's cache needs a slow import
    text = config.get("text_config", config)
    return _rope_refusal(text.get("rope_parameters") or text.get("rope_scaling") or {})


def _rope_refusal(rope: dict[str, Any]) -> str | None:
    kind = rope.get("rope_type") or rope.get("type") or _PLAIN
    if any(isinstance(value, dict) for value in rope.values()):
        return "its layers have positions of several kinds"
    return None if kind == _PLAIN else f"the model comes with stretched positions ({kind})"


def stretch_positions(architecture: PretrainedConfig, model: ModelConfig) -> None:
    """Have transformers compute the positions that `model.yarn_factor` asks for; nothing if it is null.

    An architecture that a trained model's config.json describes is stretched already, and stays as it is. Raises:
    RequestError if its positions are not plain rotary ones.
    """
    if model.yarn_factor is None:
        return
    text: Any = architecture.get_text_config(decoder=True)
    rope = dict(getattr(text, "rope_parameters", None) or {})
    stretched = {"rope_type": "yarn", "factor": float(model.yarn_factor)}
    original = model.yarn_original_positions
    if rope | stretched == rope and original in (None, rope["original_max_position_embeddings"]):
        return
    reason = _rope_refusal(rope) if rope else f"{type(architecture).__name__} has no rotary positions"
    if reason is not None:
        raise RequestError(
            f"model.yarn_factor={model.yarn_factor:g} cannot stretch this model: {reason}; type model.yarn_factor=null",
            problem_id="yarn-not-possible",
        )
    original = original or text.max_position_embeddings
    text.rope_parameters = rope | stretched | {"original_max_position_embeddings": original}
    text.max_position_embeddings = round(original * model.yarn_factor)


def stretched_keys(architecture: PretrainedConfig, model: ModelConfig) -> dict[str, Any]:
    """What a base needs as keywords of `from_pretrained`, so that its positions are those of training; or nothing."""
    text: Any = architecture.get_text_config(decoder=True)
    return {key: getattr(text, key) for key in _STRETCHED} if model.yarn_factor is not None else {}


def position_by_document(model: torch.nn.Module) -> None:
    """Have a model with three positions a token compute those of each document of a packed row alone."""
    for module in model.modules():
        if hasattr(module, "get_rope_index"):
            module.register_forward_pre_hook(_position_by_document, with_kwargs=True)


def _position_by_document(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
    """Replace a packed row's positions in the text, (1, T), by (4, 1, T): these, which the mask follows, and three."""
    import torch

    positions, grid = inputs.get("position_ids"), inputs.get("image_grid_thw")
    if positions is None or positions.ndim != 2:
        return None
    placed = positions.expand(3, *positions.shape)
    if grid is not None:
        starts = (positions[0] == 0).nonzero()[:, 0]
        lengths = torch.diff(starts, append=starts.new_tensor([positions.shape[1]]))
        within = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]  # (documents, longest)
        ids, types = (
            inputs[name].new_zeros(within.shape).masked_scatter(within, inputs[name])
            for name in ("input_ids", "mm_token_type_ids")
        )
        by_document = module.get_rope_index(
            ids, mm_token_type_ids=types, image_grid_thw=grid, attention_mask=within.long()
        )[0]
        placed = by_document[:, within][:, None]
    return args, inputs | {"position_ids": torch.cat([positions[None], placed])}
