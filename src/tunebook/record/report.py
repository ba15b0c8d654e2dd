"""`report.html`: one run, or a comparison of several, as a single self-contained page.

Its content security policy forbids the browser to fetch anything and to run any script but the page's own, which shows
values under the pointer. Text of a sample answer therefore cannot do harm.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from tunebook import __version__
from tunebook.errors import RequestError
from tunebook.files import atomic_write_text
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.record.answer_faults import fault_rows
from tunebook.record.contamination import NAMES, is_warning, score_lines
from tunebook.record.differences import answers_of
from tunebook.record.page.comparison import config_differences, number_rows, short_names
from tunebook.record.page.curves import dash_of_run, loss_chart, other_charts, overlaid_charts
from tunebook.record.page.details import (
    batch_facts,
    choices,
    data_counts,
    data_sources,
    flatten,
    memory_bars,
    problems,
    start_bars,
)
from tunebook.record.page.overview import NO_RECIPE, build_overview, format_time, recipe_of, summarize
from tunebook.record.page.predicted import build_prediction, draw_stack
from tunebook.record.page.scores import (
    baseline_text,
    compare_scores,
    failed_tasks,
    later_evaluations,
    pair_samples,
    program_lines,
    score_rows,
)
from tunebook.record.run_record import RunRecord, broken_records_named, read_run

TEMPLATES = Path(__file__).parent / "page"


def write_report(folders: Sequence[Path], output: Path, *, makes_folder: bool = False) -> None:
    """Write the report of one run, or the comparison of several, to `output`; `makes_folder` creates its folder.

    Raises: RequestError for a folder that is not a run folder, or an output that cannot be written; DoesNotFitError if
    the disk is full.
    """
    if not folders:
        raise RequestError("no run was named; try: tunebook report latest", problem_id="unknown-run")
    records = [read_run(folder) for folder in folders]
    with broken_records_named(*folders):
        page = render_run(records[0]) if len(records) == 1 else render_comparison(records)
    try:
        if makes_folder:
            output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(output, page)
    except OSError as error:
        if is_disk_full(error):
            advice = "free some space, or name a file on another disk: --output FILE"
            raise no_space("the report", output.absolute().parent, advice) from error
        raise RequestError(
            f"the report cannot be written to {output.absolute()}: {error.strerror}; name a file in a folder that "
            "exists and can be written to",
            problem_id="outputs-not-writable",
        ) from error


def render_run(record: RunRecord) -> str:
    """The page of one run."""
    summary = summarize(record)
    charts, missing = other_charts(record)
    bars, memory_note = memory_bars(record, summary)
    prediction = build_prediction(record, summary)
    started, start_note = start_bars(record.manifest)
    return render_page(
        "run.html.jinja",
        overview=build_overview(record, summary),
        scores=score_rows(
            record.before,
            record.after,
            answers_of(record.folder, record.before),
            answers_of(record.folder, record.after),
        ),
        later=later_evaluations(record),
        failed_tasks=failed_tasks(record),
        has_before=record.before is not None,
        has_after=record.after is not None,
        baseline=baseline_text(record.before, record.after),
        programs=program_lines(record.before, record.after),
        samples=pair_samples(record.before, record.after),
        contamination=record.contamination,
        contamination_scores=[
            f"{found['when']}: {line}"
            for found in (record.before, record.after, *record.evaluations)
            if found is not None
            for line in score_lines(found)
        ],
        is_contaminated=is_warning,
        kind_names=NAMES,
        faults=fault_rows(record.before, record.after),
        loss=loss_chart(record),
        charts=charts,
        missing_charts=missing,
        prediction=prediction,
        stack=draw_stack(prediction.stack) if prediction and prediction.stack else None,
        memory_bars=bars,
        memory_note=memory_note,
        start_bars=started,
        start_note=start_note,
        batch=batch_facts(record),
        choices=choices(record.plan),
        problems=problems(record.plan),
        has_plan=record.plan is not None,
        data_sources=data_sources(record.manifest),
        data_counts=data_counts(record.manifest),
        manifest=flatten(record.manifest) if record.manifest else [],
        config=flatten(record.config) if record.config else [],
    )


def render_comparison(records: Sequence[RunRecord]) -> str:
    """The page of several runs."""
    names, summaries = short_names(records), [summarize(record) for record in records]
    return render_page(
        "comparison.html.jinja",
        runs=[
            (name, build_overview(record, summary))
            for name, record, summary in zip(names, records, summaries, strict=True)
        ],
        numbers=number_rows(records, summaries),
        differences=config_differences(records),
        not_compared=[name for name, record in zip(names, records, strict=True) if record.config is None],
        scores=compare_scores(records),
        recipes=sorted({recipe_of(record) or NO_RECIPE for record in records}),
        charts=overlaid_charts(records, names),
        dashes=[dash_of_run(index) for index in range(len(records))],
    )


def render_page(template: str, *, beside: Path | None = None, **view: Any) -> str:
    """Render a template of the report, or one in the folder `beside` that extends the report's, as one page."""
    folders = [TEMPLATES] if beside is None else [TEMPLATES, beside]
    environment = Environment(
        loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Markup, since these are our own files. The browser must get exactly the bytes of the digest.
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    try:
        return environment.get_template(template).render(
            **view, style=Markup(style), script=Markup(script), script_digest=digest, version=__version__,
            written=format_time(datetime.now(UTC)),
        )  # fmt: skip
    except UndefinedError as error:
        raise LookupError(error.message) from error  # as for a record's missing key in Python
