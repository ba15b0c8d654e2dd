"""Data sets of the Hugging Face hub, and folders in its layout: their revision, their splits, their rows.

Without the hub, the snapshot in HF_HUB_CACHE of `hf download` or an earlier run is used. The cache of the `datasets`
library is not: it would silently take another revision than the requested one. `datasets` also guesses types from text
(a date becomes a timestamp, "NA" a missing value, "007" a number), so it only finds and downloads JSON and CSV files;
Tunebook's own readers read them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import DatasetSource
from tunebook.data.corpus import ROWS_PER_BATCH
from tunebook.data.files import hash_folder
from tunebook.data.json_file import Record
from tunebook.data.keys import KeyAccount
from tunebook.data.problems import DocumentProblems
from tunebook.data.readers import Layout, Part, read_records, without_nulls
from tunebook.errors import DataError, RequestError, did_you_mean, first_line
from tunebook.files import CACHE_VARIABLE, atomic_write_text
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.model.hub import local_problem

if TYPE_CHECKING:
    import datasets

# Options for files in a data set's card: those that are read here, and those that change only the speed.
_READ = {"json": {"field"}, "csv": {"sep", "delimiter"}}
_HARMLESS = {
    "json": {"features", "use_threads", "block_size", "chunksize", "newlines_in_values", "on_mixed_types",
             "parse_agent_traces"},
    "csv": {"features", "chunksize", "engine", "keep_default_na", "na_values", "na_filter", "memory_map",
            "float_precision"},
}  # fmt: skip


@dataclass(frozen=True)
class TextFiles:
    """The files of every split, downloaded and unpacked."""

    paths: dict[str, list[Path]]
    layout: Layout


def _text_files(builder: datasets.DatasetBuilder, key: str, cache_dir: Path | None) -> TextFiles | None:
    """The files of a data set; None if it is not of JSON or CSV files.

    `cache_dir`: the folder for unpacked files, None for the shared cache. Raises: RequestError for options in the data
    set's card that are not read here.
    """
    import datasets

    config: Any = builder.config
    if builder.name not in _READ or not config.data_files:
        return None
    layout = _layout(builder.name, config, key)
    downloads = datasets.DownloadConfig(cache_dir=cache_dir, token=builder.token)
    manager = datasets.DownloadManager(
        dataset_name=builder.dataset_name, download_config=downloads, base_path=builder.base_path
    )
    found = manager.download_and_extract({str(split): list(files) for split, files in config.data_files.items()})
    paths = {split: [Path(path) for path in manager.iter_files(each)] for split, each in found.items()}
    return TextFiles(paths, layout)


def _text_parts(files: TextFiles, split: str, location: str, account: KeyAccount) -> Iterator[Part]:
    """The documents of a split, file by file; `train[:1000]` and `train+test` are splits, too."""

    def part(path: Path, place: str, first: int = 0, after_last: int | None = None) -> Part:
        problems = DocumentProblems(place, "row")
        records = islice(read_records(path, problems, account, files.layout), first, after_last)
        return Part(problems=problems, records=records, label=place)

    def count(path: Path) -> int:
        uncounted = KeyAccount(account.known)
        return sum(1 for _ in read_records(path, DocumentProblems(str(path)), uncounted, files.layout))

    if split in files.paths:
        paths = files.paths[split]
        yield from (part(path, location if len(paths) == 1 else f"{location}/{path.name}") for path in paths)
        return
    sizes = {name: [count(path) for path in paths] for name, paths in files.paths.items()}
    for name, begin, end in _ranges(split, {name: sum(each) for name, each in sizes.items()}):
        start = 0  # of the file, counted in documents of the split
        for path, size in zip(files.paths[name], sizes[name], strict=True):
            first, after_last = max(begin - start, 0), min(end - start, size)
            if first < after_last:
                yield part(path, f"{location}/{path.name}", first, after_last)
            start += size


def _layout(kind: str, config: Any, key: str) -> Layout:
    """The layout of the files. Raises: RequestError for an option that is not read here."""
    own = {field.name for field in dataclasses.fields(config)} - {field.name for field in _base_fields()}
    default = type(config)()
    changed = {name for name in own if getattr(config, name) != getattr(default, name)}
    unknown = sorted(changed - _READ[kind] - _HARMLESS[kind])
    if unknown:
        options = ", ".join(f"{name}={getattr(config, name)!r}" for name in unknown)
        raise RequestError(
            f"{key}: the data set's card says of its {kind.upper()} files {options}, which is not read here; bring the "
            "files to JSONL and type dataset=jsonl dataset.path=FILE_OR_GLOB",
            problem_id="hub-file-options",
        )
    if kind == "csv":
        return Layout(suffix=".csv", delimiter=config.sep)
    return Layout(suffix=".json", field=config.field)


def _base_fields() -> tuple[dataclasses.Field[Any], ...]:
    import datasets

    return dataclasses.fields(datasets.BuilderConfig)


_COMMIT_LENGTH = 40  # hexadecimal digits


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A data set on the hub at one commit, or a folder on this machine."""

    name: str
    folder: Path | None  # its files' folder, if known without asking the hub
    revision: str | None  # the hub's commit
    sha256: str | None  # of a folder that is not the hub's


def find_repository(source: DatasetSource, key: str) -> Repository:
    """The repository and commit of `name` and `revision` today.

    Raises: RequestError for an unknown name or revision, or if the hub is unreachable and nothing is cached.
    """
    if source.name is None:
        raise RequestError(
            f"{key}.source=hub needs {key}.name=organization/name, or a folder in the hub's layout",
            problem_id="dataset-name-missing",
        )
    folder = resolve_path(source.name)
    if folder.is_dir():
        return Repository(name=source.name, folder=folder, revision=None, sha256=hash_folder(folder))
    if source.name.startswith((".", "/", "~", "book:")) or source.name.count("/") > 1:
        raise RequestError(f"{key}.name: there is no folder {folder}", problem_id="hub-not-found")
    if _is_commit(source.revision):  # a commit never changes: no need to ask
        return Repository(name=source.name, folder=None, revision=source.revision, sha256=None)
    try:
        return Repository(name=source.name, folder=None, revision=_ask_revision(source, key), sha256=None)
    except _unreachable_errors() as error:
        snapshot = _cached_snapshot(source.name, source.revision)
        if snapshot is None:
            raise unreachable_error(source, key, error) from error
        return Repository(name=source.name, folder=snapshot, revision=snapshot.name, sha256=None)


def split_parts(
    source: DatasetSource, repository: Repository, split: str, key: str, cache_dir: Path, account: KeyAccount
) -> Iterator[Part]:
    """The documents of one split, downloaded if necessary; `key` is where the data set is configured.

    Raises: RequestError for an unknown split or subset, DataError for broken files.
    """
    if repository.folder is not None and _is_saved_to_disk(repository.folder):
        saved = _load_saved(repository.folder)
        _check_split(source, split, list(saved), key)
        yield from _table_parts(saved, source, split, account)
        return
    # The cache of a folder belongs to this run, that of the hub is shared.
    own_cache = cache_dir if repository.folder is not None else None
    try:
        with _local_problems(repository.name, own_cache):
            builder = _load_builder(source, repository, key, own_cache)
            files = _text_files(builder, key, own_cache)
            if files is None:
                _prepare(source, builder, key)
    except _unreachable_errors() as error:
        snapshot = None if repository.folder else _cached_snapshot(repository.name, repository.revision)
        if snapshot is None:
            raise unreachable_error(source, key, error) from error
        yield from split_parts(source, replace(repository, folder=snapshot), split, key, cache_dir, account)
        return
    if repository.folder is None:
        _remember_revision(source, repository)
    _check_split(source, split, list(files.paths if files is not None else builder.info.splits or {}), key)
    if files is not None:
        yield from _text_parts(files, split, split_location(source, split), account)
        return
    yield from _table_parts(builder.as_dataset(), source, split, account)


def split_location(source: DatasetSource, split: str) -> str:
    """A split as records and messages write it: `name/subset/split`."""
    return "/".join(part for part in (source.name, source.subset, split) if part)


def unreachable_error(source: DatasetSource, key: str, error: Exception) -> RequestError:
    """The error for an unreachable hub."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    why = "HF_HUB_OFFLINE is set" if offline else f"{type(error).__name__}: {first_line(error)}"
    at = f" --revision {source.revision}" if source.revision else ""
    return RequestError(
        f"{key}.name={source.name}: the Hugging Face hub cannot be reached ({why}) and the data set is not in this "
        "machine's cache. To work offline, one of:\n"
        f"  on a machine with network: hf download --repo-type dataset {source.name}{at} --local-dir DIR\n"
        f"    bring DIR here and type {key}.name=DIR; or bring that machine's hub cache and set HF_HUB_CACHE to it\n"
        "  documents of your own: dataset=jsonl dataset.path=FILE_OR_GLOB\n"
        "  generated documents: dataset=synthetic",
        problem_id="hub-out-of-reach",
    )


def _table_parts(
    splits: Mapping[str, datasets.Dataset], source: DatasetSource, split: str, account: KeyAccount
) -> Iterator[Part]:
    """The documents of splits that have types of their own, such as Parquet's; rows count in the whole split."""
    for name, first, after_last in _ranges(split, {name: len(dataset) for name, dataset in splits.items()}):
        if first < after_last:
            location = split_location(source, name)
            records = _iterate_rows(splits[name].select(range(first, after_last)), first, account)
            yield Part(problems=DocumentProblems(location, "row"), records=records, label=location)


def _ranges(split: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """What `train[:10%]+test` takes of splits of these sizes: the name, the first row, and the one after the last."""
    import datasets

    instructions = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return [(one.splitname, one.from_, one.to) for one in instructions]


def _iterate_rows(dataset: datasets.Dataset, number: int, account: KeyAccount) -> Iterator[Record]:
    """Every row with its number, one more than `number` first; columns that are not read are only counted."""
    names = dataset.column_names
    wanted = account.wanted_columns(names)
    for name in names:
        if name not in wanted:
            batches = dataset.select_columns([name]).with_format("arrow").iter(batch_size=ROWS_PER_BATCH)
            account.count_column(name, len(dataset) - sum(batch.column(0).null_count for batch in batches))
    for batch in dataset.select_columns(wanted).iter(batch_size=ROWS_PER_BATCH):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, without_nulls(dict(zip(batch, values, strict=True)))


def _load_builder(
    source: DatasetSource, repository: Repository, key: str, cache_dir: Path | None
) -> datasets.DatasetBuilder:
    """The builder, which knows the data set's files and splits."""
    import datasets

    place, revision = (repository.name, repository.revision) if repository.folder is None else (repository.folder, None)
    try:
        return datasets.load_dataset_builder(str(place), source.subset, cache_dir=cache_dir, revision=revision)
    except _unreachable_errors():
        raise
    except FileNotFoundError as error:
        raise RequestError(
            f"{key}.name={source.name} holds no files of documents ({first_line(error)})", problem_id="hub-not-found"
        ) from error
    except ValueError as error:  # an unknown or missing subset; the message lists those there are
        raise RequestError(
            f"{key}.subset={source.subset or 'null'} of {source.name}: {error}", problem_id="hub-unknown-split"
        ) from error


def _prepare(source: DatasetSource, builder: datasets.DatasetBuilder, key: str) -> None:
    """Let the `datasets` library convert the data set's files to Arrow."""
    from datasets.exceptions import DatasetGenerationError

    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, _unreachable_errors()):
            raise cause from error
        raise DataError(
            f"{key}.name={source.name}: its files cannot be read: {_summary(cause)}", problem_id="data-file-broken"
        ) from error


@contextmanager
def _local_problems(name: str, folder: Path | None) -> Iterator[None]:
    """Turn errors of this machine into errors with advice. `folder`: what is written to, None for the hub's cache."""
    try:
        yield
    except Exception as error:  # the library wraps them in errors of its own
        if folder is not None and is_disk_full(error):
            advice = f"free some space, or name a folder on another disk: {CACHE_VARIABLE}=DIR"
            raise no_space(f"the data set {name}", folder, advice) from error
        if problem := local_problem(error, f"the data set {name}"):
            raise problem from error
        raise


def _unreachable_errors() -> tuple[type[Exception], ...]:
    # HTTPError is the base class of the HTTP client's errors, whichever client this huggingface_hub is built on.
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,
        LocalEntryNotFoundError,
    )

    return (ConnectionError, TimeoutError, HTTPError, LocalEntryNotFoundError)  # offline mode: ConnectionError


def _ask_revision(source: DatasetSource, key: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        with _local_problems(source.name or "", None):
            return str(HfApi().dataset_info(source.name or "", revision=source.revision).sha)
    except HFValidationError as error:
        raise RequestError(
            f"{key}.name={source.name} is no name on the hub (organization/name), and there is no folder "
            f"{resolve_path(source.name or '')}",
            problem_id="hub-not-found",
        ) from error
    except RevisionNotFoundError as error:
        raise RequestError(
            f"{key}.revision={source.revision}: {source.name} has no such commit, branch or tag",
            problem_id="hub-not-found",
        ) from error
    except GatedRepoError as error:
        raise RequestError(
            f"{key}.name={source.name} is gated: ask for access on https://huggingface.co/datasets/{source.name}, "
            "then `hf auth login`",
            problem_id="hub-not-found",
        ) from error
    except RepositoryNotFoundError as error:
        raise RequestError(
            f"{key}.name={source.name}: there is no such data set on the hub, or it is private (`hf auth login`), "
            f"and no folder {resolve_path(source.name or '')}",
            problem_id="hub-not-found",
        ) from error


def _remember_revision(source: DatasetSource, repository: Repository) -> None:
    """Write in HF_HUB_CACHE which commit a branch or tag is; `datasets` downloads by commit and does not write it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if source.revision == repository.revision or repository.revision is None:
        return
    repository_cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository.name, repo_type="dataset"))
    file = repository_cache / "refs" / (source.revision or constants.DEFAULT_REVISION)
    with suppress(OSError):  # a shared cache may be read-only
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, repository.revision)


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a revision in HF_HUB_CACHE, named after its commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _is_commit(revision: str | None) -> bool:
    return revision is not None and len(revision) == _COMMIT_LENGTH and set(revision) <= set("0123456789abcdef")


def _is_saved_to_disk(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _load_saved(folder: Path) -> Mapping[str, datasets.Dataset]:
    """The splits in a folder of `save_to_disk`: a dictionary of splits, or one split without its name."""
    import datasets

    saved = datasets.load_from_disk(str(folder))
    return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}


def _check_split(source: DatasetSource, split: str, known: list[str], key: str) -> None:
    """Raises: RequestError for a split that there is not. `train[:1000]` and `train+test` are splits, too."""
    which = f"{key}.train_split" if split == source.train_split else f"{key}.validation_split"
    names = [part.partition("[")[0].strip() for part in split.split("+")]
    absent = next((name for name in names if name not in known), None)
    if absent is not None:
        raise RequestError(
            f"{which}: {source.name} has no split '{absent}'.{did_you_mean(absent, known)} "
            f"Its splits: {', '.join(known)}",
            problem_id="hub-unknown-split",
        )
    try:
        _ranges(split, dict.fromkeys(known, 0))
    except (ValueError, AssertionError) as error:
        raise RequestError(
            f"{which}={split} is no part of a split ({first_line(error)}); write it as {names[0]}[:1000], "
            f"{names[0]}[90%:] or {names[0]}[100:200]",
            problem_id="hub-unknown-split",
        ) from error


def _summary(error: BaseException, limit: int = 400) -> str:
    """A message on one line, cut if it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]} ..."
