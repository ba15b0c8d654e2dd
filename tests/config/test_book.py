"""Finding the book from any working directory."""

import pytest

from tunebook.config import book
from tunebook.errors import RequestError


@pytest.fixture(autouse=True)
def fresh_look_up():
    book.book_root.cache_clear()
    yield
    book.book_root.cache_clear()


def test_the_checkout_is_found_from_anywhere(project_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert book.book_root() == project_root


def test_the_variable_comes_first(tmp_path, monkeypatch):
    (tmp_path / "hydra_configs").mkdir()
    (tmp_path / "hydra_configs" / "config.yaml").write_text("")
    (tmp_path / "recipes").mkdir()
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
    assert book.book_root() == tmp_path


def test_a_wrong_variable_is_an_error_not_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
    with pytest.raises(RequestError, match=f"in {tmp_path}; set TUNEBOOK_HOME"):
        book.book_root()


def test_paths_inside_and_outside(project_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert book.resolve_path("book:recipes/x") == project_root / "recipes" / "x"
    assert book.resolve_path("x.jsonl") == tmp_path / "x.jsonl"
