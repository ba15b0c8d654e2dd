from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nltk
import pytest
from huggingface_hub import constants
from nltk.downloader import Downloader

from tunebook.errors import RequestError
from tunebook.evaluate import preflight, task_requirements
from tunebook.evaluate.preflight import (
    Hub,
    Missing,
    describe_missing,
    download_nltk_package,
    find_missing,
    harness_environment,
    is_nltk_package_local,
    nltk_folder,
    require_task_data,
    search_path,
)
from tunebook.evaluate.task_requirements import DataSet

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
    gated, gone = find_missing(tasks)
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
    assert find_missing([here]) == []
    missing = find_missing([here, dogs, gone, QUICKSTART])
    assert [entry.task for entry in missing] == [dogs, gone]
    assert all("the hub is out of reach" in entry.lacks for entry in missing)
    with pytest.raises(RequestError, match="2 tasks cannot be evaluated") as raised:
        require_task_data([here, dogs, gone])
    assert raised.value.problem_id == "task-data-missing"
    assert raised.value.message.endswith(f"with a network, type: tunebook fetch tasks={dogs},{gone}")
    require_task_data([here, QUICKSTART])


@pytest.mark.usefixtures("datasets_cache")
def test_the_hub_is_not_asked_where_it_must_not_be(
    hub: list[str], task: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (missing,) = find_missing([task("zoo/open")])
    assert "the hub is out of reach" in missing.lacks
    assert hub == []


def test_a_token_that_cannot_be_read_is_not_taken_for_a_lost_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    hub = Hub()
    refusal = hub.refusal(DataSet(path="zoo/a", subset=None, options_json="{}"))
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
    assert [hub.refusal(DataSet(path=name, subset=None, options_json="{}")) for name in ("zoo/a", "zoo/b")] == [
        "the hub is out of reach"
    ] * 2
    assert asked == ["zoo/a"]
    assert not hub.is_reached


def test_data_files_that_are_not_there_are_named(task: Callable[..., str], tmp_path: Path) -> None:
    more = f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'gone.jsonl'}}}}}\n"
    (missing,) = find_missing([task("json", more=more)])
    assert f"the data file {tmp_path / 'gone.jsonl'} is not there" in missing.lacks
    assert missing.fix == "correct dataset_kwargs.data_files in its file"
    (tmp_path / "gone.jsonl").write_text("{}")
    assert find_missing([task("json", more=more)]) == []


def test_packages_that_are_not_installed_are_named(task: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("import not_here_a\nimport not_here_b\n")
    more = f"dataset_kwargs: {{data_files: {tmp_path / 'utils.py'}}}\nprocess_results: !function utils.score\n"
    (missing,) = find_missing([task("json", more=more)])
    assert missing.lacks == "the Python packages not_here_a, not_here_b are not installed here"
    assert missing.fix is not None
    assert missing.fix.startswith("type: pip install not_here_a not_here_b")


@pytest.mark.parametrize("is_had", [True, False])
def test_nltk_data_is_fetched_at_the_start_or_named(
    task: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_had: bool
) -> None:
    fetched: list[str] = []

    def download(package: str) -> None:
        if not is_had:
            raise RequestError("it cannot be") from OSError("Name or service not known")
        fetched.append(package)

    monkeypatch.setattr(preflight, "is_nltk_package_local", lambda _: bool(fetched))
    monkeypatch.setattr(preflight, "download_nltk_package", download)
    (tmp_path / "utils.py").write_text("from lm_eval.tasks.ifeval import instructions_util\n")
    monkeypatch.setattr(
        task_requirements, "missing_packages", lambda _: []
    )  # what else that code needs is another test's
    more = f"dataset_kwargs: {{data_files: {tmp_path / 'utils.py'}}}\nprocess_results: !function utils.score\n"
    missing = find_missing([task("json", more=more)])
    assert fetched == (["punkt_tab"] if is_had else [])
    expected = "nltk data punkt_tab is not on this machine, and it cannot be fetched (Name or service not known)"
    assert [entry.lacks for entry in missing] == ([] if is_had else [expected])


def test_the_library_does_not_ask_the_hub_about_data_that_is_all_here(
    cache_data_set: Callable[[str, str], Path], task: Callable[..., str]
) -> None:
    cache_data_set("zoo/open", "cats")
    cats, dogs = task("zoo/open", "cats"), task("zoo/open", "dogs")
    assert harness_environment([cats, QUICKSTART])["HF_DATASETS_OFFLINE"] == "1"
    assert harness_environment([cats, dogs]) == {}
    assert harness_environment([QUICKSTART]) == {}


def test_a_task_is_told_in_one_line_and_each_thing_to_do_once() -> None:
    missing = [
        Missing(task="a", lacks="x is not here"),
        Missing(task="a", lacks="y is not here", fix="make y"),
        Missing(task="b", lacks="y is not here", fix="make y"),
        Missing(task="b", lacks="z is not here"),
    ]
    assert describe_missing(missing) == [
        "a: x is not here; y is not here",
        "b: y is not here; z is not here",
        "with a network, type: tunebook fetch tasks=a,b",
        "make y",
    ]


def test_problems_of_a_code_task_may_be_a_local_file() -> None:
    missing = [Missing(task=task, lacks="x is not here") for task in ("gsm8k", "humaneval", "mbpp")]
    assert describe_missing(missing)[-2:] == [
        "with a network, type: tunebook fetch tasks=gsm8k,humaneval,mbpp",
        "or with the problems in a local file, type: tasks=humaneval@FILE,mbpp@FILE",
    ]


PUNKT_TAB = "punkt_tab"
INDEX = """<nltk_data><packages><package id="{id}" name="{id}" subdir="tokenizers" url="{url}" unzip="1"
  size="{size}" unzipped_size="4" checksum="{md5}" sha256_checksum="{sha256}"/></packages><collections/></nltk_data>"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NLTK_DATA", raising=False)
    (tmp_path / "server").mkdir(mode=0o700)  # nltk reads file: addresses in its own folders only
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "server")])


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`serve("punkt_tab")`: nltk's server with that package only, in a folder."""

    def serve(package: str) -> None:
        archive = tmp_path / "server" / f"{package}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(f"{package}/english/words.txt", "word")
        content = archive.read_bytes()
        md5, sha256 = hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()
        index = INDEX.format(id=package, url=archive.as_uri(), size=len(content), md5=md5, sha256=sha256)
        (tmp_path / "server" / "index.xml").write_text(index)
        monkeypatch.setattr(Downloader, "DEFAULT_URL", (tmp_path / "server" / "index.xml").as_uri())

    return serve


def test_what_is_downloaded_is_found_afterwards_in_tunebooks_cache(
    serve: Callable[[str], None],
) -> None:
    serve("punkt_tab")
    assert not is_nltk_package_local(PUNKT_TAB)
    download_nltk_package(PUNKT_TAB)
    assert (nltk_folder() / "tokenizers" / PUNKT_TAB / "english" / "words.txt").read_text() == "word"
    assert is_nltk_package_local(PUNKT_TAB)
    assert "NLTK_DATA" not in os.environ
    nltk_folder().chmod(0o777)
    with pytest.warns(RuntimeWarning, match="will not read data"):  # anybody may have written it
        assert not is_nltk_package_local(PUNKT_TAB)
    download_nltk_package(PUNKT_TAB)
    assert is_nltk_package_local(PUNKT_TAB)


def test_nltks_own_folders_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / "tokenizers" / PUNKT_TAB).mkdir(parents=True)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "own"))
    assert is_nltk_package_local(PUNKT_TAB)
    assert search_path() == f"{tmp_path / 'own'}{os.pathsep}{nltk_folder()}"
    monkeypatch.setenv("NLTK_DATA", search_path())
    assert search_path() == os.environ["NLTK_DATA"]  # asked twice, as a worker's helpers do


def test_without_a_network_it_says_what_to_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Downloader, "DEFAULT_URL", (tmp_path / "server" / "no-index.xml").as_uri())
    with pytest.raises(
        RequestError, match=r"nltk data punkt_tab cannot be downloaded.*tokenizers/punkt_tab/"
    ) as raised:
        download_nltk_package(PUNKT_TAB)
    assert raised.value.problem_id == "task-data-missing"
    assert not is_nltk_package_local(PUNKT_TAB)


def test_an_index_without_it_is_no_success(serve: Callable[[str], None]) -> None:
    serve("other")
    with pytest.raises(RequestError, match="cannot be downloaded"):
        download_nltk_package(PUNKT_TAB)


def test_without_tasks_the_harness_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunebook.evaluate.task_requirements", None)
    assert harness_environment([]) == {}
