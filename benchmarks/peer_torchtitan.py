"""The speed of torchtitan on the documents that Tunebook's speed is measured on. One JSON line per variant.

    python benchmarks/peer_torchtitan.py --output DIR --site DIR [--only NAME ...] [--gpus 4] [--steps 25]

Needs torchtitan 0.2.2, the newest that imports with torch 2.11, in `--site` or on PYTHONPATH. Its own trainer, started
as its run_train.sh starts it. Its text data set lays the documents end to end and cuts the stream into rows: no token
is padding. Its SDPA attention looks across documents; the variants `_by_document` use its varlen attention, which does
not. Weights and optimizer are fp32, computed in bf16: by FSDP2's mixed precision, or by autocast on one GPU. 32,768
tokens a GPU and optimizer step; the speed is what it logs (tps), the median after the first 10 steps. Lines go to
OUTPUT/peer_torchtitan.jsonl, the output of each variant next to it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from gpu_queue import require_gpus
from lines import Line, add_line, surroundings
from peer_documents import DOCUMENTS_PER_GPU, TOKENS_PER_STEP, Corpus, median_speed

_STEP = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>[-\d.a-z]+)\s+grad_norm:\s*[-\d.a-z]+\s+memory:\s*(?P<gib>[-\d.]+)GiB"
    r".*?tps:\s*(?P<tps>[\d,]+)\s+tflops:\s*[\d,.]+\s+mfu:\s*(?P<mfu>[\d.]+)%"
)


@dataclass(frozen=True)
class Variant:
    """What is typed after what all have in common."""

    model: str  # ours
    name: str  # torchtitan's
    flavor: str
    words: list[str] = field(default_factory=list)
    rows: int = 1  # of a micro batch
    length: int = 8192  # of a row


# By default the trainer's own process makes its rows, about 25 ms of a step.
_COMPILED = ["--compile.enable", "--training.dataloader.num_workers=1", "--training.dataloader.pin_memory",
             "--training.dataloader.prefetch_factor=8"]  # fmt: skip
_STORED = ["--activation_checkpoint.mode=none"]
_SELECTIVE = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
_FP8 = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns=output",
        "--quantize.linear.float8.enable_fsdp_float8_all_gather",
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"]  # fmt: skip
_LLAMA, _QWEN = ("llama3_8b", "llama3"), ("qwen25_3b", "qwen3")
VARIANTS: dict[str, Variant] = {
    "llama8b_default": Variant(*_LLAMA, "8B", _SELECTIVE),  # as its llama3_8b.toml says
    "llama8b_compiled_by_document": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED]),
    "llama8b_compiled_by_document_16384": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED], length=16384),
    "llama8b_compiled_selective_by_document": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_SELECTIVE], rows=2),
    "llama8b_fp8_by_document": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED, *_FP8]),
    "llama8b_fp8_by_document_16384": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED, *_FP8], length=16384),
    "qwen3b_default": Variant(*_QWEN, "2.5-3B", _SELECTIVE),
    "qwen3b_compiled_by_document": Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_STORED]),
    "qwen3b_compiled_by_document_16384": Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_STORED], length=16384),
    "qwen3b_compiled_selective_by_document": Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_SELECTIVE], rows=2),
}


def words_of(variant: Variant, gpus: int, steps: int) -> list[str]:
    """What is typed after `torchtitan.train`, less folders."""
    return [
        f"--model.name={variant.name}",
        f"--model.flavor={variant.flavor}",
        "--experimental.custom_import=peer_torchtitan_models",
        "--training.dataset=c4_test",  # a folder of jsonl files with `text`
        f"--training.seq_len={variant.length}",
        f"--training.local_batch_size={variant.rows}",
        f"--training.global_batch_size={gpus * TOKENS_PER_STEP // variant.length}",
        f"--training.steps={steps}",
        "--optimizer.lr=3e-5",
        "--lr_scheduler.warmup_steps=3",
        "--metrics.log_freq=1",
        "--metrics.disable_color_printing",
        "--comm.train_timeout_seconds=300",  # of 100: the second step may compile again, for any length of document
        *variant.words,
    ]


def measure(name: str, corpus: Corpus, folder: Path, asked: argparse.Namespace) -> Line:
    """Write data and tokenizer, train, and read the log."""
    variant = VARIANTS[name]
    data, tokenizer = folder / "data" / variant.model, folder / "tokenizer" / variant.model
    if not data.exists():
        corpus.write_texts(data)
        corpus.write_tokenizer(tokenizer)
    words = words_of(variant, asked.gpus, asked.steps)
    # As run_train.sh does, but for the port: several may run on one machine.
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={asked.gpus}", "--rdzv_backend=c10d",
               "--rdzv_endpoint=localhost:0", "--local-ranks-filter=0", "--role=rank", "--tee=3", "-m",
               "torchtitan.train", *words, f"--training.dataset_path={data}", f"--model.hf_assets_path={tokenizer}",
               f"--job.dump_folder={folder / 'runs' / name}"]  # fmt: skip
    site = [str(asked.site.resolve())] if asked.site else []
    places = [*site, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(places), "PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    log = asked.output / f"torchtitan-{name}.txt"
    exit_code = _run(command, environment, log, asked.timeout_s)
    line = {"name": name, "peer": "torchtitan", "model": variant.model, "weights": "random", "gpus": asked.gpus,
            "settings": words, "exit_code": exit_code}  # fmt: skip
    line |= read_log(log.read_text(errors="replace"), corpus)
    return line | surroundings(("torchtitan", "torch", "torchao", "triton"), asked.site)


def _run(command: list[str], environment: dict[str, str], log: Path, timeout_s: float) -> int | None:
    """The exit code, or None after a timeout. Ends all its processes: ranks outlive a killed launcher."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def read_log(text: str, corpus: Corpus) -> Line:
    """What its log says of each step."""
    steps = [found.groupdict() for found in map(_STEP.search, text.splitlines()) if found]
    line = median_speed([float(step["tps"].replace(",", "")) for step in steps])
    if not line["timed_steps"]:
        return line | {"error": text.strip()[-1500:]}
    speed = line["tokens_per_second_per_gpu"]
    return line | {
        "mfu": corpus.mfu(speed),
        "mfu_it_logs": float(steps[-1]["mfu"]) / 100,  # attention over whole rows, half of it masked
        "seconds_per_step": round(TOKENS_PER_STEP / speed, 4),
        "first_loss": float(steps[0]["loss"]),
        "last_loss": float(steps[-1]["loss"]),
        "memory_gib": max(float(step["gib"]) for step in steps),  # reserved
    }


def main(words: list[str] | None = None) -> int:
    """Measure one variant after the other; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="default: those of one size for so many GPUs")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=240, help="of one variant")
    parser.add_argument("--site", type=Path, help="a folder of torchtitan's packages, before those of PYTHONPATH")
    asked = parser.parse_args(words)
    prefix = "qwen3b_" if asked.gpus == 1 else "llama8b_"  # an 8B model's fp32 states need several GPUs
    names = asked.only or [name for name in VARIANTS if name.startswith(prefix)]
    require_gpus(asked.gpus)
    asked.output.mkdir(parents=True, exist_ok=True)
    corpora = {model: Corpus(model, DOCUMENTS_PER_GPU * asked.gpus) for model in ("llama3_8b", "qwen25_3b")}
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            line = measure(name, corpora[VARIANTS[name].model], Path(folder), asked)
            has_failed |= "error" in line
            add_line(line, asked.output / "peer_torchtitan.jsonl")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
