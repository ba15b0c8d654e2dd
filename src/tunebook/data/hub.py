"""Data sets of the Hugging Face hub, and folders in its layout, as `datasets` reads them.

Every run takes one commit. Without the hub, that is the snapshot in HF_HUB_CACHE of `hf download` or an earlier run.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.config.book import resolve_path
from tunebook.config.schema import DatasetSource
from tunebook.data.files import hash_folder
from tunebook.errors import DataError, RequestError, TunebookError, first_line
from tunebook.files import atomic_write_text
from tunebook.hardware.disk import is_disk_full
from tunebook.model.hub import disk_problem, is_out_of_reach

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A data set on the hub at one commit, or a folder on this machine."""

    folder: Path | None  # None: on the hub
    revision: str | None  # the hub's commit
    sha256: str | None  # of a folder that is not the hub's


def find_repository(source: DatasetSource, key: str) -> Repository:
    """The repository and commit of `name` and `revision` today; `key` is where the data set is configured.

    Raises: RequestError for an unknown name or revision, or if the hub is unreachable and nothing is cached.
    """
    from huggingface_hub import HfApi

    if source.name is None:
        raise RequestError(
            f"{key}.source=hub needs {key}.name=organization/name, or a folder in the hub's layout",
            problem_id="dataset-name-missing",
        )
    folder = resolve_path(source.name)
    if folder.is_dir():
        return Repository(folder=folder, revision=None, sha256=hash_folder(folder))
    try:
        revision = HfApi().dataset_info(source.name, revision=source.revision).sha
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        snapshot = _cached_snapshot(source.name, source.revision) if is_out_of_reach(error) else None
        if snapshot is None:
            raise _hub_problem(error, source, key) from error
        return Repository(folder=snapshot, revision=snapshot.name, sha256=None)
    return Repository(folder=None, revision=revision, sha256=None)


def load_split(
    source: DatasetSource, repository: Repository, split: str, key: str, cache_dir: Path
) -> datasets.Dataset:
    """The rows of a split, or of parts such as `train[:10%]+test`. A folder's files are converted into `cache_dir`.

    Raises: RequestError for an unknown split or subset, DataError for broken files.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError
    from datasets.packaged_modules.csv.csv import CsvConfig

    folder = repository.folder
    place = str(folder or source.name)
    try:
        if folder is not None and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(place)
            splits = {"train": saved} if isinstance(saved, datasets.Dataset) else saved
            if split not in splits:
                raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
            return splits[split]
        cache = {"cache_dir": str(cache_dir)} if folder is not None else {"revision": repository.revision}
        # pandas would read the answers "NA" and "null" of CSV files as nothing.
        is_csv = isinstance(datasets.load_dataset_builder(place, source.subset, **cache).config, CsvConfig)
        options = {"keep_default_na": False} if is_csv else {}
        rows = datasets.load_dataset(place, source.subset, split=split, **options, **cache)
    except (DatasetGenerationError, FileNotFoundError, ValueError, AssertionError) as error:
        if folder is not None and is_disk_full(error):
            raise
        if is_out_of_reach(error) or is_disk_full(error):
            raise _hub_problem(error, source, key) from error
        if isinstance(error, DatasetGenerationError):
            message = f"{key}.name={source.name}: its files cannot be read: {first_line(error.__cause__ or error)}"
            raise DataError(message, problem_id="data-file-broken") from error
        if isinstance(error, FileNotFoundError):  # no data files, or a gated repository
            message = f"{key}.name={source.name}: {first_line(error)}"
            raise RequestError(message, problem_id="hub-not-found") from error
        what = f"{key}.subset={source.subset or 'null'} with the split {split}"
        raise RequestError(f"{what} of {source.name}: {first_line(error)}", problem_id="hub-unknown-split") from error
    if folder is None:
        _remember_revision(source, repository)
    return rows


def split_location(source: DatasetSource, split: str) -> str:
    """A split as records and messages write it: `name/subset/split`."""
    return "/".join(part for part in (source.name, source.subset, split) if part)


def _hub_problem(error: Exception, source: DatasetSource, key: str) -> TunebookError:
    """The error for a data set that the hub does not give."""
    from huggingface_hub import errors

    if problem := disk_problem(error, f"the data set {source.name}"):
        return problem
    name = f"{key}.name={source.name}"
    if is_out_of_reach(error):
        why = f"{type(error).__name__}: {first_line(error)}"
        at = f" --revision {source.revision}" if source.revision else ""
        return RequestError(
            f"{name}: the Hugging Face hub cannot be reached ({why}) and the data set is not in this machine's cache. "
            f"On a machine with network: hf download --repo-type dataset {source.name}{at} --local-dir DIR; bring DIR "
            f"here and type {key}.name=DIR, or bring that machine's hub cache and set HF_HUB_CACHE to it",
            problem_id="hub-out-of-reach",
        )
    advice = {  # GatedRepoError is a RepositoryNotFoundError, too
        errors.HFValidationError: "it is no name on the hub (organization/name), and there is no such folder",
        errors.RevisionNotFoundError: f"it has no commit, branch or tag {key}.revision={source.revision}",
        errors.GatedRepoError: "it is gated; ask for access on its page, then `hf auth login`",
        errors.RepositoryNotFoundError: "there is no such data set or folder, or it is private (`hf auth login`)",
    }
    text = next((text for kind, text in advice.items() if isinstance(error, kind)), first_line(error))
    return RequestError(f"{name}: {text}", problem_id="hub-not-found")


def _remember_revision(source: DatasetSource, repository: Repository) -> None:
    """Write in HF_HUB_CACHE which commit a branch or tag is; `datasets` downloads by commit and does not write it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if source.name is None or repository.revision in (None, source.revision):
        return
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source.name, repo_type="dataset"), "refs")
    file = folder / (source.revision or constants.DEFAULT_REVISION)
    with suppress(OSError):  # a shared cache may be read-only
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, str(repository.revision))


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder of a revision in HF_HUB_CACHE, named after its commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    return None
