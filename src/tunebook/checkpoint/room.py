"""Whether a checkpoint has room: how much the first of a run takes, about (the one before tells of later ones)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tunebook.errors import DoesNotFitError

_ADAM_BYTES = 8  # two moments in fp32, of each trained number
_DEEPSPEED_BYTES = 4  # and the fp32 weights that it updates
_MIB = 2**20


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


def require_writable(folder: Path) -> None:
    """Write a file and remove it: a folder that is there already may be read-only all the same. Raises: OSError."""
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


def require_room(folder: Path, step: int, needed_bytes: int, *, last: Path | None) -> None:
    """Raise DoesNotFitError unless the disk of `folder` has room for a checkpoint; `last` is the newest complete one.

    Raises: OSError.
    """
    disk = shutil.disk_usage(folder)
    # A total of zero is a file system that does not count, such as some network mounts: the writes will tell.
    if disk.total and disk.free < needed_bytes:
        kept = f"The last good checkpoint is {last}" if last is not None else "Nothing was saved before"
        raise DoesNotFitError(
            f"the disk of {folder} has {disk.free / _MIB:,.0f} MiB free and the checkpoint of step {step} takes about "
            f"{needed_bytes / _MIB:,.0f} MiB; free some space, keep fewer checkpoints (training.keep_checkpoints=1), "
            f"or write elsewhere: outputs=/a/folder/on/another/disk. {kept}",
            problem_id="disk-full",
        )
