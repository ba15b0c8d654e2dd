"""What the benchmarks on real weights and data share: the overrides for the inputs here, and a run folder's numbers.

`recipes/smollm2_135m_boolq/make_inputs.py` makes the inputs in `inputs/` of the checkout.
"""

from __future__ import annotations

import json
from pathlib import Path

from lines import Line, read_lines

CHECKOUT = Path(__file__).resolve().parents[1]
_MODEL = ["model.name=null", "model.path=book:inputs/smollm2_135m"]
_BOOLQ = [*_MODEL, "dataset.name=book:inputs/boolq", "evaluation.tasks=[book:inputs/boolq/boolq.yaml]"]
_TOOLS = [*_MODEL, "dataset=file", "dataset.path=book:inputs/tool_calls/train.jsonl",
          "evaluation.tasks=[book:inputs/tool_calls/calls.yaml]", "evaluation.before=true"]  # fmt: skip
OVERRIDES = {"smollm2_135m_boolq": _BOOLQ, "smollm2_135m_lora": _BOOLQ, "smollm2_135m_tools": _TOOLS}
_SCORE = ("metric", "value", "stderr", "num_items", "contamination")


def describe(folder: Path) -> Line:
    """Speed, losses and scores of a finished run."""
    lines = read_lines(folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    start_up = json.loads((folder / "manifest.json").read_text())["start_up"]
    speeds = sorted(line["tokens_per_second_per_gpu"] for line in steps[len(steps) // 5 :])
    found: Line = {
        "run": folder.name,
        "steps": steps[-1]["step"],
        "training_s": round(sum(line["seconds"] for line in steps), 1),
        "first_step_s": start_up["first_step_s"],
        "start_up": {process: start_up[process] for process in ("launcher", "rank")},
        "tokens_per_second": speeds[len(speeds) // 2],
        "memory_gib": max(steps[-1]["memory_gib"]),
        "losses": [round(line["loss"], 4) for line in steps[:: max(1, len(steps) // 30)]],
        "validation_losses": {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line},
    }
    for file in sorted(folder.glob("evaluation/before.json")) + sorted(folder.glob("evaluation/after.json")):
        tasks = json.loads(file.read_text())["tasks"]
        found[file.stem] = {name: {key: task[key] for key in _SCORE if key in task} for name, task in tasks.items()}
    return found


def run_folders(outputs: Path) -> list[Path]:
    """The run folders below a folder of outputs, oldest first, without the links to the latest."""
    files = sorted(outputs.glob("*/*/manifest.json"))
    return [file.parent for file in files if not file.parent.is_symlink()]
