"""docs/quickstart.ipynb stores nothing of one machine. tests/system/test_notebook.py executes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_nothing_of_one_machine_is_stored(notebook):
    assert notebook["metadata"]["language_info"] == {"name": "python"}  # without a version
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert re.findall(r"(?:^|[\s'\"=(])(/\w\S*)", "".join(cell["source"])) == []  # absolute paths


def test_links_lead_to_files(notebook):
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) >= 3
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []
