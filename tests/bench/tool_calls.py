"""Train a model on conversations with tools, and count the calls that it writes as the held-out documents have them.

    python tests/bench/tool_calls.py MODEL DATA OUTPUT [--seeds 1 2 3] [--epochs 3] [--max-length 2048] [OVERRIDE ...]

MODEL is a folder with weights, DATA a file of conversations. A tenth of the documents is held out. Each seed is a run
of `tunebook train`. Before the first and after each, every held-out answer that is a call is generated greedily from
the tokens before it. One JSON line for each: `right` counts calls with the name and all arguments of the document,
`named` those with the right name, `calls` all that are calls at all, of `answers`. Losses are of held-out documents.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.prepared import load_prepared

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_TEMPLATE = "trl:qwen2_5_training"
_SYSTEM = "You are a helpful assistant."
_NEW_TOKENS, _AT_ONCE = 160, 32
Answer = tuple[list[int], str]  # the tokens before it, and its text


def call_in(text: str) -> tuple[str, Any] | None:
    """The name and arguments of the first call in an answer; None if there is no readable one."""
    found = _CALL.search(text)
    try:
        call = json.loads(found.group(1)) if found else None
        return (call["name"], call["arguments"]) if call else None
    except (ValueError, KeyError, TypeError):
        return None


def answers_of(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[Answer]:
    """The trained stretches of a document that are calls. Shapes: both (num_tokens,)."""
    start = None
    for position, label in enumerate([*labels, IGNORED_LABEL]):
        if label != IGNORED_LABEL and start is None:
            start = position
        elif label == IGNORED_LABEL and start is not None:
            text = tokenizer.decode(ids[start:position])
            if call_in(text) is not None:
                yield ids[:start], text
            start = None


def score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: list[Answer]) -> dict[str, int]:
    """Generate every answer and compare it."""
    import torch

    counts = {"answers": len(answers), "calls": 0, "named": 0, "right": 0}
    ordered = sorted(answers, key=lambda answer: len(answer[0]))
    for first in range(0, len(ordered), _AT_ONCE):
        batch = ordered[first : first + _AT_ONCE]
        longest = max(len(ids) for ids, _ in batch)
        rows = [[0] * (longest - len(ids)) + ids for ids, _ in batch]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch]
        with torch.inference_mode():
            made = model.generate(
                torch.tensor(rows, device=model.device), attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
            )  # fmt: skip
        for tokens, (_, text) in zip(made.tolist(), batch, strict=True):
            written, expected = call_in(tokenizer.decode(tokens[longest:])), call_in(text)
            assert expected is not None
            counts["calls"] += written is not None
            counts["named"] += written is not None and written[0] == expected[0]
            counts["right"] += written == expected
    return counts


def measure(folder: Path, held_out: Path) -> dict[str, int]:
    """Score the model in a folder on the prepared documents in another."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    part = load_prepared(held_out).validation
    assert part is not None
    answers = [one for row in part.load() for one in answers_of(row["input_ids"], row["labels"], tokenizer)]
    return score(model.to(device).eval(), tokenizer, answers)


def train(asked: argparse.Namespace, seed: int) -> tuple[Path, float]:
    """Run one training; returns its folder and seconds."""
    outputs = asked.output / f"seed-{seed}"
    words = [
        *["model=hub", f"model.path={asked.model}", f"model.chat_template={_TEMPLATE}", "dataset=jsonl"],
        *[f"dataset.path={asked.data}", f"dataset.system_prompt='{_SYSTEM}'", "dataset.validation_share=0.1"],
        *[f"training.max_length={asked.max_length}", "dataset.overlong=drop", "training.global_samples=16"],
        *[f"training.num_epochs={asked.epochs}", "training.evaluate_every_steps=10", "optimizer.learning_rate=2e-4"],
        *["evaluation=none", "hardware.gpus_per_node=1", f"training.seed={seed}", f"outputs={outputs}"],
        *asked.overrides,
    ]
    started = time.monotonic()
    with (asked.output / f"seed-{seed}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "tunebook", "train", *words], check=True, stdout=log, stderr=subprocess.STDOUT
        )
    (manifest,) = [file for file in outputs.glob("*/*/manifest.json") if not file.parent.is_symlink()]
    return manifest.parent, time.monotonic() - started


def described(folder: Path) -> dict[str, Any]:
    """What a run's records say of it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    held_out = {line["step"]: round(line["validation_loss"], 4) for line in lines if "validation_loss" in line}
    return {
        "steps": steps[-1]["step"],
        "validation_losses": held_out,
        "tokens_per_second": max(line["tokens_per_second_per_gpu"] or 0 for line in steps),
        "memory_gib": steps[-1]["memory_gib"],
    }


def main(words: list[str] | None = None) -> int:
    """Score the model as it is, then train and score for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=2048)
    asked = parser.parse_intermixed_args(words)
    asked.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with (asked.output / "tool_calls.jsonl").open("a") as file:
        for seed in asked.seeds:
            folder, seconds = train(asked, seed)
            held_out = Path(json.loads((folder / "prepared.json").read_text())["folder"])
            if seed == asked.seeds[0]:
                _say({"seed": None, **measure(asked.model, held_out)}, file)
            counts = measure(folder / "model", held_out)
            _say({"seed": seed, **counts, "seconds": round(seconds, 1), **described(folder)}, file)
    return 0


def _say(line: dict[str, Any], file: Any) -> None:
    print(json.dumps(line), flush=True)
    file.write(json.dumps(line) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
