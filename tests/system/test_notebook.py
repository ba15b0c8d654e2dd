"""Every cell of docs/quickstart.ipynb is executed in order, in an empty folder."""

from __future__ import annotations

from xml.etree import ElementTree

from tests.docs.notebook_cells import code_cells, execute

EXPECTED = {
    "tunebook plan ": "fits: ",
    "tunebook train ": "finished",
    "tunebook chat ": "",
    "tunebook diff ": "training.seed",
}


def test_the_notebook_runs(run, project_root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTY_COMPATIBLE", "0")  # a cell sets it; it is restored after the test
    commands = []

    def run_command(command: str) -> int:
        ended = run(["bash", "-c", command], cwd=tmp_path)
        print(ended.output)
        (expected,) = [text for start, text in EXPECTED.items() if command.startswith(start)]
        assert expected in ended.output
        commands.append(" ".join(command.split()[:2]))
        return ended.exit_code

    displayed = execute(code_cells(project_root / "docs" / "quickstart.ipynb"), run_command)
    assert commands == ["tunebook plan", "tunebook train", "tunebook chat", "tunebook train", "tunebook diff"]
    assert [one.kind for one in displayed] == ["SVG", "HTML"]
    curve = ElementTree.fromstring(displayed[0].text)
    (line,) = curve.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 200  # one point per step
    assert "srcdoc=" in displayed[1].text and len(displayed[1].text) > 50_000
    printed = capsys.readouterr().out
    assert "step   1  loss 6.8" in printed
    assert "largest      0.0%" in printed
