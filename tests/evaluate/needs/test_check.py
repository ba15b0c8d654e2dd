from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tunebook.errors import RequestError
from tunebook.evaluate.needs import check, nltk_data
from tunebook.evaluate.needs.check import Hub, Lack, find_lacks, harness_environment, require_needs, told

QUICKSTART = "book:recipes/quickstart/tasks/quickstart.yaml"
TASK = """
task: {name}
dataset_path: {data}
dataset_name: {subset}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["cat", "dog"]
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that gives zoo/open to everybody, zoo/gated to nobody, and has no other; the list is what it was asked."""
    asked: list[str] = []
    answers = {"zoo/open": (200, None), "zoo/gated": (403, "GatedRepo")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            repository = self.path.removeprefix("/api/datasets/").removesuffix("/auth-check")
            if self.path.startswith("/api/datasets/"):  # the client asks for other things too
                asked.append(repository)
            status, code = answers.get(repository, (404, "RepoNotFound"))
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds between looks for the end
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections to the hub are refused: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        yield


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., str]:
    """`task("zoo/open", "cats")`: a task file of that data set."""

    def make(data: str, subset: str = "null", more: str = "") -> str:
        name = data.replace("/", "-")
        file = tmp_path / f"{name}-{subset}.yaml"
        file.write_text(TASK.format(name=name, data=data, subset=subset) + more)
        return str(file)

    return make


@pytest.mark.usefixtures("datasets_cache")
def test_with_a_network_data_is_no_lack_but_a_gated_or_unknown_set_is(hub: list[str], task: Callable[..., str]) -> None:
    tasks = [task("zoo/open"), task("zoo/gated"), task("zoo/gone")]
    gated, gone = find_lacks(tasks)
    assert (gated.task, gone.task) == (tasks[1], tasks[2])
    assert "zoo/gated is not on this machine, and it is gated: ask for access" in gated.lacks
    assert "zoo/gone is not on this machine, and the hub has no such data set" in gone.lacks
    assert sorted(hub) == ["zoo/gated", "zoo/gone", "zoo/open"]


@pytest.mark.usefixtures("no_network")
def test_without_a_network_what_is_cached_runs_and_all_else_is_named_at_once(
    cache_data_set: Callable[[str, str], Path], task: Callable[..., str]
) -> None:
    cache_data_set("zoo/open", "cats")
    here, dogs, gone = task("zoo/open", "cats"), task("zoo/open", "dogs"), task("zoo/gone")
    assert find_lacks([here]) == []
    lacks = find_lacks([here, dogs, gone, QUICKSTART])
    assert [lack.task for lack in lacks] == [dogs, gone]
    assert all("the hub is out of reach" in lack.lacks for lack in lacks)
    with pytest.raises(RequestError, match="2 tasks cannot be evaluated") as raised:
        require_needs([here, dogs, gone])
    assert raised.value.problem_id == "task-data-missing"
    assert raised.value.message.endswith(f"with a network, type: tunebook fetch tasks={dogs},{gone}")
    require_needs([here, QUICKSTART])


@pytest.mark.usefixtures("datasets_cache")
def test_the_hub_is_not_asked_where_it_must_not_be(
    hub: list[str], task: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (lack,) = find_lacks([task("zoo/open")])
    assert "the hub is out of reach" in lack.lacks
    assert hub == []


def test_a_token_that_cannot_be_read_is_not_taken_for_a_lost_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    hub = Hub()
    refusal = hub.refusal("zoo/a")
    assert refusal is not None and refusal.startswith(f"{tmp_path}, where the hub's token is looked for, is a folder; ")
    assert hub.is_reached


@pytest.mark.usefixtures("no_network")
def test_the_hub_is_asked_once_where_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    asked: list[str] = []
    original = HfApi.auth_check

    def counted(self: HfApi, repository: str, **options: object) -> None:
        asked.append(repository)
        original(self, repository, repo_type="dataset")

    monkeypatch.setattr(HfApi, "auth_check", counted)
    hub = Hub()
    assert [hub.refusal(name) for name in ("zoo/a", "zoo/b", "zoo/c")] == ["the hub is out of reach"] * 3
    assert asked == ["zoo/a"]
    assert not hub.is_reached


def test_data_files_that_are_not_there_are_named(task: Callable[..., str], tmp_path: Path) -> None:
    more = f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'gone.jsonl'}}}}}\n"
    (lack,) = find_lacks([task("json", more=more)])
    assert f"the data file {tmp_path / 'gone.jsonl'} is not there" in lack.lacks
    assert lack.fix == "correct dataset_kwargs.data_files in its file"
    (tmp_path / "gone.jsonl").write_text("{}")
    assert find_lacks([task("json", more=more)]) == []


def test_packages_that_are_not_installed_are_named(task: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import not_here_a\nimport not_here_b\n")
    more = f"dataset_kwargs: {{data_files: {tmp_path / 'utils.py'}}}\nprocess_results: !function utils.score\n"
    (lack,) = find_lacks([task("json", more=more)])
    assert lack.lacks == "the Python packages not_here_a, not_here_b are not installed here"
    assert lack.fix is not None
    assert lack.fix.startswith("type: pip install not_here_a not_here_b")


@pytest.mark.parametrize("is_had", [True, False])
def test_nltk_data_is_fetched_at_the_start_or_named(
    task: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_had: bool
) -> None:
    fetched: list[str] = []

    def download(data: nltk_data.NltkData) -> None:
        if not is_had:
            raise RequestError("it cannot be") from OSError("Name or service not known")
        fetched.append(data.package)

    monkeypatch.setattr(nltk_data, "is_here", lambda _: bool(fetched))
    monkeypatch.setattr(nltk_data, "download", download)
    (tmp_path / "utils.py").write_text("from lm_eval.tasks.ifeval import instructions_util\n")
    monkeypatch.setattr(check, "missing_packages", lambda _: [])  # what else that code needs is another test's
    more = f"dataset_kwargs: {{data_files: {tmp_path / 'utils.py'}}}\nprocess_results: !function utils.score\n"
    lacks = find_lacks([task("json", more=more)])
    assert fetched == (["punkt_tab"] if is_had else [])
    expected = "nltk data punkt_tab is not on this machine, and it cannot be fetched (Name or service not known)"
    assert [lack.lacks for lack in lacks] == ([] if is_had else [expected])


def test_the_library_does_not_ask_the_hub_about_data_that_is_all_here(
    cache_data_set: Callable[[str, str], Path], task: Callable[..., str]
) -> None:
    cache_data_set("zoo/open", "cats")
    cats, dogs = task("zoo/open", "cats"), task("zoo/open", "dogs")
    assert harness_environment([cats, QUICKSTART])["HF_DATASETS_OFFLINE"] == "1"
    assert harness_environment([cats, dogs]) == {}
    assert harness_environment([QUICKSTART]) == {}


def test_a_task_is_told_in_one_line_and_each_thing_to_do_once() -> None:
    lacks = [
        Lack(task="a", lacks="x is not here"),
        Lack(task="a", lacks="y is not here", fix="make y"),
        Lack(task="b", lacks="y is not here", fix="make y"),
        Lack(task="b", lacks="z is not here"),
    ]
    assert told(lacks) == [
        "a: x is not here; y is not here",
        "b: y is not here; z is not here",
        "with a network, type: tunebook fetch tasks=a,b",
        "make y",
    ]
