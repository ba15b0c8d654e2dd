from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.evaluate.needs.data_sets import DataSet, data_set_of, is_here
from tunebook.evaluate.needs.leaf_tasks import LeafTask


def data_set(path: str, subset: str | None = None, **options: Any) -> DataSet:
    settings = {"task": "t", "dataset_path": path, "dataset_name": subset, "dataset_kwargs": options}
    found = data_set_of(LeafTask(name="t", config=settings, folder=Path()))
    assert found is not None
    return found


def test_what_is_in_the_librarys_cache_is_here(cache_data_set: Callable[[str, str], Path]) -> None:
    assert not is_here(data_set("zoo/AnimalKinds", "cats"))
    cache_data_set("zoo/AnimalKinds", "cats")
    assert is_here(data_set("zoo/AnimalKinds", "cats"))
    assert is_here(data_set("zoo/AnimalKinds", "cats", trust_remote_code=True, revision="main"))
    assert is_here(data_set("zoo/AnimalKinds"))  # the only one there
    assert not is_here(data_set("zoo/AnimalKinds", "dogs"))
    assert not is_here(data_set("zoo/AnimalKinds", "cats", data_files={"test": "other.csv"}))
    assert not is_here(data_set("garden/AnimalKinds", "cats"))


def test_the_library_loads_what_is_here_and_refuses_what_is_not(
    cache_data_set: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    cache_data_set("zoo/animals", "cats")
    assert datasets.load_dataset("zoo/animals", "cats")["test"][0] == {"question": "it barks", "right": 1}
    for absent in (data_set("zoo/animals", "dogs"), data_set("zoo/plants")):
        assert not is_here(absent)
        with pytest.raises((ValueError, FileNotFoundError, ConnectionError)):
            datasets.load_dataset(absent.path, absent.subset)


def test_which_of_several_parts_is_meant_must_be_named(cache_data_set: Callable[[str, str], Path]) -> None:
    cache_data_set("zoo/animals", "cats")
    cache_data_set("zoo/animals", "dogs")
    assert not is_here(data_set("zoo/animals"))  # the library refuses to choose
    assert is_here(data_set("zoo/animals", "dogs"))


def test_files_and_folders_are_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    data = data_set("json", data_files={"test": [str(file)]})
    assert not is_here(data)
    file.write_text("{}")
    assert is_here(data)
    assert is_here(data_set("json", data_files=str(tmp_path / "*.jsonl")))
    assert not is_here(data_set("json", data_files={"test": "https://example.org/rows.jsonl"}))
    assert is_here(data_set(str(tmp_path)))


def test_equal_data_sets_are_one() -> None:
    a = data_set("zoo/animals", "cats", data_files={"test": "a", "train": "b"})
    b = data_set("zoo/animals", "cats", data_files={"train": "b", "test": "a"}, trust_remote_code=True)
    assert a == b
    assert hash(a) == hash(b)
    assert (a.label, data_set("zoo/animals").label) == ("zoo/animals (cats)", "zoo/animals")


@pytest.mark.parametrize(
    "config", [{}, {"class": "x"}, {"dataset_path": "a/b", "custom_dataset": "utils.f"}, {"dataset_path": None}]
)
def test_data_that_a_tasks_code_finds_is_not_known(config: dict[str, Any]) -> None:
    assert data_set_of(LeafTask(name="t", config=config, folder=Path())) is None
