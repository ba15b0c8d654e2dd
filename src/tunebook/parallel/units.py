"""Which modules of a model become FSDP units: the parts whose parameters are gathered together."""

from __future__ import annotations

from torch import nn

from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.model.blocks import transformer_blocks
from tunebook.parallel.fsdp import fsdp_of


def unit_classes(config: RunConfig, model: nn.Module) -> list[str]:
    """The classes whose instances become units, apart from the embeddings, the last norm and the head.

    Raises: RequestError if the model has no such class.
    """
    named = list(fsdp_of(config).wrap_classes)
    present = {type(module).__name__ for module in model.modules()}
    blocks = sorted({type(block).__name__ for block in transformer_blocks(model).values()})
    unknown = [name for name in named if name not in present]
    if unknown or not (named or blocks):
        says = f"{type(model).__name__} has no {', '.join(unknown)}" if unknown else "no block of the model is known"
        known = blocks or sorted(name for name in present if "Layer" in name or "Block" in name) or sorted(present)
        raise RequestError(
            f"parallelism.wrap_classes={named}: {says}, and FSDP would gather all of it at once; name the class of one "
            f"transformer block, such as parallelism.wrap_classes=[{known[0]}]",
            problem_id="wrap-class-unknown",
        )
    return named or blocks
