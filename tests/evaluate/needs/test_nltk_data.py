from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import nltk
import pytest
from nltk.downloader import Downloader

from tunebook.errors import RequestError
from tunebook.evaluate.harness_tasks import task_folder
from tunebook.evaluate.needs import nltk_data
from tunebook.evaluate.needs.leaf_tasks import LeafTask, leaf_tasks
from tunebook.evaluate.needs.nltk_data import NLTK_DATA, download, is_here, nltk_data_of, nltk_folder, search_path

PUNKT_TAB = NLTK_DATA[0]
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
    assert not is_here(PUNKT_TAB)
    download(PUNKT_TAB)
    assert (nltk_folder() / PUNKT_TAB.place / "english" / "words.txt").read_text() == "word"
    assert is_here(PUNKT_TAB)
    assert "NLTK_DATA" not in os.environ
    nltk_folder().chmod(0o777)
    with pytest.warns(RuntimeWarning, match="will not read data"):  # anybody may have written it
        assert not is_here(PUNKT_TAB)
    download(PUNKT_TAB)
    assert is_here(PUNKT_TAB)


def test_nltks_own_folders_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own" / PUNKT_TAB.place).mkdir(parents=True)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "own"))
    assert is_here(PUNKT_TAB)
    assert search_path() == f"{tmp_path / 'own'}{os.pathsep}{nltk_folder()}"
    monkeypatch.setenv("NLTK_DATA", search_path())
    assert search_path() == os.environ["NLTK_DATA"]  # asked twice, as a worker's helpers do


def test_without_a_network_it_says_what_to_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Downloader, "DEFAULT_URL", (tmp_path / "server" / "no-index.xml").as_uri())
    with pytest.raises(
        RequestError, match=r"nltk data punkt_tab cannot be downloaded.*tokenizers/punkt_tab/"
    ) as raised:
        download(PUNKT_TAB)
    assert raised.value.problem_id == "task-data-missing"
    assert not is_here(PUNKT_TAB)


def test_an_index_without_it_is_no_success(serve: Callable[[str], None]) -> None:
    serve("other")
    with pytest.raises(RequestError, match="cannot be downloaded"):
        download(PUNKT_TAB)


def test_of_the_leaderboard_only_ifeval_needs_it() -> None:
    names = ("bbh", "gpqa", "ifeval", "mmlu_pro", "musr")
    needed = {name: [data.package for leaf in leaf_tasks(f"leaderboard_{name}") for data in nltk_data_of(leaf)]
              for name in names}  # fmt: skip
    assert needed == {"bbh": [], "gpqa": [], "ifeval": ["punkt_tab"], "mmlu_pro": [], "musr": []}


def test_every_file_of_the_harness_that_downloads_nltk_data_is_listed() -> None:
    asking = {
        str(file.relative_to(task_folder()))
        for file in task_folder().rglob("*.py")
        if "nltk.download(" in file.read_text(encoding="utf-8", errors="replace")
    }
    assert asking == {name for data in NLTK_DATA for name in data.asked_by}


def test_a_task_without_such_code_needs_none(tmp_path: Path) -> None:
    assert nltk_data_of(LeafTask(name="t", config={}, folder=tmp_path)) == []
    assert nltk_data.NLTK_DATA == NLTK_DATA
