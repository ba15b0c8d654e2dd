"""What the harness returns, as the record of a run keeps it: scores with errors and groups, and sample answers."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

NUM_SAMPLES = 5
# Where a task's data lies is no part of what it measures: its items are hashed by themselves.
_NOT_HASHED = ("metadata", "dataset_kwargs")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One item as it was answered."""

    task: str
    group: str | None  # by the item's `task` key; None: the task has no groups
    prompt: str
    answer: str
    expected: str
    value: float | None  # of the main metric; None: the metric has no value for one item
    correct: bool | None


def task_scores(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each task's main metric with its standard error, item count and per-group values, and the task's hashes."""
    scores = {}
    for name, metrics in results["results"].items():
        key = _main_metric(name, results)
        if key is None:  # a group that only holds its tasks together
            continue
        metric, _, filter_name = key.partition(",")
        stderr = metrics.get(f"{metric}_stderr,{filter_name}")
        scores[name] = {
            "metric": metric,
            "value": float(metrics[key]),
            "stderr": float(stderr) if isinstance(stderr, int | float) else None,
            "num_items": metrics["sample_len"],
            "groups": _group_scores(task_answers(name, results)),
            "higher_is_better": (results["higher_is_better"].get(name) or {}).get(metric),
            "filter": filter_name,
            "subtasks": results["group_subtasks"].get(name, []),
            "num_fewshot": results["n-shot"].get(name),
            "version": results["versions"].get(name),
            "config_sha256": _config_hash(results["configs"].get(name)),
            "items_sha256": _items_hash(results["samples"].get(name, [])),
        }
    return scores


def mean_score(tasks: dict[str, dict[str, Any]]) -> tuple[float, bool] | None:
    """The mean over the tasks that are not part of another, and whether higher is better.

    None when there is no task, or when some are better high and others low.
    """
    within = {child for task in tasks.values() for child in task["subtasks"]}
    top = [task for name, task in tasks.items() if name not in within]
    directions = {task["higher_is_better"] is not False for task in top}
    if len(directions) != 1:
        return None
    return sum(task["value"] for task in top) / len(top), directions.pop()


def task_answers(name: str, results: dict[str, Any]) -> list[Answer]:
    """Every answered item of one task under its main filter."""
    samples = results["samples"].get(name, [])
    if not samples:
        return []
    metric, _, filter_name = (_main_metric(name, results) or "").partition(",")
    return [_answer(name, sample, metric) for sample in samples if sample["filter"] == filter_name]


def choose_samples(answers: list[Answer], num_samples: int = NUM_SAMPLES) -> list[dict[str, Any]]:
    """A few answers, the same ones before and after training: round the groups in an order of the prompts' hashes.

    When none of those is wrong although some answer is, the last one gives way to a wrong one.
    """
    ordered = sorted(answers, key=_prompt_hash)
    by_group: defaultdict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in ordered:
        by_group[answer.task, answer.group or ""].append(answer)
    chosen: list[Answer] = []
    queues = [by_group[group] for group in sorted(by_group)]
    while len(chosen) < num_samples and any(queues):
        chosen += [queue.pop(0) for queue in queues if queue]
    chosen = chosen[:num_samples]
    wrong = [answer for answer in ordered if answer.correct is False]
    if wrong and all(answer.correct for answer in chosen):
        chosen[-1] = wrong[0]
    return [asdict(answer) for answer in chosen]


def _main_metric(name: str, results: dict[str, Any]) -> str | None:
    """`metric,filter` of the first metric that the task lists, under its first filter."""
    metrics = results["results"][name]
    keys = [key for key, value in metrics.items() if isinstance(value, int | float) and "," in key]
    keys = [key for key in keys if "_stderr," not in key]
    listed = (results["configs"].get(name) or {}).get("metric_list") or []
    named = [key for key in keys if listed and key.partition(",")[0] == listed[0]["metric"]]
    return next(iter(named or keys), None)


def _answer(task: str, sample: dict[str, Any], metric: str) -> Answer:
    value = sample.get(metric)
    number = float(value) if isinstance(value, int | float) else None
    group = sample["doc"].get("task")
    given, expected = _given_and_expected(sample)
    return Answer(
        task=task,
        group=group if isinstance(group, str) else None,
        prompt=str(sample["arguments"][0][0]),
        answer=given,
        expected=expected,
        value=number,
        correct=None if number is None else number >= 1.0,
    )


def _given_and_expected(sample: dict[str, Any]) -> tuple[str, str]:
    """The answer as text: what was generated, or of several choices the likeliest one."""
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
        group: {"value": sum(found) / len(found), "num_items": len(found)} for group, found in sorted(values.items())
    }


def _prompt_hash(answer: Answer) -> str:
    return hashlib.sha256(answer.prompt.encode()).hexdigest()


def _config_hash(config: dict[str, Any] | None) -> str | None:
    if config is None:
        return None
    kept = {key: value for key, value in config.items() if key not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _items_hash(samples: list[dict[str, Any]]) -> str | None:
    if not samples:
        return None
    return hashlib.sha256("".join(sample["doc_hash"] for sample in samples).encode()).hexdigest()
