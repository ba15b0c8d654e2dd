"""Every problem_id can be explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tunebook
from tunebook.errors import RequestError
from tunebook.explain import all_ids, as_markdown, explain, sections

SOURCE = Path(tunebook.__file__).parent


def raised_ids() -> set[str]:
    """Every id in the source: of an error, of a problem, of a rule."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r'\b(?:problem_id|id)="([a-z0-9-]+)"|@rule\(\s*"([a-z0-9-]+)"', text))
    return {id for pair in found for id in pair if id}


def test_every_raised_id_has_a_text_and_no_text_is_left_over():
    assert raised_ids() == set(all_ids())


def test_the_page_of_all_texts_is_up_to_date(project_root):
    """`python -m tunebook.explain > docs/errors.md` writes it."""
    assert (project_root / "docs" / "errors.md").read_text(encoding="utf-8") == as_markdown()
    assert sum(map(len, sections().values())) == len(all_ids()), "an id without a section, or in two"


@pytest.mark.parametrize("id", all_ids())
def test_a_text_has_all_its_parts(id):
    heading, summary, why, advice = explain(id).split("\n\n")
    assert heading == id
    assert summary.endswith(".")
    assert re.fullmatch(r"Why: .{20,}\.", why)
    assert re.fullmatch(r"What to do: .{10,}", advice)


def test_bf16_on_volta_in_words():
    text = explain("bf16-on-volta")
    assert text.startswith("bf16-on-volta\n\nbf16 on a GPU without bf16")
    assert "Compute in fp32" in text


@pytest.mark.parametrize(("typed", "meant"), [("bf16-on-volat", "bf16-on-volta"), ("unknown-recpie", "unknown-recipe")])
def test_an_unknown_id_suggests_the_nearest(typed, meant):
    with pytest.raises(RequestError, match=f"nothing called '{typed}'.*Did you mean '{meant}'") as caught:
        explain(typed)
    assert caught.value.problem_id == "unknown-id"


def test_an_id_like_nothing_else():
    with pytest.raises(RequestError, match="tunebook explain all"):
        explain("xyzzy")
