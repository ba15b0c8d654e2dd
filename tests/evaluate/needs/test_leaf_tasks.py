from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.config.book import resolve_path
from tunebook.evaluate.needs.leaf_tasks import leaf_tasks
from tunebook.evaluate.task_files import read_task_file


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def found(name: str) -> dict[str, tuple[object, object]]:
    """Each leaf's data set."""
    return {leaf.name: (leaf.config.get("dataset_path"), leaf.config.get("dataset_name")) for leaf in leaf_tasks(name)}


def test_a_task_has_what_it_includes(tasks: Path) -> None:
    write(tasks, "animals/_template_yaml", "dataset_path: zoo/animals\ndataset_name: all\n")
    write(tasks, "animals/cats.yaml", "include: _template_yaml\ntask: cats\ndataset_name: cats\n")
    (leaf,) = leaf_tasks("cats")
    assert (leaf.config["dataset_path"], leaf.config["dataset_name"]) == ("zoo/animals", "cats")
    assert leaf.folder == tasks / "animals"


def test_a_group_is_its_members_with_what_it_says_for_them(tasks: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    write(tasks, "b.yaml", "task: b\ndataset_path: zoo/b\n")
    write(tasks, "inner.yaml", "group: inner\ntask: [b]\ndataset_name: winter\n")
    group = "group: outer\ntask: [a, {task: a, dataset_name: x}, inner, {task: own, dataset_path: zoo/own}, gone]\n"
    write(tasks, "outer.yaml", group)
    leaves = [(leaf.name, leaf.config["dataset_path"], leaf.config.get("dataset_name")) for leaf in leaf_tasks("outer")]
    assert leaves == [
        ("a", "zoo/a", None), ("a", "zoo/a", "x"), ("b", "zoo/b", "winter"), ("own", "zoo/own", None),
    ]  # fmt: skip


def test_a_group_within_a_group_may_be_written_in_place(tasks: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    write(tasks, "outer.yaml", "group: outer\ntask:\n  - group: inner\n    task: [a]\n")
    assert found("outer") == {"a": ("zoo/a", None)}


def test_a_group_that_holds_itself_ends(tasks: Path) -> None:
    write(tasks, "a.yaml", "task: a\ndataset_path: zoo/a\n")
    write(tasks, "loop.yaml", "group: loop\ntask: [a, loop]\n")
    assert found("loop") == {"a": ("zoo/a", None)}


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


def test_held_out_conversations_are_read_from_their_file() -> None:
    assert leaf_tasks(read_task_file(resolve_path("book:recipes/quickstart/tasks/quickstart.yaml"))) == []


def test_a_name_that_is_not_there_is_no_task(tasks: Path) -> None:
    assert leaf_tasks("gone") == []


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
    leaves = leaf_tasks(group)
    assert len({leaf.name for leaf in leaves}) == len(leaves) == num_tasks
    assert {leaf.config["dataset_path"] for leaf in leaves} == data
