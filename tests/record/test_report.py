from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.record.conftest import evaluation
from tunebook.errors import RequestError
from tunebook.record.report import write_report
from tunebook.record.run_folder import create_run_folder

PARTS = ("evaluation/before.json", "evaluation/after.json")
EVIL = "<script>document.title = 'owned'</script><img src=https://example.invalid/x onerror=document.title='owned'>"

IMAGE = "data:image/jpeg;base64,/9j/4AAQ"


class Links(HTMLParser):
    """Collects what could make a browser fetch something, and checks that elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts = 0
        self.open: list[str] = []
        self.levels: list[int] = []  # of the headings
        self.out_of_reach: list[str] = []  # what scrolls, but not by the keyboard

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data", "style")
        ]
        self.scripts += tag == "script"
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if (tag == "pre" or "scroll" in (dict(attrs).get("class") or "").split()) and ("tabindex", "0") not in attrs:
            self.out_of_reach.append(self.get_starttag_text() or tag)
        if tag not in ("meta", "br", "img", "link", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "style")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def evil_evaluation() -> dict[str, object]:
    sample = {"task": EVIL, "group": None, "prompt": EVIL, "answer": EVIL, "expected": EVIL, "correct": False}
    sample |= {"images": [IMAGE]}
    task = {"metric": "exact_match", "value": 0.5, "stderr": None, "num_items": 2, "groups": {}}
    return {"tasks": {EVIL: task}, "samples": [sample]}


@pytest.mark.parametrize(
    "changes", [{"after": evil_evaluation()}, {"ranks": 8, "num_steps": 3000}, {"num_steps": 0, "without": PARTS}]
)
def test_the_page_is_well_formed_and_can_fetch_nothing(make_run, tmp_path: Path, changes: dict[str, object]) -> None:
    write_report(make_run(**changes), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 400_000
    parser = Links()
    parser.feed(page)
    images = [IMAGE] if "after" in changes else []
    assert (parser.links, parser.scripts, parser.open) == (images, 1, [])
    assert parser.out_of_reach == []
    assert parser.levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(parser.levels)), "a level of headings is left out"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in page
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page
    assert "<script>document" not in page
    assert "img-src data:;" in page


def test_answers_of_a_later_evaluation_are_shown_if_the_training_had_none(make_run, tmp_path: Path) -> None:
    folder = make_run(without=("evaluation/before.json", "evaluation/after.json"))
    for when, model in (("eval-1", "model"), ("eval-2", "checkpoints/checkpoint-2")):
        evaluated = evaluation(when, {"sort": 0.5}, [(f"an answer of {model}", True)]) | {"model": model}
        (folder / "evaluation" / f"{when}.json").write_text(json.dumps(evaluated))
    write_report(folder, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "an answer of model" in page and "an answer of checkpoints" not in page


def test_folder_without_run_and_unwritable_output_are_refused(make_run, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as raised:
        write_report(create_run_folder(tmp_path / "outputs", "empty"), tmp_path / "report.html")
    assert raised.value.problem_id == "unknown-run"
    with pytest.raises(RequestError, match=r"no plan\.json and no manifest\.json"):
        write_report(make_run("2026-11-21T07-18-04Z", without=("plan.json", "manifest.json")), tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError) as raised:
        write_report(make_run(), tmp_path / "file" / "report.html")
    assert raised.value.problem_id == "outputs-not-writable"
    write_report(make_run("2026-11-21T07-18-07Z"), tmp_path / "new" / "folder" / "report.html")
    assert (tmp_path / "new" / "folder" / "report.html").is_file()


@pytest.mark.browser
@pytest.mark.slow
def test_a_browser_shows_the_numbers_and_runs_nothing_that_a_sample_brings(make_run, open_page, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(make_run(after=evil_evaluation()), page)
    # A script of somebody else's, as if escaping had failed: the page's policy must stop it by itself.
    page.write_text(page.read_text().replace("</main>", f"{EVIL}<script>document.title = 'owned'</script></main>"))
    screenshot = tmp_path / "page.png"
    dom = open_page(page, f"--screenshot={screenshot}", "--window-size=1100,2000")
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    assert title[1] == "Three small tasks, learnt on a CPU: finished"
    text = re.sub(r"<[^>]+>", " ", dom)
    for number in ("50.0 %", "240 of 240", "1 min 42 s", "0.135", "12.1k"):
        assert number in text, number
    assert dom.count('<svg class="chart"') >= 6
    assert screenshot.stat().st_size > 50_000


@pytest.mark.browser
@pytest.mark.slow
def test_values_are_shown_under_the_pointer(make_run, open_page, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(make_run(), page)
    # A second script plays the pointer, so the policy, which allows one script only, is opened for this test.
    event = "new PointerEvent('pointermove', {clientX: 600, clientY: 200})"
    script = f"document.querySelector('svg[data-chart]').dispatchEvent({event})"
    policy_off = re.sub(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", page.read_text())
    page.write_text(policy_off.replace("</body>", f"<script>{script}</script></body>"))
    dom = open_page(page, "--window-size=1100,2000")
    readout = re.search(r'<div id="readout"[^>]*>(.*?)</div></div>', dom)
    assert readout is not None
    assert re.match(r"optimizer step \d+<div>training, each step: [\d.]+</div>", readout[1])
