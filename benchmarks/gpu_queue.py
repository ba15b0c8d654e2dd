"""Run many commands that train on one GPU machine: several get ready at once and are timed one after the other.

A short run spends most of its time on imports, data, weights and compilation. These overlap, as far as the planned
memory of all fits on the GPU. After its warm-up a run waits until no other gets ready or evaluates on its GPUs; then
its ranks have them to themselves. The other end is `turns.py`, for Tunebook's ranks by `gpu_turns/sitecustomize.py`.
Each run that ends appends one JSON line to OUTPUT/results.jsonl; its small files are in OUTPUT/logs.tgz.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lines import Line, add_line, read_lines, surroundings
from turns import FOLDER, WARM_UP

from tunebook.plan.auto.decisions import AS_ASKED

WARM_UP_STEPS = 10  # left out of the median speed: compiled layers meet their shapes in these
_RESOLVED = ("model.one_pass_head", "model.compile_layers", "precision.master_weights")  # change what a step computes
_KEPT = ("run.yaml", "manifest.json", "metrics.jsonl", "deepspeed.json", "log.txt", "plan.json", "contamination.json",
         "outcome-*.json", "logs/*.log", "evaluation/*.json")  # fmt: skip
_STOP = (signal.SIGTERM, signal.SIGINT)  # the second request makes Tunebook kill its ranks
_SCORE = ("metric", "value", "stderr", "num_items")
_TICK_S = 0.05
_STOP_AGAIN_S = 2.2  # a request within two seconds counts as the first one's repetition
_ENDED_WITHIN_S = 15.0
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run and the GPUs that it trains on."""

    name: str
    gpus: tuple[int, ...]
    command: list[str]
    line: Line  # copied to its line of results
    gpu_gib: float = 0.0  # planned, of each GPU
    host_gib: float = 0.0  # weights of its ranks in host memory
    timeout_s: float = 150  # to get ready on its GPUs, and to be timed
    warm_up_steps: int = WARM_UP_STEPS
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    turn: Path  # the folder for messages to its ranks
    started: float
    went: float | None = None  # when it was let on its GPUs, with others
    timed: float | None = None  # when it got them to itself
    ended: str | None = None  # why it was stopped

    def waits_to(self, answer: str) -> bool:
        word = {"go": "ready", "alone": "warm"}[answer]
        said = list(self.turn.glob(f"{word}-*"))
        return len(said) == len(self.job.gpus) and not (self.turn / answer).exists()

    def is_timed(self) -> bool:
        """Whether its ranks have the GPUs to themselves. An evaluation after the training does not."""
        return self.timed is not None and len(list(self.turn.glob("ended-*"))) < len(self.job.gpus)

    def busy_since(self) -> float | None:
        """When it began to get ready, or to be timed; None while it waits."""
        return None if self.waits_to("alone") else self.timed or self.went


class GpuQueue:
    """`run` starts the jobs in order and returns the lines of those that ended."""

    def __init__(
        self, jobs: list[Job], output: Path, *, runs: Path, deadline_s: float, max_ranks: int, max_gpu_gib: float,
        max_host_gib: float,
    ) -> None:  # fmt: skip
        self.waiting = list(jobs)
        self.output = output
        self.runs = runs  # run folders, which are not kept
        self.max_ranks = max_ranks  # of runs that have not ended
        self.max_gpu_gib = max_gpu_gib  # planned by runs that share a GPU
        self.max_host_gib = max_host_gib  # of weights of runs that have not ended
        self.running: list[_Running] = []
        self.lines: list[Line] = []
        self._deadline = time.monotonic() + deadline_s

    def run(self) -> list[Line]:
        """Run until all jobs have ended or the deadline has passed."""
        (self.output / "logs").mkdir(parents=True, exist_ok=True)
        for name in ("turns", *(job.name for job in self.waiting)):
            shutil.rmtree(self.runs / name, ignore_errors=True)
        while (self.waiting or self.running) and time.monotonic() < self._deadline:
            self._start_some()
            self._let_some_go()
            self._watch()
            time.sleep(_TICK_S)
        self._stop(self.running, "the time was up")
        for run in list(self.running):
            self._collect(run, "the time was up")
        with tarfile.open(self.output / "logs.tgz", "w:gz") as archive:
            archive.add(self.output / "logs", arcname="logs")
        return self.lines

    def _start_some(self) -> None:
        for job in list(self.waiting):
            jobs = [*(run.job for run in self.running), job]
            has_memory = sum(other.host_gib for other in jobs) <= self.max_host_gib or not self.running
            if sum(len(other.gpus) for other in jobs) <= self.max_ranks and has_memory:
                self.waiting.remove(job)
                self.running.append(self._launch(job))

    def _launch(self, job: Job) -> _Running:
        kept, turn = self.output / "logs" / job.name, self.runs / "turns" / job.name
        kept.mkdir(exist_ok=True)
        turn.mkdir(parents=True)
        path = [str(_HERE / "gpu_turns"), str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", FOLDER: str(turn), "PYTHONPATH": os.pathsep.join(path)}
        environment |= {"CUDA_VISIBLE_DEVICES": visible(job.gpus), WARM_UP: str(job.warm_up_steps)}
        with (kept / "terminal.txt").open("w") as terminal:
            process = subprocess.Popen(
                job.command, stdout=terminal, stderr=subprocess.STDOUT, env=environment | job.environment
            )
        return _Running(job=job, process=process, turn=turn, started=time.monotonic())

    def _let_some_go(self) -> None:
        """In order: first those that wait to be timed. A run that waits for several GPUs reserves them."""
        for run in self.running:
            others = self._sharing(run)
            if run.waits_to("alone") and not any(other.busy_since() for other in others):
                run.timed = time.monotonic()
                (run.turn / "alone").touch()
        reserved: set[int] = set()
        for run in self.running:
            if run.waits_to("go"):
                others = self._sharing(run)
                fits = sum(other.job.gpu_gib for other in others) + run.job.gpu_gib <= self.max_gpu_gib or not others
                if fits and not any(other.is_timed() for other in others) and not reserved & set(run.job.gpus):
                    run.went = time.monotonic()
                    (run.turn / "go").touch()
                else:
                    reserved |= set(run.job.gpus)

    def _sharing(self, run: _Running) -> list[_Running]:
        """The other runs on its GPUs."""
        return [
            other
            for other in self.running
            if other is not run and other.went is not None and set(other.job.gpus) & set(run.job.gpus)
        ]

    def _watch(self) -> None:
        now = time.monotonic()
        for run in list(self.running):
            if run.process.poll() is not None:
                self._collect(run, run.process.returncode)
            elif run.ended is None and now - (run.busy_since() or now) > run.job.timeout_s:
                self._stop([run], f"stopped after {run.job.timeout_s:g} s on the GPUs")

    def _stop(self, runs: list[_Running], why: str) -> None:
        """Kill the ranks of runs, which would otherwise keep their GPUs."""
        for request in _STOP:
            for run in runs:
                run.ended = why
                run.process.send_signal(request)
            time.sleep(_STOP_AGAIN_S if runs else 0)
        for run in runs:
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(_ENDED_WITHIN_S)

    def _collect(self, run: _Running, exit_code: int | str) -> None:
        self.running.remove(run)
        now, job = time.monotonic(), run.job
        kept, folder = self.output / "logs" / job.name, self.runs / job.name
        for file in (file for pattern in _KEPT for file in folder.glob(pattern)):  # `tunebook verify` reads them there
            place = kept / file.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            shutil.copy(file, place)
        line = {"name": job.name, "gpus": len(job.gpus), **job.line, "exit_code": exit_code}
        line |= {"ended": run.ended} if run.ended else {}
        line |= {"wall_s": round(now - run.started, 1)}
        line |= measured(kept, job.warm_up_steps) | host_memory(run.turn) | surroundings()
        self.lines.append(line)
        add_line(line, self.output / "results.jsonl")
        shutil.rmtree(folder / "model", ignore_errors=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def require_gpus(count: int) -> None:
    """End the script if this process sees fewer GPUs than it needs, before each run fails by itself."""
    import torch

    found = torch.cuda.device_count()
    if found < count:
        needed = "a GPU" if count == 1 else f"{count} GPUs"
        sys.exit(f"{needed} needed, and {found} found here: torch {torch.__version__} sees no more; nothing was run")


def visible(gpus: tuple[int, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for some of the GPUs that this process sees."""
    mine = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    return ",".join(mine[gpu] if mine else str(gpu) for gpu in gpus)


def measured(folder: Path, warm_up_steps: int = WARM_UP_STEPS) -> Line:
    """What was planned and measured, and the wrapper of the model, from the records of a run folder."""
    found: Line = {}
    if (file := folder / "plan.json").exists():
        plan = json.loads(file.read_text())
        found = {key: plan.get(key) for key in ("attention", "packing")} | {"resolved": _resolved(plan)}
        if plan["memory_gib"] is not None:  # with the lengths of the run's documents
            found["planned_gib"] = plan["memory_gib"]["allocated"]
            found["planned_tokens_per_second"] = plan["time"]["tokens_per_second_per_gpu"]
    if (file := folder / "manifest.json").exists():
        manifest = json.loads(file.read_text())
        found |= {key: manifest.get(key) for key in ("parallelism_found", "leak_probe")}
    metrics = folder / "metrics.jsonl"
    recorded = read_lines(metrics) if metrics.exists() else []
    for line in recorded:  # the last counts
        found |= {key: value for key, value in line.items() if key.startswith("validation_")}
    for when in ("before", "after"):
        if (file := folder / "evaluation" / f"{when}.json").exists():
            tasks = json.loads(file.read_text())["tasks"]
            found[when] = {name: {key: task[key] for key in _SCORE if key in task} for name, task in tasks.items()}
    lines = [line for line in recorded if "loss" in line]
    if not lines:
        return found
    timed, last = lines[warm_up_steps:] or lines, lines[-1]
    for key, digits in (("tokens_per_second_per_gpu", 1), ("seconds", 4), ("mfu", 4), ("padding_share", 4)):
        values = [line[key] for line in timed if line.get(key) is not None]
        name = "seconds_per_step" if key == "seconds" else key
        found |= {name: round(statistics.median(values), digits)} if values else {}
    memory = ("memory_gib", "memory_reserved_gib")  # of the device as a whole, other runs hold a part
    return found | {key: last[key] for key in memory if key in last} | {
        "steps": last["step"],
        "losses": [round(line["loss"], 6) for line in lines],
        "grad_norms": [round(line["grad_norm"] or 0.0, 5) for line in lines],
        "tokens_per_step": round(last["tokens_seen"] / last["step"]),
    }  # fmt: skip


def _resolved(plan: Line) -> list[str]:
    """Of `_RESOLVED`, what `auto` decided in a run, as overrides."""
    return [
        f"{choice['key']}={json.dumps(choice['value']).strip(chr(34))}"
        for choice in plan["choices"]
        if choice["key"] in _RESOLVED and choice["why"] != AS_ASKED
    ]


def host_memory(turn: Path) -> Line:
    """`host_gib`, `host_peak_gib` and `host_pinned_gib` of each rank that has trained, as `gpu_turns` wrote them."""
    ranks = sorted(turn.glob("host-*"), key=lambda file: int(file.name.removeprefix("host-")))
    found = [json.loads(file.read_text()) for file in ranks]
    return {key: [each[key] for each in found] for key in (found[0] if found else ())}
