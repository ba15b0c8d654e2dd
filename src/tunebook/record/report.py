"""`report.html`: one run, or a comparison of several, as a single self-contained page.

Its content security policy forbids the browser to fetch anything and to run any script but the page's own, which shows
values under the pointer. Text of a sample answer therefore cannot do harm.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tunebook import __version__
from tunebook.config.override_text import as_typed
from tunebook.errors import RequestError
from tunebook.files import atomic_write_text
from tunebook.record.answer_faults import fault_rows
from tunebook.record.contamination import NAMES, is_warning, score_lines
from tunebook.record.locks import describe_differences
from tunebook.record.page.charts import dash_of_run, loss_charts, other_charts, overlaid_charts
from tunebook.record.page.numbers import NO_VALUE, Unit, format_count, format_duration, format_value
from tunebook.record.page.overview import (
    Summary,
    build_prediction,
    describe_duration,
    describe_machine,
    flatten,
    format_time,
    main_score,
    memory_bars,
    recipe_of,
    speed_unit,
    start_bars,
    state_of,
    summarize,
    title_of,
    validation_of_model,
)
from tunebook.record.run_record import RunRecord, read_run
from tunebook.record.scores import (
    answers_of,
    baseline_of,
    compare_scores,
    later_evaluations,
    pair_samples,
    score_rows,
    unit_of,
)

_NUM_DIFFERENCES = 4  # packages that the head lists; the manifest below lists all
TEMPLATES = Path(__file__).parent / "page"


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the report of one run, or the comparison of several, to `output`, whose folder is created.

    Raises: RequestError for a folder that is not a run folder, or an output that cannot be written; DataError for a
    damaged record.
    """
    records = [read_run(folder) for folder in folders]
    page = render_run(records[0]) if len(records) == 1 else render_comparison(records)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(output, page)
    except OSError as error:
        raise RequestError(
            f"the report cannot be written to {output.absolute()}: {error.strerror}; name another file: --output FILE",
            problem_id="outputs-not-writable",
        ) from error


def render_run(record: RunRecord) -> str:
    """The page of one run."""
    before, after, manifest = record.before, record.after, record.manifest
    lock = (manifest.get("environment") or {}).get("lock") or {}
    summary, losses = summarize(record), loss_charts(record)
    charts, missing = other_charts(record)
    bars, memory_note = memory_bars(record, summary)
    return render_page(
        "run.html.jinja",
        run=_head(record, summary),
        title=title_of(record),
        unit=speed_unit([record]),
        recipe=recipe_of(record),
        machine=describe_machine(record),
        took=describe_duration(summary),
        main_score=main_score(record),
        validation_of_model=validation_of_model(record),
        peak_tflops=next(iter(record.values("peak_tflops")), None),
        different_packages=", ".join(describe_differences(lock.get("differences") or {}, _NUM_DIFFERENCES)),
        scores=score_rows(before, after, *(answers_of(record.folder, evaluation) for evaluation in (before, after))),
        later=later_evaluations(record),
        before=before,
        after=after,
        baseline=baseline_of(before, after),
        samples=pair_samples(before, after),
        contamination=record.contamination,
        contamination_scores=[
            f"{evaluation['when']}: {line}"
            for evaluation in (record.before, record.after, *record.evaluations)
            for line in score_lines(evaluation)
        ],
        is_contaminated=is_warning,
        kind_names=NAMES,
        faults=fault_rows(before, after),
        loss=losses[0] if losses else None,
        charts=losses[1:] + charts,
        missing_charts=missing,
        prediction=build_prediction(record, summary),
        memory_bars=bars,
        memory_note=memory_note,
        start_bars=start_bars(record.manifest),
        plan=record.plan,
        dataset=manifest.get("dataset") or {},
        manifest=manifest,
        config=record.config,
    )


def render_comparison(records: Sequence[RunRecord]) -> str:
    """The page of several runs."""
    names, summaries = short_names(records), [summarize(record) for record in records]
    return render_page(
        "comparison.html.jinja",
        runs=list(zip(names, map(_head, records, summaries), strict=True)),
        numbers=number_rows(records, summaries),
        differences=config_differences(records),
        not_compared=[name for name, record in zip(names, records, strict=True) if not record.config],
        scores=compare_scores(records),
        recipes=sorted({recipe_of(record) for record in records}),
        charts=overlaid_charts(records, names),
        dashes=[dash_of_run(index) for index in range(len(records))],
    )


def _head(record: RunRecord, summary: Summary) -> dict[str, Any]:
    return {"record": record, "summary": summary, "state": state_of(record)}


def short_names(records: Sequence[RunRecord]) -> list[str]:
    """Unique names: the time if all runs are of one recipe, else recipe/time, else the path."""
    is_one_recipe = len({record.folder.parent for record in records}) == 1
    names = [record.folder.name if is_one_recipe else record.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.folder) for record in records]


def number_rows(records: Sequence[RunRecord], summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """The runs' numbers as rows of a name and a value per run, without rows that no run recorded."""
    numbers = (
        ("Steps", "num_steps", Unit.whole), ("Tokens seen", "num_tokens", Unit.whole),
        ("Final training loss", "final_loss", Unit.plain), ("Best validation loss", "best_validation_loss", Unit.plain),
        (f"Tokens per second and {speed_unit(records)}", "tokens_per_second_per_gpu", Unit.plain),
        ("MFU", "mfu", Unit.share), ("Padding", "padding_share", Unit.share),
    )  # fmt: skip
    peaks = [max(summary.peak_memory_gib, default=None) for summary in summaries]
    rows = [
        ("Hardware", [describe_machine(record) for record in records]),
        *(
            (label, [format_value(getattr(summary, key), unit) for summary in summaries])
            for label, key, unit in numbers
        ),
        ("Peak memory", [format_value(peak, Unit.gib) for peak in peaks]),
        ("Duration", [NO_VALUE if summary.seconds is None else describe_duration(summary) for summary in summaries]),
    ]
    return [(label, row) for label, row in rows if any(text != NO_VALUE for text in row)]


def config_differences(records: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Keys of run.yaml that differ between the runs that have one, with each run's value."""
    flat = [dict(flatten(record.config)) if record.config else {} for record in records]
    rows = []
    for key in dict.fromkeys(key for config in flat for key in config):
        if len({config.get(key, "not set") for config in flat if config}) > 1:
            rows.append((key, [config.get(key, "not set") if config else NO_VALUE for config in flat]))
    return rows


def render_page(template: str, **view: Any) -> str:
    """Render a template of the report as one page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "as_typed": as_typed, "count": format_count, "duration": format_duration, "flatten": flatten,
        "gib": partial(format_value, unit=Unit.gib), "number": format_value, "score": _score,
        "sentence": lambda text: text and text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else "."),
        "share": partial(format_value, unit=Unit.share), "time": format_time,
    }  # fmt: skip
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Markup, since these are our own files. The browser must get exactly the bytes of the digest.
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(
        **view, style=Markup(style), script=Markup(script), script_digest=digest, version=__version__,
        written=format_time(datetime.now(UTC)),
    )  # fmt: skip


def _score(score: dict[str, Any], same_unit: dict[str, Any] | None = None) -> str:
    return format_value(score["value"], unit_of(same_unit or score))
