"""Which weights a folder holds and in which form, by its files' names; what would run code on loading is refused.

Forms, in the order they are looked for: an adapter's or a whole model's safetensors, FSDP's sharded checkpoint
(`torch.distributed.checkpoint`), ZeRO's partitions. Pickled weights (`.bin`) are never read: every checkpoint of ours
has one of the other forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tunebook.errors import RequestError
from tunebook.model.adapters import ADAPTER_FILE
from tunebook.model.weight_files import find_weight_files, read_shapes

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FSDP_FOLDER = "pytorch_model_fsdp_0"  # accelerate's name
_ZERO_TAG = "latest"  # DeepSpeed's file with the name of the folder beside it
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Form(Enum):
    """How weights are stored, as messages and cards call it."""

    adapter = "an adapter's safetensors"
    whole = "whole safetensors"
    fsdp = "FSDP's sharded checkpoint"
    zero = "ZeRO's partitions"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Weights on disk: their form, and the files or the one folder that they are in."""

    form: Form
    folder: Path
    files: list[Path]


def find_stored(folder: Path) -> Stored:
    """The weights in a folder. Raises: RequestError for a folder without any, with pickled ones, or with links out."""
    _refuse_links_out(folder)
    adapter = folder / ADAPTER_WEIGHTS
    # Where DeepSpeed does not gather, transformers leaves an adapter file without a tensor, and the partitions.
    if (folder / ADAPTER_FILE).is_file() and adapter.is_file() and read_shapes([adapter]):
        return Stored(form=Form.adapter, folder=folder, files=[adapter])
    whole = [file for file in find_weight_files(folder) if file.suffix == ".safetensors"]
    if whole:
        _require_inside(whole, folder)
        return Stored(form=Form.whole, folder=folder, files=whole)
    sharded = folder / _FSDP_FOLDER
    if (sharded / ".metadata").is_file():
        return Stored(form=Form.fsdp, folder=sharded, files=sorted(sharded.glob("*.distcp")))
    if (folder / _ZERO_TAG).is_file():
        partitions = _zero_folder(folder)
        return Stored(form=Form.zero, folder=partitions, files=sorted(partitions.glob("*_states.pt")))
    raise _no_weights(folder)


def _zero_folder(folder: Path) -> Path:
    tag = (folder / _ZERO_TAG).read_text(encoding="utf-8", errors="replace").strip()
    partitions = folder / tag
    if tag in ("", ".", "..") or "/" in tag or not partitions.is_dir():
        raise RequestError(
            f"{folder / _ZERO_TAG} names {tag!r}, and there is no such folder beside it, so ZeRO's partitions are not "
            "where they should be; copy the whole checkpoint again, or name another one with --checkpoint",
            problem_id="export-no-weights",
        )
    return partitions


def _no_weights(folder: Path) -> RequestError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    weights = [name for name in pickles if "model" in name]
    if weights:
        return RequestError(
            f"{folder} holds pickled weights ({weights[0]}), and loading a pickle can run any code that is in it; if "
            "you trust where it comes from, save it as safetensors first (`model.save_pretrained` does) and train or "
            "export from that",
            problem_id="export-pickled",
        )
    held = sorted(path.name for path in folder.iterdir())
    some = f"it holds {', '.join(held[:4])}{', ...' if len(held) > 4 else ''}" if held else "it is empty"
    return RequestError(
        f"{folder} holds no weights in a form that can be exported (model.safetensors or its index, {ADAPTER_WEIGHTS}, "
        f"{_FSDP_FOLDER}/ or ZeRO's {_ZERO_TAG}): {some}; name a run's checkpoint with --checkpoint STEP",
        problem_id="export-no-weights",
    )


def _require_inside(files: list[Path], folder: Path) -> None:
    for file in files:  # an index may name any path
        if file.resolve().parent != folder.resolve():
            raise _leads_out(file, folder, file.resolve())


def _refuse_links_out(folder: Path) -> None:
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise _leads_out(path, folder, path.resolve())


def _leads_out(path: Path, folder: Path, end: Path) -> RequestError:
    return RequestError(
        f"{path} leads out of {folder}, to {end}: what is there was not written with this checkpoint and may be "
        "another model's; replace the link by the file itself if it belongs here",
        problem_id="export-link",
    )


def damaged(file: Path, error: Exception | str) -> RequestError:
    """The error for a file that cannot be read as what it should be."""
    size = f"{file.stat().st_size:,} bytes" if file.is_file() else "not there"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RequestError(
        f"{file} ({size}) cannot be read: {reason}; it is damaged, was cut off, or was not written by Tunebook. Name "
        "another checkpoint with --checkpoint, or restore this one from a copy",
        problem_id="weights-file-damaged",
    )
