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
from rich.console import Console
from transformers.utils import logging

from tunebook.checkpoint.export.adapter import adapted_base, adapter_settings, save_adapter
from tunebook.checkpoint.export.card import ExportOrigin, card, check_text
from tunebook.checkpoint.export.model import find_tokenizer, skeleton_of, whole_model
from tunebook.checkpoint.export.source import Source, choose_source
from tunebook.checkpoint.export.weights import Form, form_of, read_weights
from tunebook.checkpoint.export.write import (
    compare,
    logits_of,
    new_folder,
    new_place,
    save_model,
    share,
)
from tunebook.checkpoint.save import seal_files
from tunebook.config.choices import PeftMethod
from tunebook.config.frozen import load_config
from tunebook.config.schema import AttentionConfig, RunConfig
from tunebook.errors import RequestError
from tunebook.facts.attention import MASKED, WITHOUT_KERNEL
from tunebook.files import atomic_write_text
from tunebook.model.adapters import merged
from tunebook.model.base_config import read_dtype
from tunebook.model.positions import stretched_keys
from tunebook.model.tokenizer import agree_on_tokens
from tunebook.record.manifest import read_manifest
from tunebook.record.model_origin import check_base, check_bound, origin_of, write_origin
from tunebook.record.run_folder import RUN_FILE, resolve_run
from tunebook.record.run_record import RunRecord, read_run
from tunebook.terminal import print_text, quiet_libraries

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A complete export: its folder and its `tunebook.json`."""

    folder: Path
    origin: ExportOrigin


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
    say(f"  to upload it: hf upload ORG/NAME {shlex.quote(str(exported.folder))} --private")


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
    source = choose_source(run, checkpoint)
    form = form_of(source.folder)
    name = "-".join(filter(None, (source.folder.name, "merged" if merge else None, dtype)))
    place = new_place(to if to is not None else run.folder / "exports" / name)
    if merge and config.peft.method is PeftMethod.full:
        raise RequestError(
            f"--merge: {run.name} trained the whole model (peft.method=full), so there is no adapter to merge; leave "
            "--merge out",
            problem_id="export-merge",
        )
    if merge:
        without = "leave --merge out to export the adapter alone, which needs no base"
        check_base(origin_of(run.folder), config.model, way_out=without)
    kernel = WITHOUT_KERNEL if config.attention.implementation is WITHOUT_KERNEL else MASKED  # both run on a CPU
    config = replace(config, attention=AttentionConfig(implementation=kernel))
    say(f"exporting {source.name_in(run.folder)} of {run.name} ({form.value}) to {place}")
    with new_folder(place) as unfinished:
        origin = _write(run, config, source, form, _format(config, dtype, merge=merge), unfinished, merge=merge)
    return Exported(folder=place, origin=origin)


def _format(config: RunConfig, asked: str | None, *, merge: bool) -> torch.dtype | None:
    """The format to write: the one asked for, the base model's, or None for that of the stored weights."""
    if asked is not None:
        return _DTYPES[asked]
    published = read_dtype(config.model) if merge or config.peft.method is PeftMethod.full else None
    found: torch.dtype | None = getattr(torch, published) if published is not None else None
    return found


def _write(
    run: RunRecord,
    config: RunConfig,
    source: Source,
    form: Form,
    dtype: torch.dtype | None,
    folder: Path,
    *,
    merge: bool,
) -> ExportOrigin:
    """Write everything in an exported folder."""
    stored, is_adapter, recorded = source.folder, config.peft.method is not PeftMethod.full, origin_of(run.folder)
    assert recorded is not None
    tokenizer = find_tokenizer(config, stored)
    check_bound(recorded, tokenizer, config.dataset.system_prompt)
    skeleton = skeleton_of(config, stored, tokenizer)
    weights = read_weights(stored, form, is_adapter=is_adapter)
    base_keywords = stretched_keys(skeleton.config, config.model)
    settings = adapter_settings(config, stored, skeleton, weights) if is_adapter else None
    if settings is not None and not merge:
        written = save_adapter(settings, weights, dtype, folder)
        skeleton.generation_config.save_pretrained(str(folder))
    else:
        if settings is not None:
            model: Any = adapted_base(config, settings, weights, dtype or torch.float32)
        else:
            model = whole_model(skeleton, weights, str(stored))
        del weights
        own = logits_of(model)
        model = merged(model) if merge else model
        agree_on_tokens(model, tokenizer)
        cast = save_model(model, dtype or model.dtype, folder)
        del model  # one is in memory at a time
        if config.model.trust_remote_code:
            for file in stored.glob("*.py"):
                shutil.copy2(file, folder)
        written = compare(folder, own, cast, config)
    tokenizer.save_pretrained(str(folder))
    for file in folder.iterdir():
        share(file)
    record = source.record
    origin = ExportOrigin(
        **asdict(recorded) | ({"config_sha256": record.identity.config_sha256} if record is not None else {}),
        **asdict(written),
        source=source.name_in(run.folder),
        stored_as=form.value,
        step=source.step,
        base_keywords=base_keywords,
        is_adapter=is_adapter and not merge,
        is_merged=merge,
        files_sha256={name: file.sha256 for name, file in seal_files(folder).items() if name.endswith(".safetensors")},
    )
    write_origin(folder, origin)
    atomic_write_text(folder / "README.md", card(origin, config, run))
    return origin
