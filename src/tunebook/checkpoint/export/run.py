"""`tunebook export`: from the request to a complete folder. Requests are refused before any weight is read.

Weights are cast to the base model's number format unless another is asked for; if that is unknown they stay as they are
stored. An adapter stays an adapter in its own format unless it is merged. What was written is loaded again and compared
with the checkpoint before the folder gets its name.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tunebook.checkpoint.export.card import ExportOrigin, card, check_text
from tunebook.checkpoint.export.model import (
    GENERATION_FILE,
    adapted_base,
    adapter_settings,
    find_tokenizer,
    in_format,
    skeleton_of,
    whole_model,
)
from tunebook.checkpoint.export.weights import Form, form_of, read_weights
from tunebook.checkpoint.export.write import (
    apply_umask,
    compare,
    logits_of,
    new_folder,
    save_adapter,
    save_model,
)
from tunebook.checkpoint.record import CHECKPOINTS_FOLDER, named_as_checkpoints, step_of
from tunebook.checkpoint.save import seal_files
from tunebook.checkpoint.verify import (
    newest_checkpoint,
    require_unchanged_model,
    skipped_checkpoints,
    verified_record,
)
from tunebook.config.choices import PeftMethod, Weights
from tunebook.config.frozen import load_config
from tunebook.config.schema import AttentionConfig, RunConfig
from tunebook.errors import RequestError
from tunebook.facts.attention import MASKED, WITHOUT_KERNEL
from tunebook.files import atomic_write_text
from tunebook.model.adapters import holds_model, merged
from tunebook.model.base_config import read_dtype
from tunebook.model.load import load_architecture
from tunebook.model.positions import stretched_keys
from tunebook.model.tokenizer import agree_on_tokens
from tunebook.model.tokenizer_files import processor_files
from tunebook.record.manifest import read_manifest
from tunebook.record.model_origin import check_base, check_bound, origin_of, write_origin
from tunebook.record.run_folder import MODEL_FOLDER, RUN_FILE, resolve_run
from tunebook.record.run_record import RunRecord, read_run
from tunebook.terminal import quiet_libraries

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A complete export: its folder and its `tunebook.json`."""

    folder: Path
    origin: ExportOrigin


def export_run(
    target: str,
    outputs: Path,
    say: Callable[[str], None],
    *,
    checkpoint: str | None = None,
    to: Path | None = None,
    merge: bool = False,
    dtype: str | None = None,
) -> Exported:
    """Export a run, named as for other commands; `checkpoint` is a step or a folder of it, `to` the folder to make.

    Raises: RequestError for what cannot be exported; DataError for a damaged checkpoint or another tokenizer than in
    training; DoesNotFitError for a full disk; DifferenceError when what was written is not what was saved.
    """
    folder = resolve_run(target, outputs)
    read_manifest(folder)  # which names the run, or there is nothing to say of the model
    run, config = read_run(folder), load_config(folder / RUN_FILE)
    source, step = choose_source(run, checkpoint)
    name = "-".join(filter(None, (source.name, "merged" if merge else None, dtype)))
    place = (to if to is not None else run.folder / "exports" / name).expanduser().absolute()
    if merge and config.peft.method is PeftMethod.full:
        raise RequestError(
            f"--merge: {run.name} trained the whole model (peft.method=full), so there is no adapter to merge; leave "
            "--merge out",
            problem_id="export-merge",
        )
    if not merge and config.peft.method is not PeftMethod.full and config.model.weights is Weights.random:
        raise RequestError(
            f"{run.name} trained an adapter of a base model with random weights, which is saved nowhere to load it on; "
            "add --merge for a whole model",
            problem_id="export-merge",
        )
    if merge:
        check_base(origin_of(run.folder), config.model)
    kernel = WITHOUT_KERNEL if config.attention.implementation is WITHOUT_KERNEL else MASKED  # both run on a CPU
    config = replace(config, attention=AttentionConfig(implementation=kernel))
    say(f"exporting {source.relative_to(run.folder)} of {run.name} ({form_of(source).value}) to {place}")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with quiet_libraries(), new_folder(place) as unfinished:
        origin = _write(run, config, source, step, _format(config, dtype, merge=merge), unfinished, merge=merge)
    kind = "adapter" if origin.is_adapter else "merged model" if origin.is_merged else "model"
    say(f"written: {place}")
    say(f"  {kind} of {origin.num_parameters:,} numbers in {origin.dtype}")
    say(f"  {check_text(origin)}")
    say(f"  to upload it: hf upload ORG/NAME {shlex.quote(str(place))} --private")
    return Exported(folder=place, origin=origin)


def choose_source(run: RunRecord, checkpoint: str | None) -> tuple[Path, int | None]:
    """The folder of the weights, after every hash is verified, and the optimizer steps that they have seen.

    It is the named checkpoint, else the trained model, else the newest complete checkpoint.
    Raises: RequestError if there is nothing, DataError for a damaged checkpoint.
    """
    model, checkpoints = run.folder / MODEL_FOLDER, run.folder / CHECKPOINTS_FOLDER
    if checkpoint is None and holds_model(model):
        require_unchanged_model(run.folder, by_hash=True)
        return model, run.model_step
    folder = newest_checkpoint(run.folder)
    if checkpoint is not None:
        folder = checkpoints / (f"checkpoint-{checkpoint}" if checkpoint.isdecimal() else checkpoint)
    names = [path.name for path in reversed(named_as_checkpoints(checkpoints)) if not path.is_symlink()]
    if folder is None or folder.name not in names or folder.parent != checkpoints:
        skipped = "".join(f"; {path.name}: {problem}" for path, problem in skipped_checkpoints(run.folder).items())
        raise RequestError(
            f"there is no complete checkpoint to export in {run.folder}, or not the named one; its checkpoints: "
            f"{', '.join(names) or 'none'}{skipped}. Name one with --checkpoint STEP, or resume the run until it has "
            "saved (training.save_every_steps)",
            problem_id="export-no-checkpoint",
        )
    verified_record(folder)
    return folder, step_of(folder)


def _format(config: RunConfig, requested: str | None, *, merge: bool) -> torch.dtype | None:
    """The format to write: the requested one, the base model's, or None for that of the stored weights."""
    if requested is not None:
        return _DTYPES[requested]
    published = read_dtype(config.model) if merge or config.peft.method is PeftMethod.full else None
    dtype: torch.dtype | None = getattr(torch, published) if published is not None else None
    return dtype


def _write(
    run: RunRecord,
    config: RunConfig,
    stored: Path,
    step: int | None,
    dtype: torch.dtype | None,
    folder: Path,
    *,
    merge: bool,
) -> ExportOrigin:
    """Write everything in an exported folder, from the weights in the folder `stored`."""
    form = form_of(stored)
    is_adapter, recorded = config.peft.method is not PeftMethod.full, origin_of(run.folder)
    assert recorded is not None
    tokenizer = find_tokenizer(config, stored)
    check_bound(recorded, tokenizer, config.dataset.system_prompt)
    weights = read_weights(stored, form, is_adapter=is_adapter)
    skeleton = skeleton_of(config, stored, tokenizer) if form is not Form.adapter else None
    base_keywords = {}
    if config.model.yarn_factor is not None:
        architecture = skeleton.config if skeleton is not None else load_architecture(config.model)
        base_keywords = stretched_keys(architecture, config.model)
    settings = adapter_settings(config, stored, weights, skeleton) if is_adapter else None
    if settings is not None and not merge:
        written = save_adapter(settings, weights, dtype, folder)
        if skeleton is not None:
            skeleton.generation_config.save_pretrained(str(folder))
        else:
            shutil.copy2(stored / GENERATION_FILE, folder)
    else:
        if settings is not None:
            model: Any = adapted_base(config, settings, weights, dtype or torch.float32, stored)
        else:
            assert skeleton is not None
            model = whole_model(skeleton, weights, str(stored))
            if dtype is not None and dtype.itemsize > model.dtype.itemsize:
                in_format(model, dtype)  # exact, so that both logits are of products in this format
        del weights
        trained = logits_of(model)
        model = merged(model) if merge else model
        agree_on_tokens(model, tokenizer)
        cast = save_model(model, dtype or model.dtype, folder)
        del model  # one is in memory at a time
        if config.model.trust_remote_code:
            for file in stored.glob("*.py"):
                shutil.copy2(file, folder)
        written = compare(folder, trained, cast, config)
    tokenizer.save_pretrained(str(folder))
    for file in processor_files(stored):
        shutil.copyfile(file, folder / file.name)
    for file in folder.iterdir():
        apply_umask(file)
    origin = ExportOrigin(
        **asdict(recorded),
        **asdict(written),
        source=str(stored.relative_to(run.folder)),
        stored_as=form.value,
        step=step,
        base_keywords=base_keywords,
        is_adapter=is_adapter and not merge,
        is_merged=merge,
        files_sha256={name: file.sha256 for name, file in seal_files(folder).items() if name.endswith(".safetensors")},
    )
    write_origin(folder, origin)
    atomic_write_text(folder / "README.md", card(origin, config, run))
    return origin
