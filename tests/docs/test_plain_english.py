"""The words that `make lint` refuses in prose, where it looks for them, and what it prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("plain_english", ROOT / "docs" / "plain_english.py")
plain_english = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plain_english)

NEXT_TO = "next to, in addition to, compared with"
PAGE = """# Title

The file beside it. Done in order
to show `beside` and `a code span
beside` and [a link](beside.md) and https://example.org/beside and the id no-talk-beside-training.

```bash
make beside
```

    indented beside

- a list whose second line is
  Beside it

<!-- made from evidence/*.json when some is recorded -->
beside
<!-- end of evidence -->
"""
MODULE = '''"""A module beside others."""
TEXT = "beside"  # beside
BESIDE = 1  # set in order
# to see; beside `beside`


def beside(path: str) -> str:
    """One line.

        beside
    """
    return f"{path} beside"
'''


def test_a_page_is_searched_without_code_links_and_evidence() -> None:
    assert plain_english.found_words(plain_english.page_prose(PAGE)) == [
        (3, "beside", NEXT_TO),
        (3, "in order to", "to"),
        (14, "Beside", NEXT_TO),
    ]


def test_comments_and_docstrings_of_a_module_are_searched() -> None:
    found = [(line, word) for line, word, _ in plain_english.found_words(plain_english.python_prose(MODULE))]
    assert found == [(1, "beside"), (2, "beside"), (3, "in order to"), (4, "beside"), (10, "beside")]


def test_messages_of_a_module_are_searched_and_keys_are_not(tmp_path) -> None:
    source = MODULE + 'say("it went "\n    f"on {beside} `beside`")\nNAMES = {"beside": "in_order_to"}\n'
    (tmp_path / "module.py").write_text(source)
    found = [(line, word) for line, word, _ in plain_english.found_in(tmp_path / "module.py")]
    assert found[:5] == [(1, "beside"), (2, "beside"), (3, "in order to"), (4, "beside"), (10, "beside")]
    assert found[5:] == [(12, "beside"), (13, "went on")]


@pytest.mark.parametrize("name", ["front.sh", "settings.yaml", "Makefile"])
def test_scripts_and_settings_are_searched_as_a_whole(tmp_path, name) -> None:
    (tmp_path / name).write_text("key: 1  # beside\n\necho 'anew'\n")
    assert [word for _, word, _ in plain_english.found_in(tmp_path / name)] == ["beside", "anew"]


@pytest.mark.parametrize("text", ["besides", "utilization", "log-likeness", "what offsets", "simply_named"])
def test_a_part_of_another_word_is_not_found(text) -> None:
    assert plain_english.found_words(text) == []


@pytest.mark.parametrize("instead", [instead for instead in plain_english.INSTEAD.values() if instead])
def test_what_to_say_instead_is_not_refused_itself(instead) -> None:
    assert plain_english.found_words(instead) == []


def test_it_checks_what_people_read() -> None:
    files = {str(file.relative_to(ROOT)) for file in plain_english.checked_files()}
    assert {"README.md", "AGENTS.md", "docs/data.md", "docker/README.md", "recipes/quickstart/README.md"} <= files
    assert {"src/tunebook/cli.py", "src/tunebook/plan/rules/__init__.py"} <= files
    assert {"docker/front.sh", "docker/front/image.sh", ".ci/run", "hydra_configs/config.yaml"} <= files
    assert {"recipes/quickstart.yaml", "compose.yaml", "docker/cpu/compose.yaml", "mkdocs.yml"} <= files


def test_it_prints_as_linters_do_and_fails(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "README.md").write_text("One line.\nUtilise it, please.\n")
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    assert plain_english.main() == 1
    assert capsys.readouterr().out == "README.md:2: Utilise: say use\nREADME.md:2: please: leave it out\n"
    (tmp_path / "README.md").write_text("Use it.\n")
    assert plain_english.main() == 0
    assert capsys.readouterr().out == ""
