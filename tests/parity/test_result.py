"""The results: differences, verdicts, the exit code, JSON without infinities, and the page."""

import json

import pytest
from rich.console import Console

from tunebook.parity.cases import Case
from tunebook.parity.result import exit_code_of, parity_table, read_case, to_json, write_page

TOLERANCE = 1e-5


@pytest.fixture
def results(tmp_path):
    """`results({"ddp": [2.0, 1.0]}, failed={"zero2": 3}, refused=["single"])`, the first being the reference."""

    def make(losses, failed=(), refused=()):
        read = []
        for name in [*losses, *failed, *refused]:
            folder = tmp_path / name
            folder.mkdir()
            lines = [
                {"step": step, "loss": loss, "tokens_per_second_per_gpu": 100.0 * step, "memory_gib": [1.0, 2.5]}
                for step, loss in enumerate(losses.get(name, []), 1)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            case = Case(name=name, varied=(), overrides=("a=b",), refused="no" if name in refused else None)
            code = dict(failed).get(name, None if name in refused else 0)
            read.append(read_case(case, folder, code, read[0] if read else None))
        return read

    return make


def test_losses_that_agree(results):
    read = results({"single": [2.0, 1.0], "ddp": [2.0, 1.000001]})
    assert exit_code_of(read, TOLERANCE) == 0
    assert (read[1].tokens_per_second_per_gpu, read[1].memory_gib) == (150.0, 2.5)
    assert [case["verdict"] for case in to_json(read, TOLERANCE)["cases"]] == ["", "the same"]


def test_every_column_of_the_table_has_a_name(results):
    headings = [column.header for column in parity_table(results({"single": [2.0]}), TOLERANCE).columns]
    assert all(headings) and headings[6] == "verdict"


def test_losses_that_differ_end_with_5(results):
    read = results({"single": [2.0, 1.0], "zero2": [2.0, 1.1]})
    assert exit_code_of(read, TOLERANCE) == 5
    row = to_json(read, TOLERANCE)["cases"][1]
    assert (row["verdict"], row["largest_difference"], row["at_step"]) == ("DIFFERENT", pytest.approx(0.1), 2)


def test_a_run_that_is_shorter_differs_and_json_holds_no_infinity(results):
    read = results({"single": [2.0, 1.0], "ddp": [2.0]})
    assert exit_code_of(read, TOLERANCE) == 5
    assert json.dumps(to_json(read, TOLERANCE), allow_nan=False)
    assert to_json(read, TOLERANCE)["cases"][1]["largest_difference"] is None


def test_a_run_that_failed_gives_its_code_and_one_that_cannot_run_none(results):
    read = results({"single": [2.0]}, failed={"zero2": 3}, refused=["zero3"])
    assert exit_code_of(read, TOLERANCE) == 3
    assert [case["verdict"] for case in to_json(read, TOLERANCE)["cases"]] == ["", "failed (3)", "not possible"]
    assert exit_code_of([read[0], read[2]], TOLERANCE) == 0


def test_the_table_has_a_row_for_each(results):
    table = parity_table(results({"single": [2.0], "ddp": [2.1]}, refused=["zero3"]), TOLERANCE)
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    assert columns[0] == ["single", "ddp", "zero3"]
    assert columns[5] == ["reference", "5.0e-02 at 1", "-"]
    assert columns[6] == ["", "DIFFERENT", "not possible: no"]


def test_names_are_not_markup(results):
    read = results({"peft.target_modules=[q_proj]": [2.0], "dataset.path=[": [2.1]})
    console = Console(width=240)
    with console.capture() as capture:
        console.print(parity_table(read, TOLERANCE))
    shown = capture.get()
    assert "compared with peft.target_modules=[q_proj]; tolerance" in shown
    assert shown.count("peft.target_modules=[q_proj]") == 2 and "dataset.path=[ " in shown


def test_the_page_shows_curves_and_differences(results, tmp_path):
    read = results({"single": [2.0, 1.0], "ddp": [2.0, 1.001]}, failed={"zero2": 3}, refused=["<zero3>"])
    write_page(read, TOLERANCE, "quickstart", tmp_path / "parity.html")
    page = (tmp_path / "parity.html").read_text()
    assert "quickstart: the same loss?" in page
    assert page.count("<figure") == 2
    assert "1.0e-03 at 2" in page
    assert "DIFFERENT" in page and "failed (3)" in page
    assert "&lt;zero3&gt;" in page and "<zero3>" not in page


def test_equal_losses_can_be_asked_for(results, tmp_path):
    read = results({"single": [2.0, 1.0], "ddp": [2.0, 1.0], "zero2": [2.0, 1.0 + 2**-52]})
    assert exit_code_of(read[:2], 0.0) == 0
    assert exit_code_of(read, 0.0) == 5
    write_page(read, 0.0, "quickstart", tmp_path / "parity.html")
    page = (tmp_path / "parity.html").read_text()
    assert "losses must be equal." in page
    assert "The tolerance is 0: equal losses." in page


def test_run_without_a_step_has_failed(results, tmp_path):
    read = results({"single": [2.0, 1.0], "ddp": []})
    assert exit_code_of(read, TOLERANCE) == 1
    row = to_json(read, TOLERANCE)["cases"][1]
    assert (row["verdict"], row["exit_code"], row["at_step"]) == ("failed (no steps)", 0, None)
    columns = [[str(cell) for cell in column.cells] for column in parity_table(read, TOLERANCE).columns]
    assert columns[5:7] == [["reference", "-"], ["", "failed (no steps)"]]
    write_page(read, TOLERANCE, "quickstart", tmp_path / "parity.html")
    assert "inf at" not in (tmp_path / "parity.html").read_text()


def test_a_reference_without_a_step_has_failed_too(results):
    read = results({"single": []})
    assert exit_code_of(read, TOLERANCE) == 1
    assert to_json(read, TOLERANCE)["cases"][0]["verdict"] == "failed (no steps)"
