"""Train small random models of many architectures on a CPU, and compare them with transformers: one JSON line for each.

    python tests/bench/small_architectures.py WORK [NAME ...] [--output FILE]

The architectures and their sizes are in cases/small_architectures.json. `tunebook train` trains each whole, packed
where `auto` packs, and with LoRA in padded rows, for three steps over all of twelve documents. WORK keeps models and
runs: what is there is not made again.

`transformers_losses` are those of the same three steps by transformers and AdamW alone, one document at a time, with
eager attention and without the loss of routers, which `losses` include with `router_loss_coefficient`.
`largest_weight_difference` is that of the exported model, as AutoModelForCausalLM loads it, from the model that
transformers trained, and `largest_logit_difference` that of their logits for one document. `lora_losses` begin with the
same loss. `refused` and `lora_refused` are Tunebook's own words.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from evaluation_agreement import report
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tunebook.config.book import book_root
from tunebook.record.metrics import is_training_line, read_metrics

_CASES = Path(__file__).parent / "cases" / "small_architectures.json"
_PACKAGES = ("torch", "transformers", "trl", "peft")
_STEPS, _RATE, _LARGEST_NORM = 3, 1e-3, 1.0
_WORDS = ("sun", "moon", "tree", "river", "stone", "bird", "cat", "dog", "red", "blue", "green")
_OVERRIDES = (
    "dataset=jsonl", "hardware=cpu", "hardware.gpus_per_node=1", "evaluation=none", "training.global_samples=12",
    f"training.max_steps={_STEPS}", "training.log_every_steps=1", "training.max_length=128", "schedule=constant",
    "schedule.warmup_steps=0", f"optimizer.learning_rate={_RATE}", "optimizer.weight_decay=0", "optimizer.beta2=0.999",
)  # fmt: skip
_WAYS = {"full": (), "lora": ("peft=lora", "peft.dropout=0", "packing=padded")}


def main(words: list[str] | None = None) -> int:
    """Compare every architecture, or the named ones; print the lines and append them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", type=Path, help="file that the lines are appended to")
    asked = parser.parse_args(words)
    cases = json.loads(_CASES.read_text(encoding="utf-8"))
    report(_lines(asked.work.resolve(), {name: cases[name] for name in asked.names or cases}), _PACKAGES, asked.output)
    return 0


def _lines(work: Path, cases: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, case in cases.items():
        line: dict[str, Any] = {"name": name, **case}
        try:
            folder = _model(work / "models" / name, case)
        except (ValueError, TypeError) as error:
            yield line | {"refused": f"transformers: {' '.join(str(error).split())[:200]}"}
            continue
        runs = {way: _run(work, name, folder, way) for way in _WAYS}
        keys = {"full": "refused", "lora": "lora_refused"}
        line |= {keys[way]: run for way, run in runs.items() if isinstance(run, str)}
        if isinstance(runs["lora"], Path):
            line["lora_losses"] = _losses(runs["lora"])
        if isinstance(runs["full"], Path):
            plan = json.loads((runs["full"] / "plan.json").read_text(encoding="utf-8"))
            line |= {"packing": plan["packing"], "attention": plan["attention"], "losses": _losses(runs["full"])}
            line |= _compare(folder, runs["full"])
        yield line


def _model(folder: Path, case: dict[str, Any]) -> Path:
    """A folder with a small model, whose weights are so large that a mistake changes its losses."""
    if (folder / "config.json").exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(str(book_root() / "recipes" / "quickstart" / "model"))
    config = AutoConfig.for_model(case["kind"], **case["sizes"])
    torch.manual_seed(7)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.numel() > 64:
            torch.nn.init.normal_(parameter, std=min(0.3, parameter.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _documents(work: Path) -> Path:
    file, draw = work / "documents.jsonl", random.Random(3)
    lines = []
    for _ in range(12):
        words = [draw.choice(_WORDS) for _ in range(draw.randint(4, 40))]
        said = (("user", " ".join(words)), ("assistant", " ".join(reversed(words))))
        lines.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in said]}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _run(work: Path, name: str, folder: Path, way: str) -> Path | str:
    """The run's folder, or the words with which it was refused."""
    out = work / "runs" / name / way
    run = out / "quickstart" / "latest"
    if not (run / "model").is_dir():
        words = [sys.executable, "-m", "tunebook", "train", "quickstart", f"outputs={out}", "model=hub"]
        words += [f"model.path={folder}", f"dataset.path={_documents(work)}", *_OVERRIDES, *_WAYS[way]]
        environment = os.environ | {"TUNEBOOK_CACHE": str(work / "cache")}
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            said = [line.strip() for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
            start = next((number for number, line in enumerate(said) if line.startswith("error")), -3)
            return " ".join(said[start:][:3])
    return run


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if is_training_line(line)]


def _compare(folder: Path, run: Path) -> dict[str, Any]:
    """The same steps by transformers alone, and the exported model beside the one that they give."""
    place = json.loads((run / "prepared.json").read_text(encoding="utf-8"))["folder"]
    (prepared,) = Path(place).glob("**/*.arrow")
    rows = datasets.Dataset.from_file(str(prepared)).with_format("torch")
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0)
    losses = []
    for _ in range(_STEPS):
        total, count = torch.zeros(()), 0
        for row in rows:
            labels = row["labels"].long()[1:]
            logits = model(input_ids=row["input_ids"].long()[None], use_cache=False).logits[0, :-1].float()
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            count += int((labels != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.grad is not None], _LARGEST_NORM)
        optimizer.step()
        losses.append(float(total.detach()) / count)
    exported, found = loader.from_pretrained(
        str(run / "model"), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"], f"{run}: {found}"
    pairs = zip(model.parameters(), exported.parameters(), strict=True)
    words = rows[0]["input_ids"].long()[None]
    with torch.no_grad():
        apart = model.eval()(input_ids=words).logits - exported.eval()(input_ids=words).logits
    return {
        "architecture": type(exported).__name__,
        "parameters": model.num_parameters(),
        "router_loss_coefficient": getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0),
        "transformers_losses": losses,
        "largest_weight_difference": max(float((one - other).abs().max().detach()) for one, other in pairs),
        "largest_logit_difference": float(apart.abs().max()),
    }


if __name__ == "__main__":
    sys.exit(main())
