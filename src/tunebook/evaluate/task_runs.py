"""Run an evaluation's tasks one by one: reuse finished results, save each new one at once.

If a task fails, the others still run, and the failures are listed at the end.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tunebook.errors import TunebookError, counted, first_few
from tunebook.evaluate.harness import (
    SEEDS,
    HarnessSettings,
    LoadedTask,
    LoadedTasks,
    chat_template,
    has_template,
    require_system_prompt,
    run_task,
    seed_libraries,
)
from tunebook.evaluate.results import as_stored, settings_hash, task_answers, task_scores
from tunebook.evaluate.resume import ResultCache, TaskResult, cache_key, requests_hash
from tunebook.hardware.disk import is_disk_full

if TYPE_CHECKING:
    from tunebook.evaluate.request_model import RequestModel

# Parts of the harness' results of a code task, which is judged later.
_GENERATED = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "samples")
_NUM_NAMED = 3  # reused tasks named in a message; the others are counted


@dataclass(kw_only=True)
class TaskRuns:
    """The tasks of one evaluation and their results."""

    loaded: LoadedTasks
    settings: HarnessSettings
    ingredients: dict[str, Any]  # everything that determines all results, in addition to the task itself
    cache: ResultCache
    load_model: Callable[[], RequestModel]  # called only if something is left to compute
    say: Callable[[str], None]
    is_fresh: bool = False  # reuse nothing
    done: dict[str, TaskResult] = field(default_factory=dict)
    reused: dict[str, str] = field(default_factory=dict)  # finish time of each reused result
    failed: dict[str, Exception] = field(default_factory=dict)

    def run(self) -> None:
        """Run all tasks; collect failures in `failed`. Raises: errors of loading the model and disk-full errors."""
        self.failed |= self.loaded.missing
        for error in self.loaded.missing.values():
            self.say(f"left out: {error.message}")
        if not self.is_fresh:
            self._reuse()
        left = [task for name, task in self.loaded.tasks.items() if name not in self.done]
        if not left:
            return
        model = self.load_model()
        for number, task in enumerate(left, len(self.done) + 1):
            self.say(f"{task.name} (task {number} of {len(self.loaded.tasks)})")
            try:
                self._run_one(task, model)
            except Exception as error:
                if is_disk_full(error):  # later answers could not be saved either
                    raise
                self.failed[task.name] = error
                if not isinstance(error, TunebookError):
                    traceback.print_exc(file=sys.stderr)
                message = error.message if isinstance(error, TunebookError) else describe_error(error)
                self.say(f"{task.name}: failed, {message}")

    def scores(self) -> dict[str, dict[str, Any]]:
        """Return scores of finished tasks, and of groups whose tasks are all finished, each group before its tasks."""
        finished = {
            name: result.harness for name, result in self.done.items() if self.loaded.tasks[name].source.code is None
        }
        scores = task_scores(aggregate(finished, self.loaded.groups))
        ordered: dict[str, dict[str, Any]] = {}
        for name, loaded in self.loaded.tasks.items():
            above = [group for group, found in self.loaded.groups.items() if loaded.task in found.get_all_tasks()]
            above.sort(key=lambda group: -len(self.loaded.groups[group].get_all_tasks()))
            ordered |= {group: scores[group] for group in above if group in scores and group not in ordered}
            score = self.done[name].score if name in self.done else None
            if score is not None:
                ordered[name] = score
        return ordered

    def generated(self) -> dict[str, Any]:
        """Return the harness' results of the code tasks, which are not judged yet."""
        results: dict[str, Any] = {"group_subtasks": {}, "groups": {}}
        for result in self.done.values():
            for key, value in (result.generated or {}).items():
                results.setdefault(key, {}).update(value)
        return results

    def key_of(self, task: LoadedTask) -> str:
        """Return the cache key of a task's result."""
        own = {
            "task": task.name,
            "version": task.task.VERSION,
            "config_sha256": settings_hash(task.task.dump_config()),
            "source_sha256": task.source_sha256,
            "is_rendered": task.is_rendered,
        }
        return cache_key({**self.ingredients, **own})

    def _reuse(self) -> None:
        for task in self.loaded.tasks.values():
            result = self.cache.read(task.name, self.key_of(task))
            if result is not None and self._has_same_requests(task, result):
                self.done[task.name] = result
                self.reused[task.name] = result.finished
        for line in self.cache.damaged:
            self.say(line)
        if self.reused:
            self.say(
                f"{len(self.reused)} of {counted(len(self.loaded.tasks), 'task')} taken from an evaluation of the same "
                f"model and request: {first_few(list(self.reused), _NUM_NAMED)}; --fresh evaluates again"
            )

    def _has_same_requests(self, task: LoadedTask, result: TaskResult) -> bool:
        """Return whether the model would get the same requests today: data may have changed under the same name."""
        try:
            return requests_hash(requests_of(task, self.settings)) == result.requests_sha256
        except Exception:  # raised again, and reported, when the task runs
            return False

    def _run_one(self, task: LoadedTask, model: RequestModel) -> None:
        started = time.monotonic()
        results = run_task(model, task, self.settings)
        if results is None:  # the harness gives them to the first of several processes
            return
        is_code = task.source.code is not None
        score = None if is_code else task_scores(results).get(task.name)  # programs are judged at the end
        result = TaskResult(
            task=task.name,
            key=self.key_of(task),
            requests_sha256=requests_hash(requests_in(results["samples"][task.name])),
            harness=as_stored(group_inputs(task.name, results)),
            score=score,
            answers=task_answers(task.name, results),
            generated=as_stored({key: results[key] for key in _GENERATED}) if is_code else None,
            batch_size=model.batch_size,
            seconds=round(time.monotonic() - started, 1),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            bound=model.prompted(),
        )
        self.cache.write(result)
        self.done[task.name] = result
        self.say(f"{task.name}: {_describe_score(score)}{result.seconds:.0f} s")


def failure(runs: TaskRuns, record_file: str, command: str) -> TunebookError | None:
    """Return the error of an evaluation with failed tasks, with the first one's exit code, or None.

    `command` resumes the evaluation.
    """
    if not runs.failed:
        return None
    first = next(iter(runs.failed.values()))
    if len(runs.failed) == 1 and not runs.done and isinstance(first, TunebookError):
        return first
    failures = "; ".join(f"{name} ({describe_error(error)})" for name, error in runs.failed.items())
    kept = (
        f"The results of the other {len(runs.done)} are in {record_file}; {command} evaluates only what failed"
        if runs.done
        else "Nothing was written"
    )
    count = f"{len(runs.failed)} of {len(runs.failed) + len(runs.done)} tasks failed"
    code = getattr(first, "exit_code", 1)
    return TunebookError(f"{count}: {failures}. {kept}", problem_id="evaluation-incomplete", exit_code=code)


def describe_error(error: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(error, TunebookError):
        return error.message.splitlines()[0]
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")


def _describe_score(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    error = "" if score["stderr"] is None else f" ± {score['stderr']:.2g}"
    return f"{score['num_items']:,} items, {score['metric']} {score['value']:.4g}{error}, "


def requests_of(loaded: LoadedTask, settings: HarnessSettings) -> list[tuple[int, str, list[Any]]]:
    """Return a task's requests, without a model: (item number, item hash, arguments of its requests)."""
    from lm_eval.utils import handle_non_serializable, hash_string

    is_chat = has_template(loaded, settings.tokenizer)
    require_system_prompt(settings.tokenizer, settings.system_prompt if is_chat else None)
    seed_libraries()
    loaded.task.set_fewshot_seed(seed=SEEDS["fewshot"])
    loaded.task.build_all_requests(
        limit=settings.limit,
        rank=0,
        world_size=1,
        system_instruction=settings.system_prompt if is_chat else None,
        apply_chat_template=is_chat,
        chat_template=chat_template(settings.tokenizer) if is_chat else None,
        tokenizer_name="" if not is_chat else str(settings.tokenizer.name_or_path),
    )
    by_item: dict[int, list[Any]] = {}
    for instance in loaded.task.instances:
        by_item.setdefault(instance.doc_id, []).append(instance)
    return [
        (
            number,
            hash_string(json.dumps(items[0].doc, indent=2, default=handle_non_serializable, ensure_ascii=False)),
            [list(instance.args) for instance in sorted(items, key=lambda instance: instance.idx)],
        )
        for number, items in by_item.items()
    ]


def requests_in(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, list[Any]]]:
    """Return the same as `requests_of`, from the harness' samples of a task that ran."""
    first = samples[0]["filter"] if samples else None
    return [
        (sample["doc_id"], sample["doc_hash"], [list(arguments) for arguments in sample["arguments"]])
        for sample in samples
        if sample["filter"] == first
    ]


def group_inputs(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of one task's results that the harness aggregates groups from."""
    return {
        "metrics": dict(results["results"][name]),
        "config": {"metric_list": (results["configs"].get(name) or {}).get("metric_list")},
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"].get(name),
        "higher_is_better": results["higher_is_better"].get(name),
    }


def aggregate(parts: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Have the harness aggregate the groups whose tasks are all among `parts`; return its results."""
    from lm_eval.evaluator_utils import EvalAcc, aggregate_groups

    whole = {name: group for name, group in groups.items() if all(t.task_name in parts for t in group.get_all_tasks())}
    collected = EvalAcc(
        metrics={name: {k: v for k, v in part["metrics"].items() if v is not None} for name, part in parts.items()},
        configs={name: part["config"] for name, part in parts.items()},
        versions={name: part["version"] for name, part in parts.items()},
        num_fewshot={name: part["num_fewshot"] for name, part in parts.items()},
        higher_is_better={name: part["higher_is_better"] for name, part in parts.items()},
        groups=whole,
    )
    results: dict[str, Any] = aggregate_groups(collected)._to_eval_results()
    results["results"] = {name: metrics for name, metrics in results["results"].items() if name in whole}
    return results | {"samples": {}}
