"""`report.html`: one run as a single self-contained page.

Its content security policy forbids the browser to fetch anything and to run any script but the page's own, which shows
values under the pointer. Text of a sample answer therefore cannot do harm.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tunebook import __version__
from tunebook.config.override_text import as_typed
from tunebook.errors import RequestError
from tunebook.facts.methods import recorded_method
from tunebook.files import atomic_write_text
from tunebook.record.answer_faults import fault_rows
from tunebook.record.contamination import NAMES, is_warning, score_lines
from tunebook.record.locks import describe_differences
from tunebook.record.page.charts import loss_charts, other_charts
from tunebook.record.page.numbers import Unit, format_count, format_value
from tunebook.record.page.overview import (
    build_prediction,
    describe_duration,
    describe_machine,
    format_time,
    main_score,
    recipe_of,
    speed_unit,
    state_of,
    summarize,
    title_of,
    validation_of_model,
)
from tunebook.record.run_folder import MODEL_FOLDER
from tunebook.record.run_record import RunRecord, read_run
from tunebook.record.scores import (
    answers_of,
    later_evaluations,
    pair_samples,
    score_rows,
    unit_of,
)

_NUM_DIFFERENCES = 4  # packages that the head lists; the manifest below lists all
TEMPLATES = Path(__file__).parent / "page"


def write_report(folder: Path, output: Path) -> None:
    """Write the report of a run to `output`, whose folder is created.

    Raises: RequestError for a folder that is not a run folder, or an output that cannot be written; DataError for a
    damaged record.
    """
    page = render_run(read_run(folder))
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
    lock = manifest["environment"]["lock"]
    summary, losses = summarize(record), loss_charts(record)
    of_model = [evaluation for evaluation in record.evaluations if evaluation["model"] == MODEL_FOLDER]
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    # Markup, since these are our own files. The browser must get exactly the bytes of the digest.
    return (
        _environment()
        .get_template("run.html.jinja")
        .render(
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            version=__version__,
            written=format_time(datetime.now(UTC)),
            run={"record": record, "summary": summary, "state": state_of(record)},
            title=title_of(record),
            unit=speed_unit(record),
            recipe=recipe_of(record),
            documents=recorded_method(record.config).reads,
            machine=describe_machine(record),
            took=describe_duration(summary),
            main_score=main_score(record),
            validation_of_model=(validation_of_model(record) or {}).get("validation_loss"),
            peak_tflops=next(iter(record.values("peak_tflops")), None),
            different_packages=", ".join(describe_differences(lock["differences"] or {}, _NUM_DIFFERENCES)),
            scores=score_rows(
                before, after, *(answers_of(record.folder, evaluation) for evaluation in (before, after))
            ),
            later=later_evaluations(record),
            before=before,
            after=after,
            samples=pair_samples(before, after or (of_model or [{}])[-1]),
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
            charts=losses[1:] + other_charts(record),
            prediction=build_prediction(record, summary),
            plan=record.plan,
            dataset=manifest["dataset"],
            manifest=manifest,
            config=record.config,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "as_typed": as_typed, "count": format_count, "gib": partial(format_value, unit=Unit.gib),
        "number": format_value, "score": _score,
        "sentence": lambda text: text and text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else "."),
        "share": partial(format_value, unit=Unit.share), "time": format_time,
        "yaml": partial(yaml.safe_dump, sort_keys=False, allow_unicode=True),
    }  # fmt: skip
    return environment


def _score(score: dict[str, Any], same_unit: dict[str, Any] | None = None) -> str:
    return format_value(score["value"], unit_of(same_unit or score))
