"""Kill runs at random moments, most of them during saves, and resume each until it ends: what is lost?

    python tests/bench/checkpoint_kills.py --kills 200 --output FILE [--only CASE ...] [--seed 0] [--waiting]

A run of 10 steps of a tiny model on CPU ranks saves after every second step. One rank or all are killed, and the run is
started again in its folder until it ends; then the next run starts, until all kills are done. Saves complete in the
background, or with `--waiting` while training waits. One JSON line per case counts the kills and their results; a case
fails if

    lost       the newest complete checkpoint after a kill is older than the newest that was complete before it
    damaged    a complete checkpoint has a file that is not what its record says
    different  a bit of the losses or weights of the finished run differs from those of an undisturbed run

Ranks are forked from this process, which has imported the libraries: an attempt takes a second or two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

STEPS, SAVE_EVERY = 10, 2
SHARE_DURING_SAVES = 0.7
SHARE_OF_ALL_RANKS = 0.4
CASES: dict[str, list[str]] = {
    "single": ["parallelism=single", "hardware.gpus_per_node=1"],
    "ddp": ["parallelism=ddp", "hardware.gpus_per_node=2", "packing=padded", "training.micro_batch_size=2"],
    "ddp_lora": ["parallelism=ddp", "hardware.gpus_per_node=2", "peft=lora"],
    "zero1": ["parallelism=zero1", "hardware.gpus_per_node=2"],
    "zero2": ["parallelism=zero2", "hardware.gpus_per_node=2", "packing=padded", "training.micro_batch_size=2"],
    "zero3": ["parallelism=zero3", "hardware.gpus_per_node=2"],
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_PATIENCE_S = 240.0  # of one attempt, on a machine with other work
_PATIENCE_TO_COMPILE_S = 900.0  # DeepSpeed compiles a small operator when it is first used
_LAST_WORDS_S = 5.0  # in which the other ranks notice that one is gone; torchrun allows less


@dataclass(kw_only=True)
class Tally:
    """The results of the kills of one case."""

    kills: int = 0
    during_saves: int = 0
    of_all_ranks: int = 0
    runs: int = 0
    attempts: int = 0
    lost: int = 0
    damaged: int = 0
    different: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The losses and the model of a finished run."""

    losses: list[float]
    model_sha256: str


class Attempt:
    """The running ranks of a run."""

    def __init__(self, folder: Path, num_ranks: int, log: Path) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = str(listening.getsockname()[1])
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.ended: dict[int, int] = {}
        self.ranks: list[int] = []
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            own |= {"LOCAL_WORLD_SIZE": str(num_ranks)}
            work = _train(folder, own | alone if num_ranks > 1 else {})
            self.ranks.append(forked(work, log))

    def is_over(self) -> bool:
        """Whether every rank has ended."""
        for process in self.ranks:
            if process not in self.ended and (status := os.waitpid(process, os.WNOHANG))[0]:
                self.ended[process] = os.waitstatus_to_exitcode(status[1])
        return len(self.ended) == len(self.ranks)

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL the ranks that still run."""
        for process in ranks:
            if process not in self.ended:
                os.kill(process, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end. False if it did not come in time."""
        end = time.monotonic() + timeout_s
        while not self.is_over():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True


def _train(folder: Path, environment: dict[str, str]) -> Callable[[], int]:
    def work() -> int:
        from tunebook.train.rank_process import StopRequest
        from tunebook.train.run import run_rank

        os.environ.update(environment)
        request = StopRequest()
        with request.listening():
            return run_rank(folder, request)

    return work


def forked(work: Callable[[], int], log: Path) -> int:
    """Run a function in a child process with its output in a file; returns the process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


class Case:
    """One strategy: an undisturbed reference, and runs that are killed."""

    def __init__(self, name: str, place: Path, seed: int, *, in_background: bool) -> None:
        words = [*CASES[name], f"training.save_in_background={str(in_background).lower()}"]
        self.place = place / name
        self.place.mkdir()
        self.log = self.place / "log.txt"
        self.random = random.Random(f"{seed} {name}")
        self.tally = Tally()
        self.template = self.place / "template"
        process = forked(lambda: set_up(self.template, words, place), self.log)
        if os.waitpid(process, 0)[1] != 0:
            raise SystemExit(f"{name} could not be set up:\n{self.log.read_text()}")
        self.num_ranks = int(next(word for word in CASES[name] if "gpus_per_node" in word)[-1])
        self.reference = self._reference()

    def _reference(self) -> Result:
        folder = self.place / "reference"
        shutil.copytree(self.template, folder)
        begin = time.monotonic()
        attempt = Attempt(folder, self.num_ranks, self.log)
        if not attempt.wait(_PATIENCE_TO_COMPILE_S) or any(attempt.ended.values()):
            attempt.kill(attempt.ranks)
            raise SystemExit(f"the reference did not end well:\n{self.log.read_text()}")
        self.attempt_s = time.monotonic() - begin
        saves = folder.glob("checkpoints/*/complete.json")
        self.save_s = max(json.loads(file.read_text())["seconds"] for file in saves)
        return result_of(folder)

    def run(self, num_kills: int) -> None:
        """Start runs until there were `num_kills` kills; the last run ends."""
        while self.tally.kills < num_kills:
            folder = self.place / f"run-{self.tally.runs}"
            shutil.copytree(self.template, folder)
            self.tally.runs += 1
            while not self._attempt(folder, kills_left=num_kills - self.tally.kills):
                pass
            if result_of(folder) != self.reference:
                self.tally.different += 1
            shutil.rmtree(folder)

    def _attempt(self, folder: Path, kills_left: int) -> bool:
        """Start the run once, and perhaps kill it. True if the run has ended."""
        self.tally.attempts += 1
        remove_stale_locks()
        attempt = Attempt(folder, self.num_ranks, self.log)
        reported = self._until_the_moment(attempt, folder) if kills_left > 0 else None
        if reported is None:
            if not attempt.wait(_PATIENCE_S):
                attempt.kill(attempt.ranks)
                raise SystemExit(f"an attempt hangs:\n{self.log.read_text()[-4000:]}")
            if any(attempt.ended.values()):
                raise SystemExit(f"an attempt failed without a kill:\n{self.log.read_text()[-4000:]}")
            return True
        self._kill(attempt, folder)
        self._look_at(folder, reported)
        return False

    def _until_the_moment(self, attempt: Attempt, folder: Path) -> int | None:
        """Wait for a random moment. Returns the newest complete step then, or None if the run has ended before."""
        is_in_save = self.random.random() < SHARE_DURING_SAVES
        wait_for_save, delay_s = self.random.randint(1, 3), self.random.uniform(0, self.save_s)
        moment = None if is_in_save else time.monotonic() + self.random.uniform(0, self.attempt_s)
        reported, is_saving = newest_step(folder), False
        while not attempt.is_over():
            now_saving = (folder / "checkpoints" / "_unfinished").exists()
            if is_in_save and moment is None and now_saving and not is_saving:
                wait_for_save -= 1
                moment = time.monotonic() + delay_s if wait_for_save == 0 else None
            is_saving = now_saving
            if moment is not None and time.monotonic() >= moment:
                return reported
            if moment is None or not is_in_save:
                reported = max(reported, newest_step(folder))
            time.sleep(0.001)
        return None

    def _kill(self, attempt: Attempt, folder: Path) -> None:
        is_all = self.num_ranks == 1 or self.random.random() < SHARE_OF_ALL_RANKS
        was_saving = (folder / "checkpoints" / "_unfinished").exists()
        attempt.kill(attempt.ranks if is_all else [self.random.choice(attempt.ranks)])
        self.tally.kills += 1
        self.tally.of_all_ranks += is_all
        attempt.wait(_LAST_WORDS_S)
        attempt.kill(attempt.ranks)
        attempt.wait(_PATIENCE_S)
        is_torn = any((folder / "checkpoints").glob("checkpoint-*/.complete.json"))
        self.tally.during_saves += is_torn or was_saving

    def _look_at(self, folder: Path, reported: int) -> None:
        from tunebook.checkpoint.verify import complete_checkpoints, verified_record
        from tunebook.errors import DataError

        self.tally.lost += newest_step(folder) < reported
        for checkpoint in complete_checkpoints(folder / "checkpoints"):
            try:
                verified_record(checkpoint)
            except DataError:
                self.tally.damaged += 1


def set_up(folder: Path, words: list[str], place: Path) -> int:
    """Write the files that ranks read, as the launcher does: the configuration and the place of the prepared data."""
    from tunebook.config.book import book_root
    from tunebook.config.compose import compose
    from tunebook.config.frozen import config_to_yaml
    from tunebook.data.prepare import prepare
    from tunebook.hardware.detect import detect_machine
    from tunebook.plan.auto.resolve import resolve_auto

    model = place / "model"
    if not model.exists():
        shutil.copytree(book_root() / "recipes" / "quickstart" / "model", model)
        content = json.loads((model / "config.json").read_text()) | SIZES
        content.pop("layer_types", None)
        (model / "config.json").write_text(json.dumps(content))
    common = [f"model.path={model}", "model.facts=null", "hardware=cpu", "evaluation=none", "dataset.max_documents=64",
              "dataset.num_workers=1", f"training.max_steps={STEPS}", f"training.save_every_steps={SAVE_EVERY}",
              "schedule.warmup_steps=2"]  # fmt: skip
    config = resolve_auto(compose("quickstart", [*common, *words]).config, detect_machine()).config
    folder.mkdir()
    (folder / "run.yaml").write_text(config_to_yaml(config))
    (folder / "prepared.json").write_text(json.dumps({"folder": str(prepare(config).folder)}))
    return 0


def newest_step(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 without one."""
    from tunebook.checkpoint.record import step_of
    from tunebook.checkpoint.verify import newest_checkpoint

    newest = newest_checkpoint(folder)
    return (step_of(newest) or 0) if newest is not None else 0


def result_of(folder: Path) -> Result:
    """Read the result of a finished run."""
    from tunebook.files import sha256_file
    from tunebook.record.metrics import is_training_line, read_metrics

    losses = [line["loss"] for line in read_metrics(folder) if is_training_line(line)]
    (weights,) = (folder / "model").glob("*.safetensors")
    return Result(losses=losses, model_sha256=sha256_file(weights))


def measure(name: str, num_kills: int, place: Path, seed: int, *, in_background: bool) -> dict[str, Any]:
    """The line of one case."""
    begin = time.monotonic()
    case = Case(name, place, seed, in_background=in_background)
    if len(case.reference.losses) != STEPS:
        raise SystemExit(f"the reference has {len(case.reference.losses)} losses, not {STEPS}")
    case.run(num_kills)
    line = {"case": name, "date": date.today().isoformat(), "machine": platform.machine(), "cpus": os.cpu_count()}
    line |= {"ranks": case.num_ranks, "seed": seed, "in_background": in_background} | vars(case.tally)
    return line | {"seconds": round(time.monotonic() - begin, 1), "longest_save_s": case.save_s}


def give_extensions(folder: Path) -> None:
    """Copy DeepSpeed's compiled operators to a folder for this script, where a kill may leave a lock."""
    home = Path.home() / ".cache" / "torch_extensions" / f"py3{sys.version_info.minor}_cpu"
    known = Path(os.environ.get("TORCH_EXTENSIONS_DIR", home))
    if known.is_dir() and not any(known.rglob("lock")):
        shutil.copytree(known, folder)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def remove_stale_locks() -> None:
    """Remove the locks of killed ranks, for which the next rank that loads an operator would wait."""
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
        lock.unlink()


def import_everything() -> None:
    """Import what every rank needs, which takes seconds."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    import deepspeed  # noqa: F401

    import tunebook.train.run  # noqa: F401


def main() -> int:
    """Measure the cases and write their lines. Exit code 1 if anything was lost, damaged or different."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="over all cases together")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--waiting", action="store_true", help="training waits until a checkpoint is complete")
    arguments = parser.parse_args()
    import_everything()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TUNEBOOK_CACHE"] = f"{temporary}/cache"
        give_extensions(Path(temporary) / "extensions")
        for number, name in enumerate(arguments.only):
            kills = arguments.kills // len(arguments.only) + (number < arguments.kills % len(arguments.only))
            saving = {"in_background": not arguments.waiting}
            lines.append(measure(name, kills, Path(temporary), arguments.seed, **saving))
            print(json.dumps(lines[-1]), flush=True)
            if arguments.output is not None:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    return int(any(line["lost"] or line["damaged"] or line["different"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
