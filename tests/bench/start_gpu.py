"""How long a short run takes to its first step, and in all: one JSON line per way of compiling and state of the caches.

    python tests/bench/start_gpu.py [KEY=VALUE ...] [--model FOLDER] [--steps 300] [--documents 64] [--validation]
                                    [--compile auto true false] [--caches cold warm] [--timeout-s 600]

Every line is one `tunebook train` on one GPU, or on the CPU if there is none. Without --model it trains a model of
SmolLM2-135M's sizes with random weights, which is written first; --layers makes it smaller. The documents are local
files of short conversations, since `auto` weighs compiling for files but not for generated data. `cold` starts without
the caches of Tunebook, torch.compile and Triton; `warm` repeats the run on those that cold has left. `start_up` has the
phases from the manifest, `slow_steps` the steps that took at least 1 s and 3 times the median, `recompilations` torch's
reasons. A run that fails or takes too long has an `error` instead, and the others still run; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_queue import machine_versions

from tunebook.config.book import resolve_path
from tunebook.processes import stopping_with_parent
from tunebook.record.manifest import MANIFEST_FILE, read_manifest
from tunebook.record.metrics import is_training_line, read_metrics
from tunebook.record.run_folder import PLAN_FILE

SIZES = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WORDS = ("the", "one", "red", "runs", "old", "house", "tree", "when", "because", "takes", "gives", "under", "over")
_RECOMPILED = "Recompiling function"
_REASON = "] [__recompiles]     - "


def parse(words: list[str] | None) -> argparse.Namespace:
    """The arguments. Exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("more", metavar="KEY=VALUE", nargs="*", help="more overrides of tunebook train")
    parser.add_argument("--model", type=Path, help="a folder with weights and a tokenizer")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--documents", type=int, default=64, help="of a step")
    parser.add_argument(
        "--words", type=int, default=40, help="of a document on average; half to twice as many are drawn"
    )
    parser.add_argument("--compile", nargs="+", choices=("auto", "true", "false"), default=["auto", "true", "false"])
    parser.add_argument("--caches", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--validation", action="store_true", help="hold out 5%% and validate every quarter of the run")
    parser.add_argument("--output", type=Path, help="keep the run folders and logs here")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    asked = parser.parse_args(words)
    if wrong := [word for word in asked.more if "=" not in word]:
        parser.error(f"{' '.join(wrong)}: overrides are KEY=VALUE")
    if min(asked.steps, asked.documents, asked.words, asked.layers) < 1:
        parser.error("--steps, --documents, --words and --layers are at least 1")
    return asked


def write_model(folder: Path, layers: int) -> Path:
    """A folder with config.json and the quickstart's tokenizer. The weights are drawn by the run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": layers}))
    for name in TOKENIZER_FILES:
        shutil.copy(resolve_path(f"book:recipes/quickstart/model/{name}"), folder / name)
    return folder


def write_documents(file: Path, number: int, mean_words: int) -> Path:
    """Conversations of one question and answer, each document with half to twice the mean number of words."""
    draw = random.Random(0)
    with file.open("w") as lines:
        for _ in range(number):
            words = draw.choices(WORDS, k=max(2, round(mean_words * 2 ** draw.uniform(-1, 1))))
            half = len(words) // 2
            turns = {"user": " ".join(words[:half]), "assistant": " ".join(words[half:])}
            messages = [{"role": role, "content": content} for role, content in turns.items()]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


def words_of(asked: argparse.Namespace, compiles: str, model: Path, documents: Path, outputs: Path) -> list[str]:
    """The words after `tunebook train`."""
    found = [
        "model=hub", f"model.path={model}", "dataset=jsonl", f"dataset.path={documents}", "parallelism=single",
        "hardware.gpus_per_node=1", f"training.max_steps={asked.steps}", f"training.global_samples={asked.documents}",
        "training.max_length=2048", "training.log_every_steps=1", "training.save_every_steps=null",
        "training.resume=never", "training.seed=0", "evaluation=none", f"outputs={outputs}",
    ]  # fmt: skip
    found += [] if asked.model is not None else ["model.weights=random"]
    found += [] if compiles == "auto" else [f"model.compile_layers={compiles}"]
    if asked.validation:
        found += ["dataset.validation_share=0.05", f"training.evaluate_every_steps={max(1, asked.steps // 4)}"]
    return [*found, *asked.more]


def measure(words: list[str], caches: Path, outputs: Path, timeout_s: float) -> dict[str, Any]:
    """One run in a process of its own: its numbers, or the error."""
    environment = os.environ | {
        "TUNEBOOK_CACHE": str(caches / "tunebook"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"), "TORCH_LOGS": "recompiles", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    outputs.mkdir(parents=True, exist_ok=True)
    log, begun = outputs / "log.txt", time.monotonic()
    command = [sys.executable, "-m", "tunebook", "train", *words]
    with log.open("w") as stream:
        try:
            ended = subprocess.run(
                stopping_with_parent(command), env=environment, stdout=stream, stderr=subprocess.STDOUT,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not ended after {timeout_s:g} s", "log": log.read_text()[-2000:]}
    found: dict[str, Any] = {"wall_s": round(time.monotonic() - begun, 1), "exit_code": ended.returncode}
    text = log.read_text(errors="replace")
    if ended.returncode != 0:
        return found | {"error": text[-2000:]}
    (manifest,) = outputs.rglob(MANIFEST_FILE)
    return found | read_run(manifest.parent) | read_recompilations(text)


def read_run(folder: Path) -> dict[str, Any]:
    """The numbers of a finished run."""
    manifest, plan = read_manifest(folder), json.loads((folder / PLAN_FILE).read_text())
    lines = [line for line in read_metrics(folder) if is_training_line(line)]
    seconds = [line["seconds"] for line in lines]
    later, tokens = seconds[1:], lines[-1]["tokens_seen"] - lines[0]["tokens_seen"]
    usual = statistics.median(later or seconds)
    chosen = {choice["key"]: choice for choice in plan["choices"]}
    return {
        "compile_layers": chosen["model.compile_layers"]["value"],
        "why": chosen["model.compile_layers"]["why"],
        "attention": plan["attention"],
        "row_length": plan["batch"]["row_length"],
        "longest_row": plan["batch"]["longest_row"],
        "first_step_s": manifest["start_up"]["first_step_s"],
        "start_up": {key: manifest["start_up"][key] for key in ("launcher", "rank")},
        "leak_probe": {key: manifest["leak_probe"].get(key) for key in ("warm_up_s", "probe_s")},
        "compiled": manifest.get("compiled"),
        "steps": lines[-1]["step"],
        "steps_s": round(sum(seconds), 2),
        "steps_s_without_first": round(sum(later), 2),
        "median_step_s": round(usual, 4),
        "slow_steps": {
            line["step"]: line["seconds"] for line in lines[1:] if line["seconds"] > max(1.0, 3 * usual)
        },
        "tokens_per_step": round(lines[-1]["tokens_seen"] / lines[-1]["step"], 1),
        "tokens_per_second": round(tokens / sum(later), 1) if sum(later) else None,
        "planned_seconds": round(plan["time"]["hours"] * 3600, 1) if plan["time"]["hours"] else None,
        "last_loss": lines[-1]["loss"],
        "memory_gib": lines[-1]["memory_gib"],
        "machine": machine_versions(),
    }  # fmt: skip


def read_recompilations(log: str) -> dict[str, Any]:
    """The number of recompilations, and for each the guards that failed."""
    reasons: list[str] = []
    for line in log.splitlines():
        if _RECOMPILED in line:
            reasons.append("")
        elif reasons and _REASON in line:
            reasons[-1] += f"{line.partition(_REASON)[2].strip()[:200]}; "
    return {"num_recompilations": len(reasons), "recompilations": reasons}


def lines(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """A line per way and state of the caches."""
    model = asked.model.resolve() if asked.model is not None else write_model(folder / "model", asked.layers)
    documents = write_documents(folder / "documents.jsonl", min(20_000, asked.steps * asked.documents), asked.words)
    for compiles in asked.compile:
        for state in asked.caches:
            outputs, caches = folder / f"{compiles}_{state}", folder / f"{compiles}_caches"
            if state == "cold":
                shutil.rmtree(caches, ignore_errors=True)
            words = words_of(asked, compiles, model, documents, outputs)
            line = {"name": f"{compiles}_{state}", "compile": compiles, "caches": state, "model": model.name}
            yield line | {"words": asked.more} | measure(words, caches, outputs, asked.timeout_s)


def main(words: list[str] | None = None) -> int:
    """Print a line for each run as it ends; 1 if one failed."""
    asked, has_failed = parse(words), False
    with tempfile.TemporaryDirectory(prefix="tunebook-start-") as own:
        folder = asked.output.resolve() if asked.output is not None else Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        for line in lines(asked, folder):
            print(json.dumps(line), flush=True)
            has_failed |= "error" in line
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
