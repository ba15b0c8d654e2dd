"""Kill runs at random moments, most of them during saves, and resume each until it ends: what is lost?

    python benchmarks/checkpoint_kills.py --kills 200 --output FILE [--only CASE ...] [--seed 0] [--waiting] [--gpu]

A run of 10 steps of a tiny model, on CPU ranks or with `--gpu` on a GPU each, saves after every second step. One rank
or all are killed, and the run is started again in its folder until it ends; then the next run starts, until all kills
are done. Saves complete in the background, or with `--waiting` while training waits. One JSON line per case counts the
kills and their results; a case fails if

    lost       the newest complete checkpoint after a kill is older than the newest that was complete before it
    damaged    a complete checkpoint has a file that is not what its record says
    different  a bit of the losses or weights of the finished run differs from those of an undisturbed run

Ranks are forked from this process, which has imported the libraries: an attempt takes a second or two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lines import Line, add_line, read_lines, surroundings

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
    "fsdp": ["parallelism=fsdp", "hardware.gpus_per_node=2"],
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip
_PATIENCE_S = 240.0  # of one attempt, on a machine with other work
_PATIENCE_TO_COMPILE_S = 900.0  # DeepSpeed compiles a small operator when it is first used
_LAST_WORDS_S = 5.0  # in which the other ranks notice that one is gone; torchrun allows less


class Attempt:
    """The running ranks of a run."""

    def __init__(self, folder: Path, num_ranks: int, log: Path) -> None:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = str(listening.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks),
                  "LOCAL_WORLD_SIZE": str(num_ranks)}  # fmt: skip
        self.folder = folder
        self.log = log
        self.ended: dict[int, int] = {}
        self.ranks: list[int] = []
        for rank in map(str, range(num_ranks)):
            environment = shared | {"RANK": rank, "LOCAL_RANK": rank} if num_ranks > 1 else {}
            self.ranks.append(forked(_rank(folder, environment), log))

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

    def finish(self, timeout_s: float) -> None:
        """Wait for a good end. Raises: SystemExit with the end of the log."""
        if not self.wait(timeout_s) or any(self.ended.values()):
            self.kill(self.ranks)
            reasons = [json.loads(file.read_text())["reason"] for file in self.folder.glob("outcome-*.json")]
            codes = sorted(self.ended.values())
            raise SystemExit(f"exit codes {codes}: {reasons}\n{self.log.read_text()[-4000:]}")


def _rank(folder: Path, environment: dict[str, str]) -> Callable[[], int]:
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

    def __init__(self, name: str, place: Path, seed: int, words: list[str]) -> None:
        self.place = place / name
        self.place.mkdir()
        self.log = self.place / "log.txt"
        self.random = random.Random(f"{seed} {name}")
        self.tally: Counter[str] = Counter(
            dict.fromkeys(("kills", "during_saves", "runs", "attempts", "lost", "damaged", "different"), 0)
        )
        self.template = self.place / "template"
        self.num_ranks = int(next(word for word in CASES[name] if "gpus_per_node" in word)[-1])
        process = forked(lambda: write_run(self.template, [*CASES[name], *words]), self.log)
        if os.waitpid(process, 0)[1] != 0:
            raise SystemExit(f"{name} could not be set up:\n{self.log.read_text()[-4000:]}")
        self.reference = self._reference()

    def _reference(self) -> tuple[list[float], str]:
        folder = self.place / "reference"
        shutil.copytree(self.template, folder)
        begin = time.monotonic()
        Attempt(folder, self.num_ranks, self.log).finish(_PATIENCE_TO_COMPILE_S)
        self.attempt_s = time.monotonic() - begin
        saves = folder.glob("checkpoints/*/complete.json")
        self.save_s = max(json.loads(file.read_text())["seconds"] for file in saves)
        return result_of(folder)

    def run(self, num_kills: int) -> None:
        """Start runs until there were `num_kills` kills; the last run ends."""
        while self.tally["kills"] < num_kills:
            folder = self.place / f"run-{self.tally['runs']}"
            shutil.copytree(self.template, folder)
            self.tally["runs"] += 1
            while not self._attempt(folder, may_kill=self.tally["kills"] < num_kills):
                pass
            self._compare(result_of(folder), folder)
            shutil.rmtree(folder)

    def _attempt(self, folder: Path, *, may_kill: bool) -> bool:
        """Start the run once, and perhaps kill it. True if the run has ended."""
        self.tally["attempts"] += 1
        remove_stale_locks()
        attempt = Attempt(folder, self.num_ranks, self.log)
        newest = self._until_the_moment(attempt, folder) if may_kill else None
        if newest is None:
            attempt.finish(_PATIENCE_S)
            return True
        self._kill(attempt, folder)
        self._look_at(folder, newest)
        return False

    def _until_the_moment(self, attempt: Attempt, folder: Path) -> int | None:
        """Wait for a random moment. Returns the newest complete step then, or None if the run has ended before."""
        is_in_save = self.random.random() < SHARE_DURING_SAVES
        wait_for_save, delay_s = self.random.randint(1, 3), self.random.uniform(0, self.save_s)
        moment = None if is_in_save else time.monotonic() + self.random.uniform(0, self.attempt_s)
        newest, is_saving = newest_step(folder), False
        while not attempt.is_over():
            now_saving = _is_saving(folder)
            if is_in_save and moment is None and now_saving and not is_saving:
                wait_for_save -= 1
                moment = time.monotonic() + delay_s if wait_for_save == 0 else None
            is_saving = now_saving
            if moment is not None and time.monotonic() >= moment:
                return newest
            if moment is None or not is_in_save:
                newest = max(newest, newest_step(folder))
            time.sleep(0.001)
        return None

    def _compare(self, result: tuple[list[float], str], folder: Path) -> None:
        """Count a result that differs from the reference, and print from which step on."""
        if result == self.reference:
            return
        self.tally["different"] += 1
        pairs = enumerate(zip(result[0], self.reference[0], strict=True), start=1)
        resumed = [line for line in self.log.read_text().splitlines() if str(folder) in line and "resuming" in line]
        print([(step, *losses) for step, losses in pairs if losses[0] != losses[1]], resumed, file=sys.stderr)

    def _kill(self, attempt: Attempt, folder: Path) -> None:
        is_all = self.num_ranks == 1 or self.random.random() < SHARE_OF_ALL_RANKS
        was_saving = _is_saving(folder)
        attempt.kill(attempt.ranks if is_all else [self.random.choice(attempt.ranks)])
        attempt.wait(_LAST_WORDS_S)
        attempt.kill(attempt.ranks)
        attempt.wait(_PATIENCE_S)
        is_torn = any((folder / "checkpoints").glob("checkpoint-*/.complete.json"))
        self.tally.update(kills=1, during_saves=int(is_torn or was_saving))

    def _look_at(self, folder: Path, newest: int) -> None:
        from tunebook.checkpoint.verify import complete_checkpoints, verified_record
        from tunebook.errors import DataError

        self.tally["lost"] += newest_step(folder) < newest
        for checkpoint in complete_checkpoints(folder / "checkpoints"):
            try:
                verified_record(checkpoint)
            except DataError:
                self.tally["damaged"] += 1


def _is_saving(folder: Path) -> bool:
    return (folder / "checkpoints" / "_unfinished").exists()


def write_run(folder: Path, words: list[str]) -> int:
    """Write what ranks read, as the launcher does: the configuration and the place of the prepared data."""
    from tunebook.config.book import book_root
    from tunebook.config.compose import compose
    from tunebook.config.frozen import config_to_yaml
    from tunebook.data.prepare import prepare
    from tunebook.hardware.detect import detect_machine
    from tunebook.plan.auto.resolve import resolve_auto

    model = Path(os.environ["TUNEBOOK_CACHE"]).with_name("model")
    if not model.exists():
        shutil.copytree(book_root() / "recipes" / "quickstart" / "model", model)
        content = json.loads((model / "config.json").read_text()) | SIZES
        content.pop("layer_types", None)
        (model / "config.json").write_text(json.dumps(content))
    common = [f"model.path={model}", "model.facts=null", "evaluation=none", "dataset.max_documents=64",
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


def result_of(folder: Path) -> tuple[list[float], str]:
    """The losses of a finished run and the SHA-256 of its weights."""
    from tunebook.files import sha256_file

    losses = [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    (weights,) = (folder / "model").glob("*.safetensors")
    return losses, sha256_file(weights)


def remove_stale_locks() -> None:
    """Remove the locks of killed ranks, for which the next rank that loads an operator would wait."""
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
        lock.unlink()


def prepare_process(place: Path, *, uses_gpu: bool) -> None:
    """Import what every rank needs, which takes seconds, and give it a cache and compiled operators of its own."""
    home = Path.home() / ".cache" / "torch_extensions" / f"py3{sys.version_info.minor}_cpu"
    known = Path(os.environ.get("TORCH_EXTENSIONS_DIR", home))
    if known.is_dir() and not any(known.rglob("lock")):
        shutil.copytree(known, place / "extensions")
    os.environ |= {"TORCH_EXTENSIONS_DIR": str(place / "extensions"), "TUNEBOOK_CACHE": str(place / "cache"),
                   "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                   "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    if not uses_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401  # with GPUs it would create a CUDA context, which forked ranks cannot use

    import tunebook.train.run  # noqa: F401


def measure(name: str, num_kills: int, place: Path, asked: argparse.Namespace) -> Line:
    """The line of one case."""
    begin = time.monotonic()
    hardware = (
        ["hardware=hopper", "training.deterministic=true", "model.compile_layers=false"]
        if asked.gpu
        else ["hardware=cpu"]
    )
    saving = f"training.save_in_background={str(not asked.waiting).lower()}"
    case = Case(name, place, asked.seed, [*hardware, saving])
    case.run(num_kills)
    line = {"case": name, "ranks": case.num_ranks, "seed": asked.seed, "in_background": not asked.waiting,
            "on": "gpu" if asked.gpu else "cpu"}  # fmt: skip
    seconds = {"seconds": round(time.monotonic() - begin, 1), "longest_save_s": case.save_s}
    return line | case.tally | seconds | surroundings()


def main(words: list[str] | None = None) -> int:
    """Measure the cases and write their lines. Exit code 1 if anything was lost, damaged or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="over all cases together")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--waiting", action="store_true", help="training waits until a checkpoint is complete")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank instead of CPU ranks")
    asked = parser.parse_args(words)
    # accelerate takes FSDP for GPUs only: on CPUs it would be DDP
    asked.only = asked.only or [name for name in CASES if asked.gpu or name != "fsdp"]
    lines = []
    with tempfile.TemporaryDirectory() as place:
        prepare_process(Path(place), uses_gpu=asked.gpu)
        for number, name in enumerate(asked.only):
            kills = asked.kills // len(asked.only) + (number < asked.kills % len(asked.only))
            lines.append(measure(name, kills, Path(place), asked))
            add_line(lines[-1], asked.output)
    return int(any(line["lost"] or line["damaged"] or line["different"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
