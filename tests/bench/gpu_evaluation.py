"""Evaluate and chat on a machine with 2 GPUs in several configurations, one JSON line for each.

    python tests/bench/gpu_evaluation.py --output DIR [--logs DIR] [--only NAME ...] [--deadline-s 290] [--cpu] [--list]

Answered is: the same scores and answers on one GPU, on two with a copy each, and with the model spread over both; what
becomes of a batch that is far too large; how far bf16 is from fp32; whether a chat answers as on a CPU. The quickstart
is trained here first; the other models have random weights of a real architecture. `--cpu` does the same with tiny
models and two processes on a CPU, to try the script. Differences from a reference come last, as compared.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_evaluation_results import differences, measured
from gpu_evaluation_tries import Try, tries
from gpu_queue import require_gpus, who_goes

BENCH = Path(__file__).resolve().parent
MAX_ON_CPU = 6  # that run beside the others without a GPU, on a machine with GPUs; each imports torch
_POLL_S = 0.1


@dataclass(kw_only=True)
class _Running:
    what: Try
    process: subprocess.Popen[bytes]
    started: float


@dataclass(kw_only=True)
class Queue:
    """Starts everything as soon as its GPUs are free and what it needs is there."""

    waiting: list[Try]
    folder: Path
    logs: Path
    output: Path
    deadline_s: float
    timeout_s: float
    is_cpu: bool
    running: list[_Running] = field(default_factory=list)
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> dict[str, dict[str, Any]]:
        """Until everything has ended or the deadline has come; the lines by name."""
        self._order = {one.name: number for number, one in enumerate(self.waiting)}
        self._begun = time.monotonic()
        while self.waiting or self.running:
            if time.monotonic() - self._begun > self.deadline_s:
                self._stop_all()
                break
            self._drop()
            self._start_some()
            self._collect_some()
            time.sleep(_POLL_S)
        return self.lines

    def _drop(self) -> None:
        """Give up what needs something that failed."""
        for one in list(self.waiting):
            failed = [name for name in one.after if name in self.lines and not self.lines[name]["as_expected"]]
            if failed:
                self.waiting.remove(one)
                self._write({"name": one.name, "as_expected": False, "not_run": f"{failed[0]} failed"})

    def _start_some(self) -> None:
        ready = [one for one in self.waiting if all(name in self.lines for name in one.after)]
        jobs = {one.name: one.job(self._order[one.name]) for one in [*ready, *(run.what for run in self.running)]}
        chosen = who_goes([jobs[one.name] for one in ready], [jobs[run.what.name] for run in self.running])
        for one in ready:
            beside = sum(not run.what.gpus for run in self.running)
            if jobs[one.name] in chosen and (one.gpus or beside < (1 if self.is_cpu else MAX_ON_CPU)):
                self.waiting.remove(one)
                self.running.append(self._launch(one))

    def _launch(self, one: Try) -> _Running:
        kept, place = self.logs / one.name, self.folder / "runs" / one.name
        kept.mkdir(parents=True, exist_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *(["-m", "tunebook"] if one.is_tunebook else []), *one.words]
        if self.is_cpu and len(one.gpus) > 1:
            command += ["--processes", str(len(one.gpus))]
        if one.run is not None:
            shutil.copytree(self.folder / one.run, place / "run", ignore=shutil.ignore_patterns("checkpoints"))
            command.append(f"run={place / 'run'}")
        elif one.words[0] == "eval":
            command += ["--outputs", str(place)]
        with (kept / "terminal.txt").open("w") as terminal, (kept / "stdout.txt").open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=terminal, env=self._environment(one, kept), start_new_session=True
            )
        return _Running(what=one, process=process, started=time.monotonic())

    def _environment(self, one: Try, kept: Path) -> dict[str, str]:
        path = [str(BENCH / "gpu_calls"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, one.gpus)), "COLUMNS": "200"}
        environment |= {"TUNEBOOK_BENCH_CALLS": str(kept / "calls.jsonl"), "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1" if self.is_cpu else "4")
        return environment | ({} if one.gpu_gib is None else {"TUNEBOOK_BENCH_GPU_GIB": str(one.gpu_gib)})

    def _collect_some(self) -> None:
        now = time.monotonic()
        for run in list(self.running):
            code: int | str | None = run.process.poll()
            if code is None and now - run.started > self.timeout_s:
                _kill(run.process)
                code = f"stopped after {self.timeout_s:g} s"
            if code is not None:
                self._collect(run, code)

    def _collect(self, run: _Running, exit_code: int | str) -> None:
        self.running.remove(run)
        one, now = run.what, time.monotonic()
        line = {"name": one.name, "gpus": len(one.gpus), "command": " ".join(one.words), "exit_code": exit_code}
        line |= {"as_expected": exit_code == one.expected_exit, "note": one.note, "gpu_gib": one.gpu_gib}
        line |= {"wall_s": round(now - run.started, 1), "clock_s": round(now - self._begun, 1)}
        own = {"train": "trained", "train_lora": "lora"}.get(one.name, f"runs/{one.name}")
        self._write(line | measured(self.logs / one.name, self.folder / own, is_chat=one.words[0] == "chat"))

    def _stop_all(self) -> None:
        for run in list(self.running):
            _kill(run.process)
            self._collect(run, "cut short: the time was up")
        for one in self.waiting:
            self._write({"name": one.name, "as_expected": False, "not_run": "the time was up"})

    def _write(self, line: dict[str, Any]) -> None:
        self.lines[line["name"]] = line
        print(json.dumps(line), flush=True)
        with (self.output / "evaluation.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and everything that it started: it is the first of a session of its own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _chosen(everything: list[Try], only: list[str] | None) -> list[Try]:
    """What was named, with what that needs and is compared with."""
    if not only:
        return everything
    by_name = {one.name: one for one in everything}
    names, left = set(), list(only)
    while left:
        one = by_name[left.pop()]
        names.add(one.name)
        left += [*one.after, *([one.compare_with] if one.compare_with else [])]
    return [one for one in everything if one.name in names]


def main() -> None:
    """Parse the arguments, run everything, compare, and pack the logs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="where each command's small files are kept; OUTPUT/logs if not given")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/evaluation"), help="where models and runs are made")
    parser.add_argument("--only", nargs="*", help="names, as --list prints them; what they need is run as well")
    parser.add_argument("--deadline-s", type=float, default=290)
    parser.add_argument("--timeout-s", type=float, default=100, help="of one command")
    parser.add_argument("--cpu", action="store_true", help="tiny models and two processes on a CPU")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    arguments = parser.parse_args()
    everything = [
        one for one in tries(arguments.folder, is_cpu=arguments.cpu) if not (arguments.cpu and one.needs_gpus)
    ]
    unknown = set(arguments.only or ()) - {one.name for one in everything}
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: there is no such name; --list prints all")
    chosen = _chosen(everything, arguments.only)
    if arguments.list:
        print("\n".join(json.dumps([one.name, one.gpus, one.gpu_gib, *one.words]) for one in chosen))
        return
    if not arguments.cpu:
        require_gpus(1 + max((gpu for one in chosen for gpu in one.gpus), default=-1))
    logs: Path = arguments.logs or arguments.output / "logs"
    shutil.rmtree(arguments.folder, ignore_errors=True)
    for folder in (arguments.output, arguments.folder, logs):
        folder.mkdir(parents=True, exist_ok=True)
    queue = Queue(
        waiting=list(chosen),
        folder=arguments.folder,
        logs=logs,
        output=arguments.output,
        deadline_s=arguments.deadline_s,
        timeout_s=arguments.timeout_s,
        is_cpu=arguments.cpu,
    )
    lines = queue.run()
    compared = [
        differences(one.name, one.compare_with, logs, lines) for one in chosen if one.compare_with is not None
    ]  # fmt: skip
    (arguments.output / "compared.jsonl").write_text("".join(json.dumps(line) + "\n" for line in compared))
    print("\n".join(json.dumps(line) for line in compared), flush=True)
    with tarfile.open(arguments.output / "logs.tgz", "w:gz") as archive:
        archive.add(logs, arcname="logs")


if __name__ == "__main__":
    main()
