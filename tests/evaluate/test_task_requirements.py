from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.evaluate.task_files import Task, read_task_file, task_folder
from tunebook.evaluate.task_requirements import (
    DataSet,
    LeafTask,
    data_set_of,
    imported_files,
    leaf_tasks,
    missing_packages,
    nltk_packages,
)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def found(name: str) -> dict[str, tuple[object, object]]:
    """Each leaf's data set."""
    return {
        leaf.task_name: (leaf.config.get("dataset_path"), leaf.config.get("dataset_name"))
        for leaf in leaf_tasks(Task(name=name))
    }


def test_a_task_has_what_it_includes(tasks: Path) -> None:
    write(tasks, "animals/_template_yaml", "dataset_path: zoo/animals\ndataset_name: all\n")
    write(tasks, "animals/cats.yaml", "include: _template_yaml\ntask: cats\ndataset_name: cats\n")
    (leaf,) = leaf_tasks(Task(name="cats"))
    assert (leaf.config["dataset_path"], leaf.config["dataset_name"]) == ("zoo/animals", "cats")


def test_a_group_is_its_members_with_what_it_says_for_them(tasks: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    write(tasks, "b.yaml", "task: b\ndataset_path: zoo/b\n")
    write(tasks, "inner.yaml", "group: inner\ntask: [b]\ndataset_name: winter\n")
    group = "group: outer\ntask: [a, {task: a, dataset_name: x}, inner, {task: own, dataset_path: zoo/own}, gone]\n"
    write(tasks, "outer.yaml", group)
    leaves = [
        (leaf.task_name, leaf.config.get("dataset_path"), leaf.config.get("dataset_name"))
        for leaf in leaf_tasks(Task(name="outer"))
    ]
    assert leaves == [
        ("a", "zoo/a", None), ("a", "zoo/a", "x"), ("b", "zoo/b", "winter"), ("own", "zoo/own", None),
        ("gone", None, None),
    ]  # fmt: skip


def test_a_group_within_a_group_may_be_written_in_place(tasks: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    write(tasks, "outer.yaml", "group: outer\ntask:\n  - group: inner\n    task: [a]\n")
    assert found("outer") == {"a": ("zoo/a", None)}


def test_what_the_harness_cannot_build_is_left_to_it(tasks: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    write(tasks, "loop.yaml", "group: loop\ntask: [a, loop]\n")
    assert leaf_tasks(Task(name="loop")) == leaf_tasks(Task(name="gone")) == []


def test_a_tag_is_every_task_that_carries_it_also_through_what_it_includes(tasks: Path) -> None:
    write(tasks, "x/a.yaml", "tag: [pets, others]\ntask: a\ndataset_path: zoo/a\n")
    write(tasks, "x/b.yaml", "include: a.yaml\ntask: b\ndataset_name: b\n")
    write(tasks, "x/c.yaml", "include: a.yaml\ntask: c\ntag: wild\n")
    write(tasks, "y/_template_yaml", "tag: pets\ndataset_path: zoo/y\n")
    write(tasks, "y/d.yaml", "include: _template_yaml\ntask: d\n")
    assert found("pets") == {"a": ("zoo/a", None), "b": ("zoo/a", "b"), "d": ("zoo/y", None)}
    assert set(found("wild")) == {"c"}


def test_a_file_of_ones_own_is_its_task_or_its_group(tasks: Path, tmp_path: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    one = read_task_file(write(tmp_path, "mine/one.yaml", "task: one\ndataset_path: my/data\n"))
    several = read_task_file(write(tmp_path, "mine/several.yaml", "group: several\ntask: [a]\n"))
    assert [leaf.config["dataset_path"] for leaf in (*leaf_tasks(one), *leaf_tasks(several))] == ["my/data", "zoo/a"]


def test_a_file_of_ones_own_comes_before_a_task_of_that_name(tasks: Path, tmp_path: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    own = read_task_file(write(tmp_path, "mine/a.yaml", "task: a\ndataset_path: my/data\n"))
    several = read_task_file(write(tmp_path, "mine/both.yaml", "group: both\ntask: [a]\n"))
    assert [leaf.config["dataset_path"] for leaf in (*leaf_tasks(own), *leaf_tasks(several))] == ["my/data"] * 2


@pytest.mark.parametrize(
    ("group", "num_tasks", "data"),
    [
        ("leaderboard_bbh", 24, {"SaylorTwift/bbh"}),
        ("leaderboard_gpqa", 3, {"Idavidrein/gpqa"}),
        ("leaderboard_ifeval", 1, {"wis-k/instruction-following-eval"}),
        ("leaderboard_mmlu_pro", 1, {"TIGER-Lab/MMLU-Pro"}),
        ("leaderboard_musr", 3, {"TAUR-Lab/MuSR"}),
        ("ai2_arc", 2, {"allenai/ai2_arc"}),  # a tag
    ],
)
def test_the_installed_leaderboard(group: str, num_tasks: int, data: set[str]) -> None:
    leaves = leaf_tasks(Task(name=group))
    assert len({leaf.task_name for leaf in leaves}) == len(leaves) == num_tasks
    assert {leaf.config["dataset_path"] for leaf in leaves} == data


def data_set(path: str, subset: str | None = None, **options: Any) -> DataSet:
    settings = {"task": "t", "dataset_path": path, "dataset_name": subset, "dataset_kwargs": options}
    found = data_set_of(LeafTask(task_name="t", config=settings))
    assert found is not None
    return found


def test_what_is_in_the_librarys_cache_is_here(cache_data_set: Callable[[str, str], Path]) -> None:
    assert not data_set("zoo/AnimalKinds", "cats").is_local
    cache_data_set("zoo/AnimalKinds", "cats")
    assert data_set("zoo/AnimalKinds", "cats").is_local
    assert data_set("zoo/AnimalKinds", "cats", trust_remote_code=True, revision="main").is_local
    assert data_set("zoo/AnimalKinds").is_local  # the only one there
    assert not data_set("zoo/AnimalKinds", "dogs").is_local
    assert not data_set("zoo/AnimalKinds", "cats", data_files={"test": "other.csv"}).is_local
    assert not data_set("garden/AnimalKinds", "cats").is_local


def test_the_library_loads_what_is_here_and_refuses_what_is_not(
    cache_data_set: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    cache_data_set("zoo/animals", "cats")
    assert datasets.load_dataset("zoo/animals", "cats")["test"][0] == {"question": "it barks", "right": 1}
    for absent in (data_set("zoo/animals", "dogs"), data_set("zoo/plants")):
        assert not absent.is_local
        with pytest.raises((ValueError, FileNotFoundError, ConnectionError)):
            datasets.load_dataset(absent.path, absent.subset)


def test_which_of_several_parts_is_meant_must_be_named(cache_data_set: Callable[[str, str], Path]) -> None:
    cache_data_set("zoo/animals", "cats")
    cache_data_set("zoo/animals", "dogs")
    assert not data_set("zoo/animals").is_local  # the library refuses to choose
    assert data_set("zoo/animals", "dogs").is_local


def test_files_and_folders_are_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    data = data_set("json", data_files={"test": [str(file)]})
    assert not data.is_local
    file.write_text("{}")
    assert data.is_local
    assert data_set("json", data_files=str(tmp_path / "*.jsonl")).is_local
    assert not data_set("json", data_files={"test": "https://example.org/rows.jsonl"}).is_local
    assert data_set(str(tmp_path)).is_local


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
    assert data_set_of(LeafTask(task_name="t", config=config)) is None


def task(folder: Path, function: str = "utils.score") -> LeafTask:
    config = {"process_results": f"{folder}/{function}", "metric_list": [{"aggregation": "mean"}]}
    return LeafTask(task_name="t", config=config)


def test_only_what_loading_cannot_do_without_is_missing(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text(
        "import json\n"
        "import not_here_a.part\n"
        "from not_here_b import something\n"
        "from math_verify import parse\n"
        "if TYPE_CHECKING:\n    import not_here_c\n"
        "try:\n    import not_here_d\nexcept ImportError:\n    not_here_d = None\n"
        "try:\n    import not_here_e\nexcept ImportError:\n    raise ImportError('pip install it')\n"
        "def score():\n    import not_here_f\n"
    )
    assert missing_packages(task(tmp_path)) == ["math-verify", "not_here_a", "not_here_b", "not_here_e"]


def test_code_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import not_here\nraise SystemExit('was run')\n")
    assert missing_packages(task(tmp_path)) == ["not_here"]
    assert "utils" not in sys.modules
    (tmp_path / "broken.py").write_text("this is no Python")
    assert missing_packages(task(tmp_path, "broken.score")) == []


def test_modules_of_the_harness_are_followed_to_their_own(tasks: Path, tmp_path: Path) -> None:
    (tasks / "words").mkdir()
    (tasks / "words" / "shared.py").write_text("import not_here\nfrom lm_eval.tasks.words import util\n")
    (tasks / "words" / "util.py").write_text("from lm_eval.tasks.words.shared import anything\n")
    (tmp_path / "utils.py").write_text("from lm_eval.tasks.words import util\nimport lm_eval.api\n")
    found = task(tmp_path)
    assert imported_files(found) == {
        tmp_path / "utils.py", tasks / "words" / "util.py", tasks / "words" / "shared.py",
    }  # fmt: skip
    assert missing_packages(found) == ["not_here"]


def test_a_task_without_functions_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import not_here\n")
    config = {"doc_to_text": f"{tmp_path}/score it", "description": f"/{'a' * 300}/utils.score"}
    assert imported_files(LeafTask(task_name="t", config=config)) == frozenset()


@pytest.mark.parametrize("name", ["leaderboard_bbh", "leaderboard_gpqa", "leaderboard_mmlu_pro", "leaderboard_musr"])
def test_the_installed_leaderboard_needs_no_package_more(name: str) -> None:
    assert {package for leaf in leaf_tasks(Task(name=name)) for package in missing_packages(leaf)} == set()


def test_the_installed_ifeval_imports_the_code_that_it_is_scored_with() -> None:
    (leaf,) = leaf_tasks(Task(name="leaderboard_ifeval"))
    names = {"/".join(file.parts[-2:]) for file in imported_files(leaf)}
    assert names == {"ifeval/utils.py", "ifeval/instructions_registry.py", "ifeval/instructions.py",
                     "ifeval/instructions_util.py"}  # fmt: skip


def test_of_the_leaderboard_only_ifeval_needs_it() -> None:
    names = ("bbh", "gpqa", "ifeval", "mmlu_pro", "musr")
    leaves = {name: leaf_tasks(Task(name=f"leaderboard_{name}")) for name in names}
    needed = {name: [package for leaf in found for package in nltk_packages(leaf)] for name, found in leaves.items()}
    assert needed == {"bbh": [], "gpqa": [], "ifeval": ["punkt_tab"], "mmlu_pro": [], "musr": []}


def test_all_nltk_data_of_the_harness_is_of_the_kind_that_is_looked_for() -> None:
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in task_folder().rglob("*.py")]
    calls = re.findall(r"nltk\.download\(.*?\)", "\n".join(texts))
    assert set(calls) == {'nltk.download("punkt_tab")', 'nltk.download("punkt")'}
