"""The cost of a checkpoint, compared with the plain Trainer: the stall of a save, its bytes, the time to resume.

    python tests/bench/checkpoint_costs.py --output FILE [--only CASE ...] [--repeats 3]

Ten steps of a model of 26 million weights on CPU ranks, saved after every second step, are trained in turn with
Tunebook's saves in the background (`tunebook`), with training waiting for them (`tunebook_waiting`), and by the
methods of transformers instead (`trainer`). Tunebook flushes a save to the disk and hashes every file before it counts;
the Trainer leaves its files in the page cache. Medians over the repeats and over all saves but the last:

    save_s        how long training stood still for a save
    whole_save_s  time until the save was complete, by its record
    train_s       time of all ten steps until the last save is complete, with the work in the background
    resume_s      time from the search for a checkpoint to the first step; Tunebook reads and hashes every file in it

One JSON line per case. Needs 4 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import checkpoint_kills
from checkpoint_kills import STEPS, forked, give_extensions, import_everything, set_up

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
CASES: dict[str, list[str]] = {
    "single": ["parallelism=single", "hardware.gpus_per_node=1"],
    "single_lora": ["parallelism=single", "hardware.gpus_per_node=1", "peft=lora"],
    "ddp": ["parallelism=ddp", "hardware.gpus_per_node=2"],
    "zero2": ["parallelism=zero2", "hardware.gpus_per_node=2"],
}
KINDS = ("tunebook", "tunebook_waiting", "trainer")
_UPSTREAM = ("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "_load_best_model")
_PATIENCE_S = 900.0


def timed(work: Callable[[], int], notes: Path, *, is_plain: bool) -> Callable[[], int]:
    """A rank's work, with notes of the times of its saves and its start; `is_plain`: with the Trainer's checkpoints."""

    def note(**times: float) -> None:
        if os.environ.get("RANK", "0") == "0":
            with notes.open("a") as stream:
                stream.write(json.dumps(times) + "\n")

    def do() -> int:
        from transformers.trainer_utils import get_last_checkpoint
        from trl import SFTTrainer

        from tunebook.train import run as running
        from tunebook.train.callbacks import Records
        from tunebook.train.trainer import RecipeTrainer

        trainer: Any = RecipeTrainer
        if is_plain:
            for name in _UPSTREAM:
                setattr(trainer, name, getattr(SFTTrainer, name))
        save, choose, begin = trainer._save_checkpoint, running._resumed, Records.on_train_begin
        end = Records.on_train_end
        started: list[float] = []
        begun: list[float] = []

        def timed_save(self: Any, *args: Any, **settings: Any) -> Any:
            at = time.perf_counter()
            result = save(self, *args, **settings)
            if self.state.global_step < STEPS:  # the wait at the end is in `train_s`
                note(save_s=time.perf_counter() - at)
            return result

        def timed_choice(config: Any, own: Any, folder: Path) -> Path | None:
            started.append(time.perf_counter())
            if not is_plain:
                return choose(config, own, folder)
            checkpoints = folder / "checkpoints"
            newest = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
            return Path(newest) if newest else None

        def timed_begin(self: Any, args: Any, state: Any, control: Any, **settings: Any) -> None:
            begin(self, args, state, control, **settings)
            if state.global_step:
                note(resume_s=time.perf_counter() - started[0])
            else:
                begun.append(time.perf_counter())

        def timed_end(self: Any, args: Any, state: Any, control: Any, **settings: Any) -> None:
            end(self, args, state, control, **settings)
            if begun:
                note(train_s=time.perf_counter() - begun[0])

        changed: Any = running
        trainer._save_checkpoint, changed._resumed = timed_save, timed_choice
        Records.on_train_begin = timed_begin  # type: ignore[method-assign]
        Records.on_train_end = timed_end  # type: ignore[method-assign]
        return work()

    return do


def train(folder: Path, ranks: int, notes: Path, *, is_plain: bool) -> None:
    """Run the ranks of one run to their end."""
    log = folder.parent / "log.txt"
    whole = checkpoint_kills._train
    checkpoint_kills._train = lambda *words: timed(whole(*words), notes, is_plain=is_plain)
    try:
        attempt = checkpoint_kills.Attempt(folder, ranks, log)
    finally:
        checkpoint_kills._train = whole
    is_over = attempt.wait(_PATIENCE_S)
    attempt.kill(attempt.ranks)
    if not is_over or any(attempt.ended.values()):
        raise SystemExit(f"{folder} did not end well:\n{log.read_text()[-3000:]}")


def train_and_resume(folder: Path, ranks: int, notes: Path, *, is_plain: bool) -> int:
    """Train a run, then its last two steps again. Returns the bytes of its last checkpoint."""
    train(folder, ranks, notes, is_plain=is_plain)
    if not is_plain:
        record = json.loads((folder / "checkpoints" / f"checkpoint-{STEPS - 2}" / "complete.json").read_text())
        with notes.open("a") as stream:
            stream.write(json.dumps({"whole_save_s": record["seconds"]}) + "\n")
    last = folder / "checkpoints" / f"checkpoint-{STEPS}"
    shutil.rmtree(last)  # as if it had been killed after the eighth step
    train(folder, ranks, notes, is_plain=is_plain)
    return sum(file.stat().st_size for file in last.rglob("*") if file.is_file())


def measure(case: str, repeats: int, place: Path) -> dict[str, Any]:
    """The line of one case."""
    own = place / case
    own.mkdir()
    for kind in KINDS:
        words = [*CASES[case], f"training.save_in_background={str(kind == 'tunebook').lower()}"]
        process = forked(lambda kind=kind, words=words: set_up(own / kind, words, place), own / "log.txt")
        if os.waitpid(process, 0)[1] != 0:
            raise SystemExit(f"{case} could not be set up:\n{(own / 'log.txt').read_text()}")
    ranks = int(next(word for word in CASES[case] if "gpus_per_node" in word)[-1])
    found: dict[str, Any] = {}
    for repeat in range(repeats):
        for kind in KINDS:
            folder = own / f"{kind}-{repeat}"
            shutil.copytree(own / kind, folder)
            found[f"{kind}_bytes"] = train_and_resume(folder, ranks, own / f"{kind}.jsonl", is_plain=kind == "trainer")
            shutil.rmtree(folder)
    for kind in KINDS:
        lines = [json.loads(line) for line in (own / f"{kind}.jsonl").read_text().splitlines()]
        for key in ("save_s", "whole_save_s", "train_s", "resume_s"):
            times = [line[key] for line in lines if key in line]
            if times:
                found[f"{kind}_{key}"] = round(statistics.median(times), 4)
                found[f"{kind}_{key.removesuffix('_s')}s"] = len(times)
    line = {"case": case, "date": date.today().isoformat(), "machine": platform.machine(), "cpus": os.cpu_count()}
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
    busy = {
        "load_average": round(os.getloadavg()[0], 1)
    }  # of the last minute: more than the ranks means that other work ran
    return line | {"ranks": ranks} | found | busy | {"versions": versions}


def main() -> None:
    """Measure the cases and write their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    checkpoint_kills.SIZES.update(SIZES)
    import_everything()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TUNEBOOK_CACHE"] = f"{temporary}/cache"
        give_extensions(Path(temporary) / "extensions")
        for case in arguments.only:
            line = measure(case, arguments.repeats, Path(temporary))
            print(json.dumps(line), flush=True)
            if arguments.output is not None:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
