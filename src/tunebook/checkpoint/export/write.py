"""Write an export under a temporary name, load it again, and compare it with the model in memory.

Both models compute a fixed input on the CPU. The logits of the written model must equal those of the model in memory
within one rounding of the number format, since two passes may add in another order. If weights were cast or an adapter
was merged, the root mean square difference from the checkpoint's own logits must stay within the format's rounding.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tunebook.checkpoint.export.model import in_format, most_frequent
from tunebook.checkpoint.export.weights import ADAPTER_WEIGHTS, Weights
from tunebook.config.schema import RunConfig
from tunebook.errors import DifferenceError, RequestError, first_few
from tunebook.files import flush_folder
from tunebook.hardware.disk import is_disk_full, no_space, require_space
from tunebook.model.load import attention_option, auto_class
from tunebook.parallel.wrapped import format_name

if TYPE_CHECKING:
    from peft import PeftConfig

_ELSEWHERE = "free some space, or write elsewhere: --to /a/folder/on/another/disk"
_ROWS, _TOKENS = 2, 24
_FACTOR = 16  # maximum sum of roundings of one weight; bf16 was measured at 0.5 to 2
_LEAST_ALLOWED = 1e-4  # fp32: sums in another order


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A new folder that is renamed to `folder` at the end, and removed after an error. A killed export's is replaced.

    Raises: DoesNotFitError if the disk fills up, RequestError if it exists or nothing may be written.
    """
    if folder.exists() or folder.is_symlink():
        raise RequestError(
            f"{folder} exists, and an export never writes over anything; name a new folder with --to FOLDER",
            problem_id="export-target",
        )
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise RequestError(
            f"{folder} cannot be written: {error.strerror}; name another place with --to FOLDER",
            problem_id="export-target",
        ) from error
    try:
        yield unfinished
        unfinished.rename(folder)
        flush_folder(folder.parent)
    except Exception as error:
        if is_disk_full(error):
            raise no_space("the export", folder, _ELSEWHERE) from error
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def apply_umask(file: Path) -> None:
    """Set a file's permissions by the user's umask: safetensors makes files readable by their owner only."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written."""

    dtype: str
    num_parameters: int
    is_exact: bool  # the tensors of an adapter, or the logits of a model, are the checkpoint's bit for bit


def save_adapter(settings: PeftConfig, weights: Weights, dtype: torch.dtype | None, folder: Path) -> Written:
    """Write an adapter's files, read its weights again and compare them bit for bit. Raises: DifferenceError."""
    cast = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in weights.items()}
    save_file(cast, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    settings.save_pretrained(str(folder))
    written = load_file(folder / ADAPTER_WEIGHTS)
    if written.keys() != cast.keys() or not all(torch.equal(written[name], cast[name]) for name in cast):
        raise _differs("its tensors are others")
    return Written(
        dtype=format_name(most_frequent(cast)),
        num_parameters=sum(tensor.numel() for tensor in cast.values()),
        is_exact=all(torch.equal(tensor.float(), weights[name].float()) for name, tensor in cast.items()),
    )


def save_model(model: Any, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    """Write a model in a number format; returns its logits in it."""
    require_space(folder, model.num_parameters() * dtype.itemsize, "the export", _ELSEWHERE)
    in_format(model, dtype)
    model.save_pretrained(str(folder))
    return logits_of(model)


def compare(folder: Path, trained: torch.Tensor, cast: torch.Tensor, config: RunConfig) -> Written:
    """Load a written model like any other and compare its logits with those as trained, and as cast to its format.

    Raises: DifferenceError beyond rounding.
    """
    gc.collect()  # one model is in memory at a time
    trust = config.model.trust_remote_code
    architecture = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust)
    written, info = auto_class(architecture).from_pretrained(
        str(folder),
        dtype="auto",
        output_loading_info=True,
        trust_remote_code=trust,
        attn_implementation=attention_option(config.attention.implementation),
    )
    if wrong := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise _differs(f"{len(wrong)} of its weights do not fill the model: {first_few(list(map(str, wrong)), 5)}")
    loaded = logits_of(written.eval())
    rounding = torch.finfo(written.dtype).eps
    for other, allowed in ((cast, rounding), (trained, max(_FACTOR * rounding, _LEAST_ALLOWED))):
        difference = float((loaded - other).square().mean().sqrt() / other.square().mean().sqrt().clamp_min(1e-12))
        if not difference <= allowed:  # also for numbers that are not finite
            raise _differs(f"its logits differ by {difference:.3g}, and rounding to the format explains {allowed:.3g}")
    return Written(
        dtype=format_name(written.dtype),
        num_parameters=written.num_parameters(),
        is_exact=torch.equal(loaded, trained),
    )


def logits_of(model: Any) -> torch.Tensor:
    """The logits of the fixed input in fp32. Shape: (2, 24, vocabulary)."""
    size = model.config.get_text_config().vocab_size
    ids = (torch.arange(_ROWS * _TOKENS).reshape(_ROWS, _TOKENS) * 7919 + 17) % size
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _differs(difference: str) -> DifferenceError:
    return DifferenceError(
        f"the exported model, loaded again, is not the checkpoint's: {difference}. Nothing was kept. Try --dtype fp32 "
        "or another checkpoint, and report this with the run's manifest.json",
        problem_id="export-differs",
    )
