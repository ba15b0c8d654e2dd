"""JSON and CSV files of a data set in the hub's layout, read by Tunebook's own readers.

The `datasets` library guesses types from text: a date becomes a timestamp, "NA" a missing value, "007" a number. It is
asked here only which files make up a split, and to download them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.data.json_file import Record
from tunebook.data.keys import KeyAccount
from tunebook.data.problems import DocumentProblems
from tunebook.data.readers import Layout, Part, read_records
from tunebook.errors import RequestError

if TYPE_CHECKING:
    import datasets

# What a data set's card may say of its files: what is read here, and what changes nothing but speed.
_READ = {"json": {"field"}, "csv": {"sep", "delimiter"}}
_HARMLESS = {
    "json": {"features", "use_threads", "block_size", "chunksize", "newlines_in_values", "on_mixed_types",
             "parse_agent_traces"},
    "csv": {"features", "chunksize", "engine", "keep_default_na", "na_values", "na_filter", "memory_map",
            "float_precision"},
}  # fmt: skip


@dataclass(frozen=True)
class TextFile:
    """One file, downloaded and unpacked."""

    path: Path
    layout: Layout


def text_files(builder: datasets.DatasetBuilder, key: str, cache_dir: Path | None) -> dict[str, list[TextFile]] | None:
    """The files of every split; None for a data set that is not of JSON or CSV files.

    `cache_dir`: where files that have to be unpacked go, None for the shared cache. Raises: RequestError where the data
    set's card says of its files what is not read here.
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
    return {
        split: [TextFile(Path(path), layout) for path in manager.iter_files(paths)] for split, paths in found.items()
    }


def split_parts(files: dict[str, list[TextFile]], split: str, location: str, account: KeyAccount) -> Iterator[Part]:
    """The documents of a split, file by file; `train[:1000]` and `train+test` are splits, too."""
    if split in files:
        for file in files[split]:
            place = location if len(files[split]) == 1 else f"{location}/{file.path.name}"
            yield _part(file, place, account, 0, None)
        return
    import datasets

    sizes = {name: [_count(file, account) for file in each] for name, each in files.items()}
    instructions = datasets.ReadInstruction.from_spec(split).to_absolute({name: sum(n) for name, n in sizes.items()})
    for instruction in instructions:
        start = 0  # of the file, counted in documents of the split
        for file, size in zip(files[instruction.splitname], sizes[instruction.splitname], strict=True):
            first, after_last = max(instruction.from_ - start, 0), min(instruction.to - start, size)
            if first < after_last:
                yield _part(file, f"{location}/{file.path.name}", account, first, after_last)
            start += size


def _part(file: TextFile, place: str, account: KeyAccount, first: int, after_last: int | None) -> Part:
    problems = DocumentProblems(place, "row")
    records: Iterator[Record] = read_records(file.path, problems, account, file.layout)
    return Part(problems=problems, records=islice(records, first, after_last), label=place)


def _count(file: TextFile, account: KeyAccount) -> int:
    problems = DocumentProblems(str(file.path))
    return sum(1 for _ in read_records(file.path, problems, KeyAccount(account.known), file.layout))


def _layout(kind: str, config: Any, key: str) -> Layout:
    """How the files are written. Raises: RequestError for an option that is not read here."""
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
