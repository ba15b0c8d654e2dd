"""Data sets of the Hugging Face hub, and folders in its layout, as `datasets` reads them.

Every run takes one commit. Without the hub, that is the snapshot in HF_HUB_CACHE of `hf download` or an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.schema import DatasetSource
from tunebook.data.files import hash_folder
from tunebook.errors import DataError, RequestError, first_line
from tunebook.hardware.disk import is_disk_full
from tunebook.model.hub import hub_problem, is_out_of_reach

if TYPE_CHECKING:
    import datasets

_ROWS_PER_BATCH = 100  # which may have images


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
    from huggingface_hub import HfApi, snapshot_download

    assert source.name is not None, "a rule requires it"
    folder = resolve_path(source.name)
    if folder.is_dir():
        return Repository(folder=folder, revision=None, sha256=hash_folder(folder))
    is_reached = True
    try:
        try:
            HfApi().dataset_info(source.name, revision=source.revision)
        except Exception as error:
            if not is_out_of_reach(error):
                raise
            is_reached = False
        # Also notes in the cache which commit a branch is, which `datasets` does not.
        snapshot = Path(
            snapshot_download(
                source.name,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=["README.md"],
                local_files_only=not is_reached,
            )
        )
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        raise hub_problem(error, "data set", source.name, source.revision, key=f"{key}.name") from error
    return Repository(folder=None if is_reached else snapshot, revision=snapshot.name, sha256=None)


def load_split(
    source: DatasetSource, repository: Repository, split: str, key: str, cache_dir: Path
) -> datasets.Dataset:
    """The rows of a split, or of parts such as `train[:10%]+test`. A folder's files are converted into `cache_dir`.

    Raises: RequestError for an unknown split or subset, DataError for broken files.
    """
    import datasets
    from datasets.packaged_modules.csv.csv import CsvConfig

    folder = repository.folder
    place = str(folder or source.name)
    try:
        if folder is not None and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(place)
            return (saved if isinstance(saved, datasets.DatasetDict) else {"train": saved})[split]
        cache = {"cache_dir": str(cache_dir)} if folder is not None else {"revision": repository.revision}
        # pandas would read the answers "NA" and "null" of CSV files as nothing.
        is_csv = isinstance(datasets.load_dataset_builder(place, source.subset, **cache).config, CsvConfig)
        options = {"keep_default_na": False} if is_csv else {}
        return datasets.load_dataset(place, source.subset, split=split, **options, **cache)
    except (OSError, ValueError, KeyError, AssertionError, datasets.exceptions.DatasetGenerationError) as error:
        if is_disk_full(error) and folder is not None:
            raise
        if is_disk_full(error) or is_out_of_reach(error):
            raise hub_problem(error, "data set", place, source.revision, key=f"{key}.name") from error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            message = f"{key}.name={source.name}: its files cannot be read: {first_line(error.__cause__ or error)}"
            raise DataError(message, problem_id="data-file-broken") from error
        text = f"{key}.subset={source.subset or 'null'} with the split {split} of {source.name}: {first_line(error)}"
        raise RequestError(text, problem_id="hub-unknown-split") from error


def rows_of(split: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """The rows of a split, with images as they are stored: `datasets` would decode each."""
    if "Image(" not in repr(split.features):
        yield from split
        return
    for batch in split.with_format("arrow").iter(_ROWS_PER_BATCH):
        yield from batch.to_pylist()
