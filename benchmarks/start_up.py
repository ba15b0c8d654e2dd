"""Time from the command to the end of the first step of a LoRA run of Llama 3.1 8B's sizes, by phase, on one GPU.

    PYTHONPATH=src python benchmarks/start_up.py --output DIR [--layers 4] [--repeats 3] [--src OTHER_CHECKOUT/src]

One JSON line a run, also in DIR/start_up.jsonl. `state` says which caches are there:
- first: none. The run is planned, its data is made and its kernels are compiled.
- cold: the plan and the data. The kernels are compiled.
- warm: all. Repeated.
`phases` are seconds of the launcher and of rank 0 (`start_up` in the manifest), `wall_s` is the whole command. A rank
that starts early imports while the launcher works: `import_libraries` is what was left at its launch. Random weights
are drawn on the CPU in `rank.model`, which a pretrained model does not need: `undrawn_s` leaves that out.
The last line is about a rank's imports alone, by package (`python -X importtime`). `--src` measures another version. On
a CPU:

    python benchmarks/start_up.py --output DIR --repeats 1 --model qwen25_05b --layers 1 hardware=cpu \
        training.max_length=64 training.global_tokens=64 dataset.synthetic.num_documents=8

Words after the options are overrides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_models import facts_of, first_layers
from lines import Line, add_line, surroundings

WORDS = [
    *("peft=lora", "peft.rank=16", "dataset=synthetic", "model.weights=random", "evaluation=none"),
    *("training.max_length=8192", "training.global_tokens=32768", "training.max_steps=2", "training.resume=never"),
]
SOURCES = Path(__file__).resolve().parents[1] / "src"
COMPILED = ("inductor", "triton")  # folders of the output with compiled kernels


def main(words: list[str] | None = None) -> None:
    """Run every state and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder; its caches are removed first")
    parser.add_argument("--model", default="llama31_8b", help="a model of the book")
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--repeats", type=int, default=3, help="warm runs")
    parser.add_argument("--src", type=Path, default=SOURCES)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args(words)
    output = asked.output.resolve()
    for name in ("cache", "runs", *COMPILED):
        shutil.rmtree(output / name, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    layers = asked.layers or facts_of(asked.model)["num_layers"]
    cut = first_layers(asked.model, layers) if layers < facts_of(asked.model)["num_layers"] else []
    last = {word.partition("=")[0]: word for word in [f"model={asked.model}", *cut, *WORDS, *asked.overrides]}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(asked.src.resolve()), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "TUNEBOOK_CACHE": str(output / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(output / "inductor"),
        "TRITON_CACHE_DIR": str(output / "triton"),
    }
    common = surroundings() | {"model": asked.model, "layers": layers}
    common |= {} if asked.src == SOURCES else {"src": str(asked.src)}
    for state in ["first", "cold", *["warm"] * asked.repeats]:
        if state == "cold":
            for name in COMPILED:
                shutil.rmtree(output / name, ignore_errors=True)
        measured = measure_run(list(last.values()), output / "runs", environment)
        add_line(common | {"state": state} | measured, output / "start_up.jsonl")
    add_line(common | {"state": "imports"} | measure_imports(environment), output / "start_up.jsonl")


def measure_run(words: list[str], runs: Path, environment: dict[str, str]) -> Line:
    """Train once, in a folder that is removed; the phases of its start."""
    shutil.rmtree(runs, ignore_errors=True)
    folder, begun = runs / "run", time.monotonic()
    command = [sys.executable, "-m", "tunebook", "train", *words, "--run-folder", str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wall_s = round(time.monotonic() - begun, 2)
    if done.returncode:
        return {"failed": done.stdout[-2000:], "wall_s": wall_s}
    start: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["start_up"]
    first_step_s, phases = start["first_step_s"], {key: start[key] for key in ("launcher", "rank")}
    undrawn_s = round(first_step_s - start["rank"]["model"], 2)
    return {"first_step_s": first_step_s, "undrawn_s": undrawn_s, "wall_s": wall_s, "phases": phases}


def measure_imports(environment: dict[str, str]) -> Line:
    """The seconds of a rank's imports: as a rank does them, then by package as Python's own measurement counts them."""
    program = "import gc; gc.disable(); import time; t = time.time(); import tunebook.train.run; print(time.time() - t)"
    plain = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    command = [sys.executable, "-X", "importtime", "-c", program]
    timed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds: Counter[str] = Counter()
    for line in timed.stderr.splitlines():
        own, _, module = line.removeprefix("import time:").partition("|")
        if own.strip().isdecimal():
            seconds[module.rpartition("|")[2].strip().partition(".")[0]] += int(own) / 1e6
    packages = {name: round(taken, 3) for name, taken in seconds.most_common(15)}
    return {"seconds": round(float(plain.stdout.split()[-1]), 2), "by_package": packages}


if __name__ == "__main__":
    main()
