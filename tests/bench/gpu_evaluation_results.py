"""What a command of `gpu_evaluation` came to, read from what it wrote, and how far one is from another."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

_TOLD = ("batch size auto", "is loaded", "ran out", "does not fit", "not fit into", "failed")
_KEPT_OF_TRAINING = ("manifest.json", "plan.json", "log.txt")


def measured(kept: Path, place: Path, *, is_chat: bool) -> dict[str, Any]:
    """Scores, seconds, batch sizes, memory and messages; copies the answers to `kept`, where they are compared."""
    found: dict[str, Any] = {"said": _said(kept / "terminal.txt")}
    out = (kept / "stdout.txt").read_text()
    if is_chat:
        found["answer"] = out
    found |= (
        {"printed": printed} if (printed := [json.loads(line) for line in out.splitlines() if line[:1] == "{"]) else {}
    )
    for name in _KEPT_OF_TRAINING:
        if (place / name).is_file():
            shutil.copy(place / name, kept / name)
    if (place / "metrics.jsonl").is_file():
        losses = [json.loads(line).get("loss") for line in (place / "metrics.jsonl").read_text().splitlines()]
        found["last_loss"] = next((loss for loss in reversed(losses) if loss is not None), None)
    calls = kept / "calls.jsonl"
    if calls.is_file():
        found["calls"] = [json.loads(line) for line in calls.read_text().splitlines()]
    for record in place.glob("**/evaluation/eval-*.json"):
        content = json.loads(record.read_text())
        found |= {key: content[key] for key in ("device", "spread", "batch_sizes", "seconds", "model", "failed")}
        found["scores"] = {
            name: {key: score[key] for key in ("metric", "value", "stderr", "num_items")}
            for name, score in content["tasks"].items()
        }
        found["task_seconds"] = _task_seconds(record.parent / "parts")
        shutil.copy(record, kept / "record.json")
        shutil.copy(record.with_name(f"{record.stem}-answers.jsonl"), kept / "answers.jsonl")
    return found


def differences(name: str, reference: str, logs: Path, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How far one is from its reference: scores, answers that differ, the largest difference of log-likelihoods."""
    line: dict[str, Any] = {"name": name, "compared_with": reference}
    own, other = lines.get(name, {}), lines.get(reference, {})
    if "answer" in own and "answer" in other:
        return line | {"is_same_answer": own["answer"] == other["answer"], "answers": [own["answer"], other["answer"]]}
    if "scores" not in own or "scores" not in other:
        return line | {"compared": False}
    line["scores"] = {
        task: [other["scores"][task]["value"], score["value"]]
        for task, score in own["scores"].items()
        if task in other["scores"]
    }
    line["is_same_score"] = all(one == two for one, two in line["scores"].values())
    line["seconds"] = [other["seconds"], own["seconds"]]
    line["task_seconds"] = {
        task: [other["task_seconds"].get(task), seconds] for task, seconds in own["task_seconds"].items()
    }
    return line | _answers_apart(_answers(logs / reference), _answers(logs / name))


Answers = dict[tuple[str, int], dict[str, Any]]


def _answers(folder: Path) -> Answers:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {(line["task"], line["item"]): line for line in lines}


def _answers_apart(one: Answers, two: Answers) -> dict[str, Any]:
    """Counts by task; texts that were generated are compared letter by letter."""
    apart: dict[str, dict[str, Any]] = {}
    for key in sorted(one.keys() | two.keys()):
        task = apart.setdefault(key[0], {"items": 0, "missing": 0, "answers_differ": 0, "largest_difference": 0.0})
        task["items"] += 1
        if key not in one or key not in two:
            task["missing"] += 1
            continue
        task["answers_differ"] += one[key]["answer"] != two[key]["answer"]
        texts = [(a, b) for a, b in _pairs(one[key], two[key]) if isinstance(a, str)]
        numbers = [abs(a - b) for a, b in _pairs(one[key], two[key]) if not isinstance(a, str)]
        if texts:
            task["texts_differ"] = task.get("texts_differ", 0) + any(a != b for a, b in texts)
        if numbers:
            task["largest_difference"] = max(task["largest_difference"], *numbers)
    return {"answers": apart}


def _pairs(one: dict[str, Any], two: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The responses of both; a likelihood that is not finite counts as infinitely far."""
    pairs = zip(one["responses"], two["responses"], strict=True)
    return [(a, b) if isinstance(a, str) else (_number(a), _number(b)) for a, b in pairs]


def _number(value: Any) -> float:
    return math.inf if value is None else float(value)


def _said(terminal: Path) -> list[str]:
    lines = terminal.read_text(errors="replace").splitlines() if terminal.is_file() else []
    told = [line for line in lines if any(word in line for word in _TOLD)]
    return told[:20] if told else lines[-3:]


def _task_seconds(parts: Path) -> dict[str, float]:
    contents = [json.loads(file.read_text()) for file in parts.glob("*.json")]
    return {content["task"]: content["seconds"] for content in contents}
