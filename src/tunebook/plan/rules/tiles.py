"""Rules about MLPs that are computed in tiles of tokens (`activation.mlp_tile_tokens`)."""

from __future__ import annotations

from tunebook.config.choices import Checkpointing, Compute
from tunebook.config.model_facts import TILED, ModelFacts
from tunebook.config.schema import RunConfig
from tunebook.model.parameters import has_experts
from tunebook.plan.rules.frame import Finding, rule

_KEY = "activation.mlp_tile_tokens"
_NO_TILES = f"{_KEY}=null"


def _is_in_tiles(config: RunConfig) -> bool:
    """Whether tiles are asked for."""
    return config.activation.mlp_tile_tokens is not None


@rule("mlp-tiles-without-checkpointing", _KEY)
def mlp_tiles_without_checkpointing(config: RunConfig) -> Finding | None:
    """Refuse tiles in layers that are not recomputed as a whole.

    A tile keeps its input and computes the rest once more in the backward pass. Where layers keep everything else,
    that makes rows hardly longer.
    """
    checkpointing = config.activation.checkpointing
    if not _is_in_tiles(config) or checkpointing in (Checkpointing.enabled, Checkpointing.auto):
        return None
    message = f"tiles are for layers that are recomputed, and activation.checkpointing is {checkpointing.name}"
    return Finding(message, f"activation.checkpointing=enabled or {_NO_TILES}")


@rule("mlp-tiles-compiled", _KEY)
def mlp_tiles_compiled(config: RunConfig) -> Finding | None:
    """Refuse tiles in compiled blocks, and in fp8, which is for compiled blocks.

    Rows with another number of tiles compile a block again. In fp8 a scale would be that of a tile and not of the
    row.
    """
    if not _is_in_tiles(config):
        return None
    if config.precision.compute is Compute.fp8:
        return Finding("each tile would have an fp8 scale of its own", f"precision.compute=bf16 or {_NO_TILES}")
    if not config.model.compile_layers:
        return None
    message = "blocks would be compiled once more for each number of tiles (model.compile_layers=true)"
    return Finding(message, f"model.compile_layers=false or {_NO_TILES}")


@rule("mlp-tiles-not-in-model", _KEY)
def mlp_tiles_not_in_model(config: RunConfig) -> Finding | None:
    """Refuse tiles for architectures without MLPs, such as those that send tokens to experts.

    A tiled MLP must compute each token alone. Experts get the tokens that a router sends them, of the whole row.
    """
    facts = config.model.facts
    if not _is_in_tiles(config) or facts is None or not (has_experts(facts) or _has_no_mlp(facts)):
        return None
    why = "sends tokens to experts" if has_experts(facts) else "has no MLPs that compute each token alone"
    return Finding(f"{facts.architecture} {why}", _NO_TILES)


def _has_no_mlp(facts: ModelFacts) -> bool:
    """Whether the traced layers keep as much with tiles as without."""
    saved = facts.measured.saved if facts.measured is not None else {}
    pairs = [(numbers, saved[f"{mode}/{TILED}"]) for mode, numbers in saved.items() if f"{mode}/{TILED}" in saved]
    return bool(pairs) and all(whole == tiled for whole, tiled in pairs)
