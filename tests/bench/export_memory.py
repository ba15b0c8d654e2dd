"""How much host memory `tunebook export` needs, by what is exported: one JSON line per case.

    python tests/bench/export_memory.py --output FILE [--layers 10] [--only CASE ...]

A run of a Qwen2 of TinyLlama's sizes (10 layers, 0.57 billion random weights, a bf16 base) is laid out as
each strategy leaves it, by the functions that the tests use: whole safetensors in fp32 and in bf16, ZeRO-2 and ZeRO-3
partitions of two ranks (fp32 masters without Adam's two moments, which an export never reads), FSDP's sharded
checkpoint, a LoRA adapter. Each is then exported by the command, in a process of its own:

    peak      VmHWM, the highest resident size by the kernel's own record: pages of mapped weight files count
    anonymous RssAnon, sampled every 5 ms: what is not a page of a file, and could not be given back
    before    both for a model of 50,000 weights: Python and the libraries

`peak_per_checkpoint` is (peak - before) / the bytes of the checkpoint's weights; `..._per_export`, by those written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

MIB = 2**20
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
# Form of the checkpoint, its number format, and the options of the export.
CASES: dict[str, tuple[str, str, list[str]]] = {
    "whole_bf16": ("whole", "bfloat16", []),
    "whole_fp32_to_bf16": ("whole", "float32", []),
    "zero2_to_bf16": ("zero2", "float32", []),
    "zero3_to_bf16": ("zero3", "float32", []),
    "zero3_to_fp32": ("zero3", "float32", ["--dtype", "fp32"]),
    "fsdp_to_bf16": ("fsdp", "float32", []),
    "adapter": ("adapter", "float32", []),
    "adapter_merged_bf16": ("adapter", "float32", ["--merge"]),
    "adapter_merged_fp32": ("adapter", "float32", ["--merge", "--dtype", "fp32"]),
}
WATCHED = """
import sys
sys.argv = ["tunebook", *sys.argv[1:]]
from tunebook.cli import main
try:
    main()
finally:
    status = open("/proc/self/status").read()
    print("VmHWM", next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)
"""


def load_layouts() -> Any:
    """The module by which the tests lay out runs."""
    file = Path(__file__).parents[1] / "checkpoint" / "export" / "layouts.py"
    spec = importlib.util.spec_from_file_location("layouts", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch(words: list[str]) -> dict[str, Any]:
    """Run `tunebook` and look at its memory; MiB and seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    started, anonymous = time.monotonic(), 0
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    while process.poll() is None:
        anonymous = max(anonymous, _anonymous(process.pid))
        time.sleep(0.005)
    said, errors = process.communicate()
    peak = next((int(line.split()[1]) for line in errors.splitlines() if line.startswith("VmHWM")), 0) * 1024
    return {
        "exit_code": process.returncode,
        "peak_mib": round(peak / MIB, 1),
        "anonymous_mib": round(anonymous / MIB, 1),
        "wall_s": round(time.monotonic() - started, 1),
        "said": said,
        "errors": errors[-1500:] if process.returncode else "",
    }


def _anonymous(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def main() -> int:
    """Lay out a run per case, export it, print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    layouts = load_layouts()
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        base = layouts.write_base(Path(scratch) / "base", SIZES | {"num_hidden_layers": arguments.layers}, "bfloat16")
        before = _before(layouts, Path(scratch))
        for name in arguments.only:
            form, dtype, options = CASES[name]
            run = layouts.write_run(Path(scratch) / name / "run", base, peft="lora" if form == "adapter" else "full")
            line = _case(layouts, run, form, dtype, options, before)
            line = {"name": name, "device": "cpu", "layers": arguments.layers, **line, **_versions()}
            print(json.dumps(line), flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            subprocess.run(["rm", "-r", str(run.parent)], check=True)
    return 0


def _before(layouts: Any, scratch: Path) -> dict[str, Any]:
    base = layouts.write_base(scratch / "tiny", layouts.TINY, "bfloat16")
    run = layouts.write_run(scratch / "small" / "run", base)
    layouts.write_checkpoint(run, "whole")
    found = watch(["export", str(run), "--to", str(scratch / "small" / "out")])
    assert found["exit_code"] == 0, found
    return found


def _case(layouts: Any, run: Path, form: str, dtype: str, options: list[str], before: dict[str, Any]) -> dict[str, Any]:
    checkpoint = layouts.write_checkpoint(run, form, dtype)
    size = layouts.weight_bytes(run, form, dtype)
    place = run.parent / "out"
    found = watch(["export", str(run), "--to", str(place), *options])
    if found["exit_code"]:
        return {"form": form, "checkpoint": checkpoint.name, **found}
    del found["said"], found["errors"]
    written = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    used = found["peak_mib"] - before["peak_mib"]
    held = found["anonymous_mib"] - before["anonymous_mib"]
    return {
        "form": form,
        "options": options,
        **found,
        "before_mib": before["peak_mib"],
        "anonymous_before_mib": before["anonymous_mib"],
        "checkpoint_mib": round(size / MIB, 1),
        "export_mib": round(written / MIB, 1),
        "peak_per_checkpoint": round(used / (size / MIB), 2),
        "peak_per_export": round(used / (written / MIB), 2),
        "anonymous_per_checkpoint": round(held / (size / MIB), 2),
        "anonymous_per_export": round(held / (written / MIB), 2),
    }


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "transformers", "safetensors", "peft")}
    return found | {"python": platform.python_version(), "date": date.today().isoformat()}


if __name__ == "__main__":
    sys.exit(main())
