"""ZeRO-3's memory of the order in which a pass needs its parameters, by which it gathers them ahead."""

from __future__ import annotations

from typing import Any


def forget_parameter_order(model: Any) -> None:
    """Let the next pass be recorded anew; for anything but a ZeRO-3 engine nothing is done.

    DeepSpeed takes each pass for a repetition of the one before. One that ends otherwise (TRL's fused head gathers the
    head's weight by itself, where the model's own forward calls a module) finds parameters on their way that nobody
    waits for, and ends with "Cannot partition a param in flight": seen with 3B parameters on two H200s, whereas of a
    smaller model everything stays gathered. DeepSpeed 0.19.8 has no public way to say that another kind of pass comes.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
