"""`tunebook export`: from the request to a complete folder. Requests are refused before any weight is read.

Weights are cast to the base model's number format unless another is asked for; if that is unknown they stay as they are
stored. An adapter stays an adapter in its own format unless it is merged. What was written is loaded again and compared
with the checkpoint before the folder gets its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from rich.console import Console
from transformers.utils import logging

from tunebook.checkpoint.export.adapter import adapted_base, adapter_settings, save_adapter
from tunebook.checkpoint.export.card import ExportOrigin, card, check_text
from tunebook.checkpoint.export.model import find_tokenizer, skeleton_of, whole_model
from tunebook.checkpoint.export.source import Source, choose_source
from tunebook.checkpoint.export.weights import Form, form_of, read_weights
from tunebook.checkpoint.export.write import (
    check_target,
    compare,
    logits_of,
    new_folder,
    save_model,
    share,
)
from tunebook.checkpoint.save import seal_files
from tunebook.config.choices import PeftMethod
from tunebook.config.frozen import load_config
from tunebook.config.schema import AttentionConfig, RunConfig
from tunebook.errors import RequestError, TunebookError, first_line
from tunebook.facts.attention import MASKED, WITHOUT_KERNEL
from tunebook.files import atomic_write_text
from tunebook.model.adapters import merged
from tunebook.model.base_config import read_dtype
from tunebook.model.hub import why_no_upload
from tunebook.model.positions import stretched_keys
from tunebook.model.tokenizer import agree_on_tokens
from tunebook.record.model_origin import check_base, check_bound, origin_of, recorded_by_run, write_origin
from tunebook.record.run_folder import RUN_FILE, resolve_run
from tunebook.record.run_record import RunRecord, read_run
from tunebook.terminal import print_text, quiet_libraries

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_command(run: str, outputs: Path, console: Console, **options: Any) -> None:
    """Export and print the result. `options` and errors are those of `export_run`."""

    def say(line: str) -> None:
        print_text(line, console)

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with quiet_libraries():
        exported = export_run(run, outputs, say, **options)
    origin = exported.origin
    kind = "adapter" if origin.is_adapter else "merged model" if origin.is_merged else "model"
    say(f"written: {exported.folder}")
    say(f"  {kind} of {origin.num_parameters:,} numbers in {origin.dtype}")
    say(f"  {check_text(origin)}")
    if exported.address is not None:
        say(f"uploaded: {exported.address}")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A complete export: its folder, its `tunebook.json`, and the address of its upload."""

    folder: Path
    origin: ExportOrigin
    address: str | None


@dataclass(frozen=True, kw_only=True)
class _Work:
    """An accepted request."""

    run: RunRecord
    config: RunConfig
    source: Source
    form: Form
    merge: bool
    dtype: torch.dtype | None  # the format to write; None: as stored


def export_run(
    target: str,
    outputs: Path,
    say: Callable[[str], None],
    *,
    checkpoint: str | None = None,
    to: Path | None = None,
    merge: bool = False,
    dtype: str | None = None,
    push_to: str | None = None,
) -> Exported:
    """Export a run, named as for other commands; `checkpoint` is a step or a folder of it, `to` the folder to make.

    Raises: RequestError for what cannot be exported; DataError for a damaged checkpoint or another tokenizer than in
    training; DoesNotFitError for a full disk; DifferenceError when what was written is not what was saved.
    """
    folder = resolve_run(target, outputs)
    run, config = read_run(folder), load_config(folder / RUN_FILE)
    source = choose_source(run, checkpoint)
    name = "-".join(filter(None, (source.folder.name, "merged" if merge else None, dtype)))
    place = check_target(to if to is not None else run.folder / "exports" / name, run.folder)
    if merge and config.peft.method is PeftMethod.full:
        raise RequestError(
            f"--merge: {run.name} trained the whole model (peft.method=full), so there is no adapter to merge; leave "
            "--merge out",
            problem_id="export-merge",
        )
    if merge:
        without = "leave --merge out to export the adapter alone, which needs no base"
        check_base(recorded_by_run(run.folder), config.model, way_out=without)
    if push_to is not None and (why := why_no_upload()):
        raise RequestError(f"--push {push_to}: {why}; or export without --push", problem_id="upload-not-possible")
    kernel = WITHOUT_KERNEL if config.attention.implementation is WITHOUT_KERNEL else MASKED  # both run on a CPU
    work = _Work(
        run=run,
        config=replace(config, attention=AttentionConfig(implementation=kernel)),
        source=source,
        form=form_of(source.folder),
        merge=merge,
        dtype=_format(config, dtype, merge=merge),
    )
    say(f"exporting {source.name_in(run.folder)} of {run.name} ({work.form.value}) to {place}")
    with new_folder(place) as unfinished:
        origin = _write(work, unfinished)
    return Exported(folder=place, origin=origin, address=_push(place, push_to, origin) if push_to else None)


def _format(config: RunConfig, asked: str | None, *, merge: bool) -> torch.dtype | None:
    if asked is not None:
        return _DTYPES[asked]
    if config.peft.method is not PeftMethod.full and not merge:
        return None
    published = read_dtype(config.model)
    found: torch.dtype | None = getattr(torch, published) if published is not None else None
    return found


def _write(work: _Work, folder: Path) -> ExportOrigin:
    """Write everything in an exported folder."""
    config, stored, is_adapter = work.config, work.source.folder, work.config.peft.method is not PeftMethod.full
    tokenizer = find_tokenizer(config, stored)
    check_bound(recorded_by_run(work.run.folder), tokenizer, config.dataset.system_prompt)
    skeleton = skeleton_of(config, stored, tokenizer)
    weights = read_weights(stored, work.form, is_adapter=is_adapter)
    base_keywords = stretched_keys(skeleton.config, config.model)
    settings = adapter_settings(config, stored, skeleton, weights) if is_adapter else None
    if settings is not None and not work.merge:
        written = save_adapter(settings, weights, work.dtype, folder)
        skeleton.generation_config.save_pretrained(str(folder))
    else:
        if settings is not None:
            model: Any = adapted_base(config, settings, weights, work.dtype or torch.float32)
        else:
            model = whole_model(skeleton, weights, str(stored))
        del weights
        own = logits_of(model)
        model = merged(model) if work.merge else model
        agree_on_tokens(model, tokenizer)
        saved = save_model(model, own, work.dtype or model.dtype, folder)
        del model  # one is in memory at a time
        if config.model.trust_remote_code:
            for file in stored.glob("*.py"):
                shutil.copy2(file, folder)
        written = compare(folder, saved, config)
    tokenizer.save_pretrained(str(folder))
    for file in folder.iterdir():
        share(file)
    recorded, record = origin_of(work.run.folder), work.source.record
    origin = ExportOrigin(
        **asdict(recorded) | ({"config_sha256": record.identity.config_sha256} if record is not None else {}),
        **asdict(written),
        source=work.source.name_in(work.run.folder),
        stored_as=work.form.value,
        step=work.source.step,
        base_keywords=base_keywords,
        is_adapter=is_adapter and not work.merge,
        is_merged=work.merge,
        files_sha256={name: file.sha256 for name, file in seal_files(folder).items() if name.endswith(".safetensors")},
    )
    write_origin(folder, origin)
    atomic_write_text(folder / "README.md", card(origin, config, work.run))
    return origin


def _push(folder: Path, name: str, origin: ExportOrigin) -> str:
    """Upload a folder as one commit, into a new private repository if there is none. Returns its address.

    Raises: TunebookError if the upload fails; the folder stays.
    """
    message = ", ".join(filter(None, (origin.recipe, f"{origin.source} of {origin.run}")))
    api = HfApi()
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=name, commit_message=message)
    except Exception as error:  # the hub's errors and those of its HTTP library
        raise TunebookError(
            f"the export is complete in {folder}, but it was not uploaded to {name}: {first_line(error)}; to upload "
            f"it, type: hf upload {name} {folder}",
            problem_id="upload-failed",
        ) from error
    return str(made)
