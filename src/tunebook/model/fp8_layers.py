"""Linear layers that multiply in fp8 (torchao's `Float8Linear`), in a model that is trained as in bf16 otherwise.

Converted here and not by accelerate's `mixed_precision="fp8"`, which also puts every weight into a tensor class of
torchao's own (for sending fp8 over FSDP), also where nothing is sent. Checkpoints would then be readable with torchao
only, weights could not be loaded on one rank, and rows could have no scales of their own. A layer converted here holds
the weight it held, under the name it had: what is saved, gathered or exported are ordinary weights.

Left as they are: everything outside the blocks (embeddings, the last norm, the head, whose weight the loss takes by
itself), layers whose sizes are no multiple of 16, which fp8's kernels do not take, and layers too small to gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Fp8Scaling
from tunebook.errors import RequestError
from tunebook.model.blocks import transformer_blocks

if TYPE_CHECKING:
    from torch import nn

ALIGNMENT = 16  # sizes of fp8 products are multiples of this: of features, and of tokens in the weights' gradients


def pays(scaling: Fp8Scaling, in_features: int, out_features: int) -> bool:
    """Whether turning the tensors into fp8 costs less than the products save.

    Source: torchao 0.18's `_auto_filter_for_tensorwise` and `_auto_filter_for_rowwise`, measured on H100.
    """
    if scaling is Fp8Scaling.tensorwise:
        return in_features > 4096 or out_features > 1024
    return out_features > 2048 and in_features > 1024 and (out_features > 4096 or in_features > 2048)


def layers_for_fp8(model: nn.Module, scaling: Fp8Scaling) -> list[str]:
    """The names of the linear layers that multiply in fp8 once converted."""
    from torch import nn

    return [
        f"{block}.{name}"
        for block, module in transformer_blocks(model).items()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and not layer.in_features % ALIGNMENT
        and not layer.out_features % ALIGNMENT
        and pays(scaling, layer.in_features, layer.out_features)
    ]


def convert_to_fp8(model: nn.Module, scaling: Fp8Scaling, *, emulate: bool = False) -> list[str]:
    """Make the layers that gain from it multiply in fp8, before the model is wrapped; their names.

    `emulate` computes on a CPU what a GPU would. Raises: RequestError where no layer would gain.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = layers_for_fp8(model, scaling)
    if not names:
        raise RequestError(
            f"precision.compute=fp8: no linear layer of {type(model).__name__} is large enough to be faster in fp8 "
            f"with precision.fp8_scaling={scaling.name}; try precision=bf16",
            problem_id="fp8-nothing-to-convert",
        )
    chosen = set(names)
    settings = _settings(Float8LinearConfig, scaling, emulate)
    convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, name: name in chosen)
    return names


def _settings(kind: Any, scaling: Fp8Scaling, emulate: bool) -> Any:
    import dataclasses

    return dataclasses.replace(kind.from_recipe_name(scaling.value), emulate=emulate)


def count_fp8_layers(model: nn.Module) -> int:
    """How many layers of a model, wrapped or not, multiply in fp8. Asks the layers, not a configuration."""
    return len(_converted(model))


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """Inside, converted layers multiply like others.

    One scale for a whole row of documents changes with each of them, by less than fp8 rounds to and by far more than
    bf16 does: whether documents see each other cannot be told by such products.
    """
    from torch import nn

    converted = _converted(model)
    classes = [type(layer) for layer in converted]
    try:
        for layer in converted:
            layer.__class__ = nn.Linear
        yield
    finally:
        for layer, kind in zip(converted, classes, strict=True):
            layer.__class__ = kind


def _converted(model: nn.Module) -> list[nn.Module]:
    import sys

    module = sys.modules.get("torchao.float8.float8_linear")  # never imported: nothing was converted
    return [layer for layer in model.modules() if isinstance(layer, module.Float8Linear)] if module else []
