"""`tunebook export`: from the request to a complete folder. Requests are refused before any weight is read.

Weights are cast to the base model's number format unless another is asked for; if that is unknown they stay as they are
stored. An adapter stays an adapter in its own format unless it is merged. What was written is loaded again and compared
with the checkpoint before the folder gets its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from rich.console import Console
from transformers.utils import logging

from tunebook.checkpoint.export.card import ExportOrigin, card, check_text
from tunebook.checkpoint.export.folder import ELSEWHERE, check_target, new_folder
from tunebook.checkpoint.export.kinds import Work, Written, base_dtype, write_adapter, write_merged, write_whole
from tunebook.checkpoint.export.model import adapter_weights, blueprint_of, require_whole_adapter
from tunebook.checkpoint.export.source import Form, Source, Stored, choose_source, find_stored
from tunebook.checkpoint.export.stored_weights import StoredTensor, file_weights, sharded_weights
from tunebook.checkpoint.export.write import compare_with_model, flush, num_bytes, refuse
from tunebook.checkpoint.export.zero_weights import partitioned_weights
from tunebook.config.choices import PeftMethod, Weights
from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError, TunebookError, first_line
from tunebook.files import atomic_write_text
from tunebook.hardware.disk import require_space
from tunebook.model.adapters import is_adapter
from tunebook.model.hub import why_no_upload
from tunebook.model.load import check_model
from tunebook.model.positions import stretched_keys
from tunebook.parallel.wrapped import format_name
from tunebook.record.manifest import describe_model
from tunebook.record.model_origin import (
    BASE,
    Trained,
    check_base,
    check_bound,
    origin_of,
    recorded_by_run,
    write_origin,
)
from tunebook.record.run_folder import RUN_FILE, resolve_run
from tunebook.record.run_record import RunRecord, read_run
from tunebook.terminal import print_text, quiet_libraries

_EXPORTS_FOLDER = "exports"
_EXTRA_BYTES = 50_000_000  # for the tokenizer, the card and the file system itself
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # our names, and torch's
_LARGEST_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # relative to a weight; half of the format's eps


def export_command(
    run: str,
    outputs: Path,
    console: Console,
    *,
    checkpoint: str | None,
    to: Path | None,
    merge: bool,
    dtype: str | None,
    push_to: str | None,
) -> None:
    """Export and print the result. Raises: as `export_run`."""

    def say(line: str) -> None:
        print_text(line, console)

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with quiet_libraries():
        exported = export_run(
            run, outputs, say, checkpoint=checkpoint, to=to, merge=merge, dtype=dtype, push_to=push_to
        )
    origin = exported.origin
    kind = "adapter" if origin.is_adapter else "merged model" if origin.is_merged else "model"
    say(f"written: {exported.folder}")
    say(f"  {kind} of {origin.num_parameters:,} numbers in {origin.dtype or ', '.join(origin.stored_dtypes)}")
    say(f"  {check_text(origin)}")
    if note := rounding_note(origin):
        say(f"  {note}")
    if exported.address is not None:
        say(f"uploaded: {exported.address}")


def rounding_note(origin: ExportOrigin) -> str | None:
    """Return what a narrower number format may lose of the training; None if nothing was rounded.

    A short training with a low learning rate changes most weights by less than the format can hold.
    """
    if origin.check["is_exact"] or "fp32" not in origin.stored_dtypes or origin.dtype not in _LARGEST_ROUNDING:
        return None
    share = _LARGEST_ROUNDING[origin.dtype]
    return f"rounding to {origin.dtype} can lose updates of up to {share:.2%} of a weight; --dtype fp32 keeps them"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A complete export: its folder, its `tunebook.json`, and the address of its upload."""

    folder: Path
    origin: ExportOrigin
    address: str | None


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
    place = check_target(to if to is not None else _default_place(run, source, merge, dtype), run.folder)
    work = _plan(run, config, source, merge=merge, dtype=dtype)
    _check_push(push_to, work)
    say(f"exporting {source.name_in(run.folder)} of {run.name} ({work.stored.form.value}) to {place}")
    needed = num_bytes(work.weights, work.dtype) + _bytes_of_base(work) + _EXTRA_BYTES
    require_space(place, needed, "the export", f"free some space, or {ELSEWHERE}")
    with new_folder(place) as unfinished:
        origin = _write(work, unfinished)
    address = _push(place, push_to, origin) if push_to else None
    return Exported(folder=place, origin=origin, address=address)


def _default_place(run: RunRecord, source: Source, merge: bool, dtype: str | None) -> Path:
    parts = [source.folder.name, "merged" if merge else None, dtype]
    return run.folder / _EXPORTS_FOLDER / "-".join(part for part in parts if part)


def _plan(run: RunRecord, config: RunConfig, source: Source, *, merge: bool, dtype: str | None) -> Work:
    """Check names, shapes, tokenizer and settings. Raises: RequestError, DataError."""
    stored = find_stored(source.folder)
    trained = recorded_by_run(run.folder)
    has_base = _has_base(trained, config, source, merge=merge)
    blueprint = blueprint_of(config, source.folder, has_base=has_base)
    check_bound(trained, blueprint.tokenizer, config.dataset.system_prompt)
    weights, place = _open_weights(stored), str(source.folder)
    if blueprint.adapter is not None:
        weights = adapter_weights(weights)
        blueprint = replace(blueprint, adapter=require_whole_adapter(blueprint, weights, place))
    elif merge:
        raise RequestError(
            f"--merge: {run.name} trained the whole model (peft.method=full), so there is no adapter to merge; leave "
            "--merge out",
            problem_id="export-merge",
        )
    else:
        refuse(compare_with_model(blueprint.model, weights), place)
    asked: torch.dtype | None = getattr(torch, _DTYPES[dtype]) if dtype is not None else None
    stays_adapter = blueprint.adapter is not None and not merge
    return Work(
        run=run,
        config=config,
        source=source,
        stored=stored,
        blueprint=blueprint,
        weights=weights,
        dtype=asked if asked is not None or stays_adapter else base_dtype(config),
        is_merged=merge,
        has_base=has_base,
    )


def _open_weights(stored: Stored) -> dict[str, StoredTensor]:
    """The tensors of a folder. Raises: RequestError for files that are missing, damaged, or of another layout."""
    if stored.form is Form.fsdp:
        return sharded_weights(stored.folder)
    if stored.form is Form.zero:
        return partitioned_weights(stored.folder)
    return file_weights(stored.files)


def _has_base(trained: Trained | None, config: RunConfig, source: Source, *, merge: bool) -> bool:
    """Whether the base model that an adapter was trained on is available, as far as that is known.

    Raises: DataError for a merge into another base, RequestError for a merge without one.
    """
    if not is_adapter(source.folder) and config.peft.method is PeftMethod.full:
        return True
    if merge:
        without = "leave --merge out to export the adapter alone, which needs no base"
        check_base(trained, config.model, way_out=without)
        return True
    if config.model.path is None:
        return True  # downloaded again if needed
    try:
        check_model(config.model)
        return not check_base(trained, config.model, [BASE])
    except RequestError:
        return False


def _check_push(name: str | None, work: Work) -> None:
    """Refuse --push of an adapter that fits no public base, with an invalid name, or without a network or an account.

    Raises: RequestError.
    """
    if name is None:
        return
    model = work.config.model
    if work.is_adapter and (model.name is None or model.weights is Weights.random):
        base = "random weights" if model.weights is Weights.random else model.path
        raise _cannot_push(
            name, f"the adapter's base model is {base}, which nobody else has; push one whole model: --merge"
        )
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise _cannot_push(name, f"{first_line(error)}; write it as ORGANIZATION/NAME") from error
    if name.count("/") != 1:
        raise _cannot_push(name, "it names no owner; write it as ORGANIZATION/NAME")
    if why := why_no_upload():
        raise _cannot_push(name, f"{why}; or export without --push")


def _cannot_push(name: str, why: str) -> RequestError:
    return RequestError(f"--push {name}: {why}", problem_id="upload-not-possible")


def _bytes_of_base(work: Work) -> int:
    """The size of a merged model without its adapter."""
    if not work.is_merged:
        return 0
    size = (work.dtype or torch.float32).itemsize
    return sum(parameter.numel() for parameter in work.blueprint.model.parameters()) * size


def _write(work: Work, folder: Path) -> ExportOrigin:
    """Write everything in an exported folder."""
    if work.is_merged:
        written = write_merged(work, folder)
    else:
        written = write_adapter(work, folder) if work.is_adapter else write_whole(work, folder)
    origin = _origin(work, written)
    write_origin(folder, origin)
    atomic_write_text(folder / "README.md", card(origin, work.config, work.run))
    for file in folder.iterdir():
        if file.is_file():
            flush(file)
    return origin


def _origin(work: Work, written: Written) -> ExportOrigin:
    manifest, recorded = work.run.manifest or {}, origin_of(work.run.folder)
    if work.source.record is not None:
        recorded = replace(recorded, config_sha256=work.source.record.identity.config_sha256)
    return ExportOrigin(
        **asdict(recorded),
        source=work.source.name_in(work.run.folder),
        stored_as=work.stored.form.value,
        step=work.source.step,
        base_model=describe_model(work.config.model) | (manifest.get("model") or {}),
        base_keywords=stretched_keys(work.blueprint.model.config, work.config.model),
        is_adapter=work.is_adapter,
        is_merged=work.is_merged,
        base_was_dequantized=written.base_was_dequantized,
        dtype=format_name(work.dtype) if work.dtype is not None else None,
        stored_dtypes=sorted({format_name(tensor.dtype) for tensor in work.weights.values()}),
        num_parameters=written.num_parameters,
        check=asdict(written.check),
        files_sha256=written.hashes,
        versions=(manifest.get("environment") or {}).get("packages") or {},
    )


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
        reason = first_line(error)
        raise TunebookError(
            f"the export is complete in {folder}, but it was not uploaded to {name}: {reason}; to upload it, type: "
            f"hf upload {name} {folder}",
            problem_id="upload-failed",
        ) from error
    return str(made)
