"""How long from the command to the end of the first optimizer step, and in which phases? One JSON line per run.

    python tests/bench/start_up.py [RECIPE] [WORD ...] [--runs 3] [--output FILE]
    python tests/bench/start_up.py qwen3b_zero2 model=qwen25_3b hardware.gpus_per_node=2 --large --output FILE

Prepares the data, runs `tunebook train` with one optimizer step `--runs` times, and reads the phases out of each run's
manifest. `--large` adds what a start of a real model needs besides the recipe: random weights, generated
documents in rows of 8,192 tokens, 32,768 tokens a step and GPU, and no evaluation. Says the median of the runs last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_queue import machine_versions

ONE_STEP = ["training.max_steps=1", "schedule.warmup_steps=0", "schedule.warmup_share=null", "evaluation=none",
            "training.save_every_steps=null", "training.evaluate_every_steps=null"]  # fmt: skip
LARGE = ["model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=4000",
         "dataset.train_on=everything", "training.max_length=4096", "packing.row_length=8192",
         "training.global_samples=null"]  # fmt: skip
TOKENS_PER_GPU = 32_768


def words_of(arguments: argparse.Namespace) -> list[str]:
    """What is typed after `tunebook train`; of two words for one key the one that was typed here."""
    words = [*ONE_STEP]
    if arguments.large:
        ranks = next((word for word in arguments.words if word.startswith("hardware.gpus_per_node=")), "=1")
        words += [*LARGE, f"training.global_tokens={TOKENS_PER_GPU * int(ranks.partition('=')[2])}"]
    last = {word.split("=")[0]: word for word in [*words, *arguments.words]}
    return [arguments.recipe, *last.values()]


def start(words: list[str], folder: Path) -> dict[str, Any]:
    """One run; its phases, and what it took until it had ended. Raises: CalledProcessError where it failed."""
    command = [sys.executable, "-m", "tunebook", "train", *words, "--run-folder", str(folder)]
    begun, load = time.monotonic(), os.getloadavg()[0]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
    manifest = json.loads((folder / "manifest.json").read_text())
    loss = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    gpus = [gpu["name"] for gpu in manifest["hardware"]["gpus"]]
    found = manifest["start_up"]
    for name in ("model", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return {
        "first_step_s": found["first_step_s"], "launcher": found["launcher"], "rank": found["rank"],
        "wall_s": round(time.monotonic() - begun, 1), "loss": loss, "world_size": manifest["world_size"],
        "model": manifest["model"]["name"], "weights": manifest["model"]["weights"], "gpus": gpus,
        "strategy": (manifest.get("parallelism_found") or {}).get("strategy"), "load_before": round(load, 1),
        "commit": manifest["code"]["git_commit"], "is_clean": manifest["code"]["is_clean"],
    }  # fmt: skip


def median_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Phase by phase over the runs; the sum of medians need not be the median of the sums."""
    found: dict[str, Any] = {"first_step_s": statistics.median(line["first_step_s"] for line in lines)}
    for process in ("launcher", "rank"):
        names = lines[0][process]
        found[process] = {name: statistics.median(line[process].get(name, 0.0) for line in lines) for name in names}
    return found


def main() -> None:
    """Parse the arguments, run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("words", nargs="*", help="overrides, as after `tunebook train`")
    parser.add_argument("--large", action="store_true", help="random weights and generated documents")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--note", default="", help="put into every line")
    parser.add_argument("--output", type=Path, help="a file to which the lines are added")
    arguments = parser.parse_intermixed_args()
    words = words_of(arguments)
    about = {"date": time.strftime("%Y-%m-%d"), "words": words, "cores": len(os.sched_getaffinity(0)),
             "python": platform.python_version(), "versions": machine_versions()}  # fmt: skip
    about |= {"note": arguments.note} if arguments.note else {}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "tunebook", "data", *words, "--samples", "0"], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        for number in range(arguments.runs):
            line = start(words, Path(scratch) / f"run-{number}")
            lines.append(line)
            print(json.dumps(line), flush=True)
            if arguments.output is not None:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(line | about) + "\n")
    print(json.dumps({"median": median_of(lines)}))


if __name__ == "__main__":
    main()
