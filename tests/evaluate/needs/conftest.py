"""Task files in the harness' format, and data sets in the cache of the `datasets` library as it leaves them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunebook.evaluate import harness_tasks

CacheDataSet = Callable[[str, str], Path]


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that the library looks into."""
    import datasets.config

    folder = tmp_path / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    return folder


@pytest.fixture
def cache_data_set(datasets_cache: Path, tmp_path: Path) -> CacheDataSet:
    """`cache_data_set("organisation/Name", "subset")`: one row in the split test, as if it had been downloaded."""

    def cache(repository: str, subset: str) -> Path:
        from datasets.data_files import DataFilesDict
        from datasets.naming import camelcase_to_snakecase
        from datasets.packaged_modules.json.json import Json

        organisation, name = repository.split("/")
        made = tmp_path / "made" / f"{name}-{subset}"
        made.mkdir(parents=True)
        (made / "rows.jsonl").write_text(json.dumps({"question": "it barks", "right": 1}) + "\n")
        builder = Json(
            cache_dir=str(made / "cache"),
            dataset_name=name,
            config_name=subset,
            hash="0123456789abcdef",
            data_files=DataFilesDict.from_patterns({"test": [str(made / "rows.jsonl")]}),
        )
        builder.download_and_prepare()
        # Only what comes from the hub is cached under its organisation, and without the hash of the files.
        parts = Path(builder.cache_dir).parts[-2:]
        place = datasets_cache.joinpath(f"{organisation}___{camelcase_to_snakecase(name)}", subset, *parts)
        place.parent.mkdir(parents=True)
        Path(builder.cache_dir).rename(place)
        return place

    return cache


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that stands in for the harness' own tasks."""
    folder = tmp_path / "lm_eval" / "tasks"
    folder.mkdir(parents=True)
    monkeypatch.setattr(harness_tasks, "task_folder", lambda: folder)
    for module in ("modules", "nltk_data"):
        monkeypatch.setattr(f"tunebook.evaluate.needs.{module}.task_folder", lambda: folder)
    harness_tasks.harness_tasks.cache_clear()
    yield folder
    harness_tasks.harness_tasks.cache_clear()
