from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console

from tunebook.errors import DoesNotFitError, RequestError
from tunebook.evaluate import fetch, preflight
from tunebook.evaluate.fetch import fetch_command, fetch_tasks
from tunebook.evaluate.preflight import find_missing

TASK = "task: {name}\ndataset_path: {data}\ndataset_name: {subset}\ntest_split: test\n"


class Hub:
    """Stands in for the library's way to the hub: what it has gets into the cache as it does from there."""

    def __init__(self, cache: Callable[[str, str], Path], data: set[tuple[str, str]]) -> None:
        self.cache, self.data = cache, data
        self.asked: list[tuple[str, str]] = []

    def load_dataset_builder(self, path: str, name: str, **_options: Any) -> Hub:
        self.asked.append((path, name))
        if (path, name) not in self.data:
            raise ConnectionError("Couldn't reach the hub")
        return self

    def download_and_prepare(self) -> None:
        self.cache(*self.asked[-1])


@pytest.fixture
def hub(cache_data_set: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> Hub:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    hub = Hub(cache_data_set, {("zoo/open", "cats"), ("zoo/open", "dogs")})
    monkeypatch.setattr("datasets.load_dataset_builder", hub.load_dataset_builder)
    monkeypatch.setattr(preflight.Hub, "_ask", lambda *_: None)
    return hub


@pytest.fixture
def task(tmp_path: Path) -> Callable[[str, str], str]:
    def make(data: str, subset: str) -> str:
        file = tmp_path / f"{subset}.yaml"
        file.write_text(TASK.format(name=subset, data=data, subset=subset))
        return str(file)

    return make


def test_what_was_fetched_is_not_missing_offline_and_is_not_fetched_again(
    hub: Hub, task: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task("zoo/open", "cats"), task("zoo/open", "dogs")]
    said: list[str] = []
    assert fetch_tasks([*tasks, tasks[0]], said.append) == []
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert find_missing([*tasks, task("zoo/open", "birds")]) != []
        assert find_missing(tasks) == []
    assert said == ["fetching data set zoo/open (cats)", "fetching data set zoo/open (dogs)"]
    assert fetch_tasks(tasks, said.append) == []
    assert hub.asked == [("zoo/open", "cats"), ("zoo/open", "dogs")]


def test_what_cannot_be_had_does_not_keep_the_rest_away(hub: Hub, task: Callable[[str, str], str]) -> None:
    tasks = [task("zoo/gone", "birds"), task("zoo/open", "cats")]
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(
        RequestError, match=r"zoo/gone \(birds\) is not .*, and the hub is out of reach.*bring HF_HOME"
    ) as raised:
        fetch_command(None, [], [], console, suite=None, tasks=tasks)
    assert raised.value.problem_id == "not-fetched"
    assert "zoo/open" not in raised.value.message
    assert hub.asked == [("zoo/gone", "birds"), ("zoo/open", "cats")]


def test_without_a_network_the_library_is_not_left_to_try_for_minutes(
    hub: Hub, task: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.Hub, "_ask", lambda *_: "the hub is out of reach")
    problems = fetch_tasks([task("zoo/open", "cats"), task("zoo/open", "dogs")], lambda _: None)
    assert [problem.partition(": ")[2] for problem in problems[:2]] == [
        f"the data set zoo/open ({part}) is not on this machine, and the hub is out of reach"
        for part in ("cats", "dogs")
    ]
    assert hub.asked == []


def test_nltk_data_and_packages_belong_to_it(
    hub: Hub, task: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(preflight, "is_nltk_package_local", lambda _: False)
    monkeypatch.setattr(fetch, "download_nltk_package", fetched.append)
    file = Path(task("zoo/open", "cats"))
    file.write_text(file.read_text() + "process_results: !function utils.score\n")
    (tmp_path / "utils.py").write_text("import not_here\nfrom lm_eval.tasks.ifeval import instructions_util\n")
    problems = fetch_tasks([str(file)], lambda _: None)
    assert fetched == ["punkt_tab"]
    assert "not_here" in problems[-1].partition("type: pip install ")[2].split()


def test_a_recipe_is_its_model_its_data_and_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[str | None] = []
    data: list[str | None] = []
    tasks: list[str] = []
    monkeypatch.setattr(fetch, "_fetch_model", lambda config: models.append(config.model.name))
    monkeypatch.setattr(fetch, "_fetch_data_set", lambda source: data.append(source.name))
    monkeypatch.setattr(fetch, "fetch_tasks", lambda names, _: tasks.__iadd__(names) and [])
    console = Console(file=io.StringIO(), width=200)
    overrides = [
        "model=hub",
        "model.name=some/model",
        "dataset=hub",
        "dataset.name=some/data",
        "evaluation=leaderboard",
    ]
    fetch_command("quickstart", overrides, [], console, suite=None, tasks=None)
    assert (models, data) == (["some/model"], ["some/data"])
    assert "leaderboard_ifeval" in tasks
    assert "everything is here" in console.file.getvalue()  # type: ignore[attr-defined]
    models.clear()
    fetch_command("quickstart", [], [], console, suite=None, tasks=None)  # a model and data of the book's own
    assert (models, data) == ([], ["some/data"])


@pytest.mark.parametrize(
    ("asked", "problem_id"),
    [
        ({"suite": None, "tasks": None}, "nothing-to-fetch"),
        ({"suite": "leaderboard", "tasks": ["gsm8k"]}, "suite-and-tasks"),
        ({"suite": "leaderbord", "tasks": None}, "unknown-suite"),
    ],
)
def test_what_cannot_be_fetched_is_said(asked: dict[str, Any], problem_id: str) -> None:
    with pytest.raises(RequestError) as raised:
        fetch_command(None, [], [], Console(), **asked)
    assert raised.value.problem_id == problem_id


def test_a_disk_that_is_full_ends_it(
    hub: Hub, task: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "download_and_prepare", fill)
    with pytest.raises(DoesNotFitError, match=r"for the data set zoo/open \(cats\): .*HF_HOME=FOLDER"):
        fetch_tasks([task("zoo/open", "cats"), task("zoo/open", "dogs")], lambda _: None)
    assert len(hub.asked) == 1


def test_a_token_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    overrides = ["model=hub", "model.name=some/model", "dataset=hub", "dataset.name=some/data"]
    with pytest.raises(RequestError) as raised:
        fetch_command("quickstart", overrides, [], Console(file=io.StringIO()), suite=None, tasks=None)
    for what in ("model 'some/model'", "data set some/data"):
        assert f"the hub cannot be asked for the {what}: {tmp_path}, where the hub's token" in raised.value.message
    assert raised.value.message.count(f"type: rm -r {tmp_path}, then hf auth login") == 2
