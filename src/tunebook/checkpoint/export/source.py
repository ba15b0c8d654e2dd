"""Which folder of a run is exported, and in which form its weights are stored.

The folder is the one that is named, the trained model, or the newest complete checkpoint. Every hash in a checkpoint's
record is verified first, and the trained model's weights against the run's manifest.

Forms, in the order of the search: safetensors of an adapter or a whole model, FSDP's sharded checkpoint
(`torch.distributed.checkpoint`), ZeRO's partitions. Pickled weights (`.bin`) are never read: every checkpoint of
Tunebook has one of the other forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    CheckpointRecord,
    checkpoint_path,
    named_as_checkpoints,
    step_of,
)
from tunebook.checkpoint.verify import (
    MODEL_FOLDER,
    newest_checkpoint,
    passed_over,
    require_unchanged_model,
    verified_record,
)
from tunebook.errors import RequestError
from tunebook.model.adapters import ADAPTER_FILE, holds_model
from tunebook.model.weight_files import damaged_file, find_weight_files, read_shapes
from tunebook.record.run_record import RunRecord

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FSDP_FOLDER = "pytorch_model_fsdp_0"  # accelerate's name
_ZERO_TAG = "latest"  # DeepSpeed's file with the name of the folder
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder of a run with weights."""

    folder: Path
    step: int | None  # optimizer steps that the weights have seen
    record: CheckpointRecord | None  # of a checkpoint

    def name_in(self, run: Path) -> str:
        """`model` or `checkpoints/checkpoint-<step>`."""
        return self.folder.relative_to(run).as_posix()


def choose_source(run: RunRecord, checkpoint: str | None) -> Source:
    """What to export of a run. Raises: RequestError if there is nothing, DataError for a damaged checkpoint."""
    if checkpoint is None:
        model = run.folder / MODEL_FOLDER
        if holds_model(model):
            return _model(run, model)
        newest = newest_checkpoint(run.folder)
        if newest is None:
            raise _nothing_in(run.folder)
        return _checkpoint(newest)
    folder = _named(run.folder, checkpoint)
    if folder == run.folder / MODEL_FOLDER:
        return _model(run, folder)
    return _checkpoint(folder)


def _model(run: RunRecord, folder: Path) -> Source:
    require_unchanged_model(run.folder, by_hash=True)
    return Source(folder=folder, step=run.model_step, record=None)


def _checkpoint(folder: Path) -> Source:
    return Source(folder=folder, step=step_of(folder), record=verified_record(folder))


def _named(run: Path, text: str) -> Path:
    """The folder that --checkpoint names: by its step, its name or a path inside the run."""
    checkpoints = run / CHECKPOINTS_FOLDER
    if text.isdecimal():
        folder = checkpoint_path(checkpoints, int(text))
        if folder.is_dir():
            return folder
        raise _no_checkpoint(run, f"--checkpoint {text}: there is no {folder}")
    folder = Path(text).expanduser().absolute()
    if not folder.is_dir():
        folder = checkpoints / text  # its bare name
    if not folder.is_dir():
        raise _no_checkpoint(run, f"--checkpoint {text} is neither a step nor a folder")
    folder = folder.resolve()
    is_checkpoint = folder.parent == checkpoints.resolve() and step_of(folder) is not None
    if is_checkpoint or folder == run / MODEL_FOLDER:
        return folder
    raise _no_checkpoint(
        run, f"--checkpoint {text}: {folder} is no checkpoint of {run}, whose settings it would be exported with"
    )


def _no_checkpoint(run: Path, what: str) -> RequestError:
    found = [str(step_of(path)) for path in named_as_checkpoints(run / CHECKPOINTS_FOLDER)]
    advice = "it has no checkpoints; leave --checkpoint out for the trained model"
    if found:
        steps = f"its checkpoints are of the steps {', '.join(reversed(found))}"
        advice = f"{steps}. Name a step, such as --checkpoint {found[0]}, or leave it out for the newest"
    return RequestError(f"{what}; {advice}", problem_id="export-no-checkpoint")


def _nothing_in(run: Path) -> RequestError:
    skipped = [f"{path.name}: {why}" for path, why in passed_over(run).items()]
    why = f" ({'; '.join(skipped)})" if skipped else ""
    return RequestError(
        f"{run} has neither a {MODEL_FOLDER}/ folder nor a complete checkpoint{why}, so there is nothing to export; "
        "resume the run until it has saved: training.save_every_steps says how often",
        problem_id="export-no-checkpoint",
    )


class Form(Enum):
    """How weights are stored, as named in messages and model cards."""

    adapter = "an adapter's safetensors"
    whole = "whole safetensors"
    fsdp = "FSDP's sharded checkpoint"
    zero = "ZeRO's partitions"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Weights on disk: their form, and the one folder or the safetensors that hold them."""

    form: Form
    folder: Path
    files: tuple[Path, ...] = ()


def find_stored(folder: Path) -> Stored:
    """The weights in a folder. Raises: RequestError for a folder without any, with pickled ones, or with links out."""
    _refuse_links_out(folder)
    adapter = folder / ADAPTER_WEIGHTS
    # Where DeepSpeed does not gather, transformers leaves an adapter file without a tensor, and the partitions.
    if (folder / ADAPTER_FILE).is_file() and adapter.is_file() and read_shapes([adapter]):
        return Stored(form=Form.adapter, folder=folder, files=(adapter,))
    whole = [file for file in find_weight_files(folder) if file.suffix == ".safetensors"]
    if whole:
        _require_inside(whole, folder)
        return Stored(form=Form.whole, folder=folder, files=tuple(whole))
    sharded = folder / _FSDP_FOLDER
    if (sharded / ".metadata").is_file():
        return Stored(form=Form.fsdp, folder=sharded)
    if (folder / _ZERO_TAG).is_file():
        return Stored(form=Form.zero, folder=_zero_folder(folder))
    raise _no_weights(folder)


def _zero_folder(folder: Path) -> Path:
    tag = (folder / _ZERO_TAG).read_text(encoding="utf-8", errors="replace").strip()
    partitions = folder / tag
    if tag in ("", ".", "..") or "/" in tag or not partitions.is_dir():
        raise RequestError(
            f"{folder / _ZERO_TAG} names {tag!r}, and there is no such folder next to it, so ZeRO's partitions are "
            "not where they should be; copy the whole checkpoint again, or name another one with --checkpoint",
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
    for file in files:  # an index may contain any path
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
    """The error for a file that cannot be read."""
    advice = "Name another checkpoint with --checkpoint, or restore this one from a copy"
    return damaged_file(file, error, f"it is damaged, was cut off, or was not written by Tunebook. {advice}")
