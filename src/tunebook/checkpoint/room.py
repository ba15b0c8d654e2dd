"""How much room the first checkpoint of a run takes, about; later ones are told by the one before."""

from __future__ import annotations

from typing import Any

_ADAM_BYTES = 8  # two moments in fp32, of each trained number
_DEEPSPEED_BYTES = 4  # and the fp32 weights that it updates


def estimate_bytes(model: Any, *, is_deepspeed: bool) -> int:
    """At least so many bytes: the weights that are saved and the state of an Adam in fp32.

    Of an adapter only what is trained is saved. DeepSpeed saves the weights a second time, as its own.
    """
    is_adapter = hasattr(model, "peft_config")
    total = 0
    for parameter in model.parameters():
        count = getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3 a rank holds a part only
        if parameter.requires_grad or not is_adapter:
            total += count * parameter.element_size() * (2 if is_deepspeed else 1)
        if parameter.requires_grad:
            total += count * (_ADAM_BYTES + (_DEEPSPEED_BYTES if is_deepspeed else 0))
    return total
