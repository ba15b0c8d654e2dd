"""One export from its request to a whole folder: what is refused is refused before a weight is read.

Weights are cast to the base model's number format unless another is asked for; where that is not known they stay as
they are stored. An adapter stays an adapter in its own format unless it is merged. What was written is loaded again and
compared with the checkpoint before it gets its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.checkpoint.export.adapter import adapter_weights, require_first_step
from tunebook.checkpoint.export.card import ExportOrigin, card
from tunebook.checkpoint.export.folder import beside, check_room, check_target
from tunebook.checkpoint.export.formats import find_stored
from tunebook.checkpoint.export.kinds import Work, Written, base_dtype, write_adapter, write_merged, write_whole
from tunebook.checkpoint.export.model import blueprint_of
from tunebook.checkpoint.export.source import Source, choose_source
from tunebook.checkpoint.export.stored_weights import open_weights
from tunebook.checkpoint.export.write import compare_with_model, flush, num_bytes, short_name
from tunebook.config.choices import PeftMethod, Weights
from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.files import atomic_write_text
from tunebook.model.adapters import is_adapter
from tunebook.model.hub import why_no_upload
from tunebook.model.load import check_model
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


def check_push(name: str | None) -> None:
    """Refuse --push with a name that is none, without a network or an account. Raises: RequestError."""
    if name is None:
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RequestError(
            f"--push {name}: {str(error).splitlines()[0]}; write it as ORGANISATION/NAME",
            problem_id="upload-not-possible",
        ) from error
    if name.count("/") != 1:
        raise RequestError(
            f"--push {name}: that does not say whose it shall be; write it as ORGANISATION/NAME",
            problem_id="upload-not-possible",
        )
    if why := why_no_upload():
        raise RequestError(f"--push {name}: {why}; or export without --push", problem_id="upload-not-possible")


def push(folder: Path, name: str, message: str) -> str:
    """Upload a folder as one commit; a repository that is not there yet is made, as a private one. Returns its address.

    Raises: TunebookError when the hub refuses or is lost; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=name, commit_message=message)
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TunebookError(
            f"the export is whole in {folder}, but it was not uploaded to {name}: {reason}; type again what is left: "
            f"hf upload {name} {folder}",
            problem_id="upload-failed",
        ) from error
    return str(made)


if TYPE_CHECKING:
    import torch

EXPORTS_FOLDER = "exports"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # as they are typed, and as torch calls them


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A whole export: its folder, what it says of itself, and where it was uploaded to."""

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
    work = _look(run, config, source, merge=merge, dtype=dtype)
    _check_push(push_to, work)
    say(f"exporting {source.name_in(run.folder)} of {run.name} ({work.stored.form.value}) to {place}")
    check_room(place, num_bytes(work.weights, list(work.weights.shapes), work.dtype) + _bytes_of_base(work))
    with beside(place) as unfinished:
        origin = _write(work, unfinished)
    address = push(place, push_to, f"{origin.recipe}, {origin.source} of {origin.run}") if push_to else None
    return Exported(folder=place, origin=origin, address=address)


def _default_place(run: RunRecord, source: Source, merge: bool, dtype: str | None) -> Path:
    words = [source.folder.name, "merged" if merge else None, dtype]
    return run.folder / EXPORTS_FOLDER / "-".join(word for word in words if word)


def _look(run: RunRecord, config: RunConfig, source: Source, *, merge: bool, dtype: str | None) -> Work:
    """Names, shapes, tokenizer and settings. Raises: RequestError, DataError."""
    import torch

    stored = find_stored(source.folder)
    trained = recorded_by_run(run.folder)
    has_base = _has_base(trained, config, source, merge=merge)
    blueprint = blueprint_of(config, source.folder, has_base=has_base)
    check_bound(trained, blueprint.tokenizer, config.dataset.system_prompt)
    weights, place = open_weights(stored), str(source.folder)
    if blueprint.adapter is not None:
        weights = adapter_weights(weights)
        blueprint = replace(blueprint, adapter=require_first_step(blueprint, weights, place))
    elif merge:
        raise RequestError(
            f"--merge: {run.name} trained the whole model (peft.method=full), so there is no adapter to merge; leave "
            "--merge out",
            problem_id="export-merge",
        )
    else:
        compare_with_model(blueprint.model, weights.shapes).refuse(place)
    asked: torch.dtype | None = getattr(torch, DTYPES[dtype]) if dtype is not None else None
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


def _has_base(trained: Trained | None, config: RunConfig, source: Source, *, merge: bool) -> bool:
    """Whether what an adapter was trained on is there to be compared over, if that is known.

    Raises: DataError where it is another one and is to be merged into, RequestError where it is not there.
    """
    if not is_adapter(source.folder) and config.peft.method is PeftMethod.full:
        return True
    if merge:
        without = "leave --merge out to export the adapter alone, which needs no base"
        check_base(trained, config.model, way_out=without)
        return True
    if config.model.path is None:
        return True  # fetched again where it is not there
    try:
        check_model(config.model)
        return not check_base(trained, config.model, [BASE])
    except RequestError:
        return False


def _check_push(name: str | None, work: Work) -> None:
    if name is None:
        return
    model = work.config.model
    if work.is_adapter and (model.name is None or model.weights is Weights.random):
        base = "random weights" if model.weights is Weights.random else model.path
        raise RequestError(
            f"--push {name}: the adapter's base model is {base}, which nobody else has; push one whole model: --merge",
            problem_id="upload-not-possible",
        )
    check_push(name)


def _bytes_of_base(work: Work) -> int:
    """What a merged model takes beside its adapter."""
    import torch

    if not work.is_merged:
        return 0
    size = (work.dtype or torch.float32).itemsize
    return sum(parameter.numel() for parameter in work.blueprint.model.parameters()) * size


def _write(work: Work, folder: Path) -> ExportOrigin:
    """Everything that is in an exported folder."""
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
        is_adapter=work.is_adapter,
        is_merged=work.is_merged,
        base_was_dequantised=written.base_was_dequantised,
        dtype=short_name(work.dtype) if work.dtype is not None else None,
        stored_dtypes=sorted({short_name(dtype) for dtype in work.weights.dtypes.values()}),
        num_parameters=written.num_parameters,
        check=written.check.to_json(),
        files_sha256=written.hashes,
        versions=(manifest.get("environment") or {}).get("packages") or {},
    )
