"""Convert the harness' results to a run's record: scores with errors and groups, and sample answers."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunebook.checkpoint.choose import same_command
from tunebook.config.frozen import load_config
from tunebook.data.images import reference_to, thumbnail
from tunebook.errors import RequestError, TunebookError
from tunebook.files import read_json, sha256_text
from tunebook.record.run_folder import RUN_FILE

BEFORE, AFTER = "before", "after"  # evaluations that belong to a training
NUM_SAMPLES = 5
MAX_GEN_TOKS = 256  # answer length if the task sets none; the harness' default


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered item."""

    task: str
    group: str | None  # the item's `task` key; None: the task has no groups
    prompt: str
    answer: str
    expected: str
    value: float | None  # of the main metric; None: the metric has no per-item value
    correct: bool | None
    item: int = 0  # its index in the task's data
    responses: list[Any] = field(default_factory=list)  # all generated texts, or else the log-likelihoods
    max_new_tokens: int | None = None  # of each generated text; None: nothing was generated
    images: list[str] = field(default_factory=list)  # of the prompt, as `SHA256 PATH`


def task_scores(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each task's main metric with standard error, item count and per-group values, groups before tasks."""
    scores = {}
    for name in dict.fromkeys([*results["group_subtasks"], *results["results"]]):
        metrics, key = results["results"][name], _main_metric(name, results)
        if key is None:
            if results["samples"].get(name):
                named = ", ".join(str(listed["metric"]) for listed in results["configs"][name].get("metric_list") or [])
                raise RequestError(
                    f"{name} has no score: lm-evaluation-harness does not compute {named} for its output_type; in "
                    "metric_list type exact_match for generate_until, and acc for multiple_choice",
                    problem_id="task-without-score",
                )
            continue  # a group without a score of its own
        metric, _, filter_name = key.partition(",")
        if _finite(metrics[key]) is None:
            raise TunebookError(
                f"the {metric} of {name} is {metrics[key]}: most likely the model's logits are not finite, as after a "
                "training that diverged, or in a number format with too small a range (fp16 for a model made in bf16)",
                problem_id="score-not-finite",
            )
        samples = results["samples"].get(name, [])
        scores[name] = {
            "metric": metric,
            "value": float(metrics[key]),
            "stderr": _finite(metrics.get(f"{metric}_stderr,{filter_name}")),
            "num_items": metrics["sample_len"],
            "groups": _group_scores(task_answers(name, results)),
            "higher_is_better": (results["higher_is_better"].get(name) or {}).get(metric),
            "filter": filter_name,
            "subtasks": results["group_subtasks"].get(name, []),
            "num_fewshot": results["n-shot"].get(name),
            "version": results["versions"].get(name),
            "items_sha256": sha256_text("".join(sample["doc_hash"] for sample in samples)) if samples else None,
        }
    return scores


def is_evaluated(run: Path, when: str) -> bool:
    """Return whether an evaluation of a run is finished and none of its tasks failed."""
    file = run / "evaluation" / f"{when}.json"
    return file.is_file() and not read_json(file).get("failed")


def resume_command(run: Path, when: str) -> str:
    """Return the command that resumes an evaluation, which may be part of a training."""
    if when not in (BEFORE, AFTER):
        return "the same command"
    # Before the first step, a new start finds no progress that leads to the folder, so the command must name it.
    option = f"--run-folder {shlex.quote(str(run))}" if when == BEFORE else ""
    return same_command(load_config(run / RUN_FILE), option)


def task_answers(name: str, results: dict[str, Any]) -> list[Answer]:
    """Return every answered item of one task under its main filter."""
    samples = results["samples"].get(name, [])
    if not samples:
        return []
    metric, _, filter_name = (_main_metric(name, results) or "").partition(",")
    return [_answer(name, sample, metric) for sample in samples if sample["filter"] == filter_name]


def choose_samples(answers: list[Answer]) -> list[dict[str, Any]]:
    """Choose a few answers by the hashes of prompt and images, so that they are the same before and after training.

    Their images are small, as data URLs: a report is made without the files.
    """

    def order(answer: Answer) -> str:
        return sha256_text("".join([answer.prompt, *(image.partition(" ")[0] for image in answer.images)]))

    chosen = sorted(answers, key=order)[:NUM_SAMPLES]
    return [asdict(answer) | {"images": [thumbnail(image) for image in answer.images]} for answer in chosen]


def _main_metric(name: str, results: dict[str, Any]) -> str | None:
    """Return `metric,filter` of the first metric that the task lists, under its first filter."""
    metrics = results["results"][name]
    keys = [key for key, value in metrics.items() if isinstance(value, int | float) and "," in key]
    keys = [key for key in keys if "_stderr," not in key]
    listed = (results["configs"].get(name) or {}).get("metric_list") or []
    main = [key for key in keys if listed and key.partition(",")[0] == listed[0]["metric"]]
    return next(iter(main or keys), None)


def _answer(task: str, sample: dict[str, Any], metric: str) -> Answer:
    number = _finite(sample.get(metric))
    group = sample["doc"].get("task")
    responses = [response for repeat in sample.get("resps", []) for response in repeat]
    # Log-likelihoods without their greedy flag.
    responses = [item[0] if isinstance(item, tuple | list) else item for item in responses]
    answer, expected = _given_and_expected(sample)
    prompt, *rest = sample["arguments"][0]  # and a continuation or settings of a generation, and images
    settings = rest[0] if rest and isinstance(rest[0], dict) else None
    images = rest[1]["visual"] if len(rest) > 1 else []
    return Answer(
        task=task,
        group=group if isinstance(group, str) else None,
        prompt=str(prompt),
        answer=answer,
        expected=expected,
        value=number,
        correct=None if number is None else number >= 1.0,
        item=int(sample.get("doc_id", 0)),
        responses=[item if isinstance(item, str) else _finite(item) for item in responses],
        max_new_tokens=None if settings is None else settings.get("max_gen_toks", MAX_GEN_TOKS),
        images=[reference_to(image) for image in images],
    )


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _given_and_expected(sample: dict[str, Any]) -> tuple[str, str]:
    """Return the given and the expected answer as text: the generated text, or the most likely of several choices."""
    responses, target = sample["filtered_resps"], sample["target"]
    if isinstance(responses[0], str):
        return responses[0], str(target)
    choices = [str(arguments[1]) for arguments in sample["arguments"] if len(arguments) > 1]
    if not choices:
        return str(responses[0]), str(target)
    likelihoods = [response[0] for response in responses[: len(choices)]]
    expected = choices[target] if isinstance(target, int) and target < len(choices) else str(target)
    return choices[likelihoods.index(max(likelihoods))].strip(), expected.strip()


def _group_scores(answers: list[Answer]) -> dict[str, dict[str, Any]]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        if answer.group is not None and answer.value is not None:
            values[answer.group].append(answer.value)
    return {
        group: {"value": statistics.fmean(scores), "num_items": len(scores)} for group, scores in sorted(values.items())
    }


def mean_with_error(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and its standard error; one value has none."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": statistics.fmean(values), "stderr": error}
