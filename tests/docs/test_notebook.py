"""The structure of docs/quickstart.ipynb, and how its cells are executed. tests/system/test_notebook.py executes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.notebook_cells import as_python, code_cells

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"
# What version 4.5 of the notebook format requires of a cell, and allows but for attachments.
KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_the_notebook_has_the_structure_of_version_4_5(notebook):
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]["kernelspec"]) == {"display_name", "language", "name"}
    for cell in notebook["cells"]:
        assert set(cell) == KEYS[cell["cell_type"]]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert not cell["source"][-1].endswith("\n")
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


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


def test_every_code_cell_compiles():
    for cell_id, source in code_cells(NOTEBOOK).items():
        compile(as_python(source), cell_id, "exec")
