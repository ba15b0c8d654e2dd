"""The speed of torchtitan on the documents of `gpu_runs.py`. One JSON line per variant.

    python tests/bench/peer_torchtitan.py --output DIR --site DIR [--only NAME ...] [--gpus 4] [--steps 25]

Needs torchtitan 0.2.2, the newest that imports with torch 2.11, in `--site` or on PYTHONPATH. Its own trainer, started
as its run_train.sh starts it; its text data set lays the documents end to end and cuts the stream into rows, so that no
token is padding, and documents are cut at the ends of rows. Its SDPA attention looks across documents; the variants
`_by_document` use its varlen attention, which does not. Weights and optimizer are fp32, computed in bf16: by FSDP2's
mixed precision, or by autocast on one GPU. 32,768 tokens a GPU and optimizer step; the speed is what it logs (tps), the
median after the first 10 steps.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_queue import require_gpus
from peer_documents import DOCUMENTS_PER_GPU, TINY, Corpus
from peer_runs import TOKENS_PER_STEP, Attempt, Ended, medians, parse, peer_environment, run_all, versions_of

PACKAGES = ("torchtitan", "torch", "torchao", "triton", "datasets")
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
_FP8 = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns=output"]
_FP8_TENSORWISE = [*_FP8, "--quantize.linear.float8.enable_fsdp_float8_all_gather",
                   "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"]  # fmt: skip
_FP8_ROWWISE = [*_FP8, "--quantize.linear.float8.recipe_name=rowwise"]
_BF16 = ["--training.dtype=bfloat16"]
_LLAMA, _QWEN, _TINY = ("llama3_8b", "llama3"), ("qwen25_3b", "qwen3"), (TINY, "qwen3")
# fmt: off
VARIANTS: dict[str, Variant] = {
    "llama8b_compiled_by_document": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED]),
    "llama8b_compiled_by_document_16384": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED], length=16384),
    "llama8b_compiled_unsharded_by_document":  # between a micro batch's passes; ZeRO-2, in other words
        Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED, "--parallelism.fsdp_reshard_after_forward=never"]),
    "llama8b_compiled": Variant(*_LLAMA, "8B", [*_COMPILED, *_STORED]),
    "llama8b_default": Variant(*_LLAMA, "8B", _SELECTIVE),  # as its llama3_8b.toml says
    "llama8b_compiled_selective": Variant(*_LLAMA, "8B", [*_COMPILED, *_SELECTIVE], rows=2),
    "llama8b_compiled_selective_by_document": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_SELECTIVE], rows=2),
    "llama8b_fp8_tensorwise": Variant(*_LLAMA, "8B", [*_COMPILED, *_STORED, *_FP8_TENSORWISE]),
    "llama8b_fp8_rowwise": Variant(*_LLAMA, "8B", [*_COMPILED, *_STORED, *_FP8_ROWWISE]),
    "llama8b_fp8_tensorwise_by_document": Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED, *_FP8_TENSORWISE]),
    "llama8b_fp8_tensorwise_by_document_16384":
        Variant(*_LLAMA, "8B_varlen", [*_COMPILED, *_STORED, *_FP8_TENSORWISE], length=16384),
    "qwen3b_compiled_by_document_16384": Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_STORED], length=16384),
    "qwen3b_compiled_by_document": Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_STORED]),
    "qwen3b_compiled": Variant(*_QWEN, "2.5-3B", [*_COMPILED, *_STORED]),
    "qwen3b_compiled_selective_by_document":
        Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_SELECTIVE], rows=2),
    "qwen3b_compiled_selective_by_document_32768":  # tokens of a pass
        Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_SELECTIVE], rows=2, length=16384),
    "qwen3b_default": Variant(*_QWEN, "2.5-3B", _SELECTIVE),
    "qwen3b_compiled_bf16_by_document": Variant(*_QWEN, "2.5-3B_varlen", [*_COMPILED, *_STORED, *_BF16]),
    "tiny": Variant(*_TINY, TINY, _STORED, rows=2, length=512),
    "tiny_selective": Variant(*_TINY, TINY, _SELECTIVE, rows=2, length=512),
    "tiny_by_document": Variant(*_TINY, f"{TINY}_varlen", _STORED, rows=2, length=512),
    "tiny_compiled": Variant(*_TINY, TINY, [*_COMPILED, *_STORED], rows=2, length=512),
    "tiny_fp8": Variant(*_TINY, TINY, [*_STORED, *_FP8, "--quantize.linear.float8.emulate"], rows=2, length=512),
}
# fmt: on


def default_prefix(gpus: int) -> str:
    """An 8B model's fp32 weights and optimizer need the memory of several GPUs."""
    return "qwen3b_" if gpus == 1 else "llama8b_"


def words_of(variant: Variant, gpus: int, steps: int) -> list[str]:
    """What is typed after `torchtitan.train`, less folders."""
    tokens = TOKENS_PER_STEP if variant.model != TINY else 2 * variant.rows * variant.length
    return [
        f"--model.name={variant.name}",
        f"--model.flavor={variant.flavor}",
        "--experimental.custom_import=peer_torchtitan_models",
        "--training.dataset=c4_test",  # a folder of jsonl files with `text`
        f"--training.seq_len={variant.length}",
        f"--training.local_batch_size={variant.rows}",
        f"--training.global_batch_size={gpus * tokens // variant.length}",
        f"--training.steps={steps}",
        "--optimizer.lr=3e-5",
        "--lr_scheduler.warmup_steps=3",
        "--metrics.log_freq=1",
        "--metrics.disable_color_printing",
        "--comm.train_timeout_seconds=300",  # of 100: the second step may compile again, for any length of document
        *variant.words,
    ]


def attempt(name: str, corpus: Corpus, folder: Path, arguments: Any) -> Attempt:
    """Data and tokenizer written, and the command that reads them."""
    variant = VARIANTS[name]
    data, tokenizer = folder / "data" / variant.model, folder / "tokenizer" / variant.model
    if not data.exists():
        corpus.write_texts(data)
        corpus.write_tokenizer(tokenizer)
    words = [*words_of(variant, arguments.gpus, arguments.steps), *arguments.more]
    # As run_train.sh does, but for the port: several may run on one machine.
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.gpus}",
                "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local-ranks-filter=0", "--role=rank",
                "--tee=3", "-m", "torchtitan.train"]  # fmt: skip
    places = [f"--training.dataset_path={data}", f"--model.hf_assets_path={tokenizer}",
              f"--job.dump_folder={folder / 'runs' / name}"]  # fmt: skip
    caches = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_DATASETS_CACHE": str(folder / "cache"),
              "OMP_NUM_THREADS": "1"}  # fmt: skip
    environment = peer_environment(arguments.site, caches)
    line = {"peer": "torchtitan", "settings": words, "model": variant.model, "weights": "random",
            "gpus": arguments.gpus, "machine": versions_of(PACKAGES, environment)}  # fmt: skip
    return Attempt(name=name, command=[*launcher, *words, *places], environment=environment, line=line)


def measured(ended: Ended, corpus: Corpus, tokens_per_step: int) -> dict[str, Any]:
    """What its log says of each step."""
    steps = [found.groupdict() for found in map(_STEP.search, ended.text.splitlines()) if found]
    speeds = [float(step["tps"].replace(",", "")) for step in steps]
    line = {"steps": len(steps)} | medians(speeds)
    if not line["timed_steps"]:
        return line
    speed = line["tokens_per_second_per_gpu"]
    return line | {
        "mfu": corpus.mfu(speed),
        "mfu_it_logs": float(steps[-1]["mfu"]) / 100,  # attention over whole rows, half of it masked
        "seconds_per_step": round(tokens_per_step / speed, 4),
        "first_loss": float(steps[0]["loss"]),
        "last_loss": float(steps[-1]["loss"]),
        "memory_gib": max(float(step["gib"]) for step in steps),  # reserved
    }


def main() -> None:
    """Measure one variant after the other."""
    arguments = parse(__doc__, VARIANTS)
    arguments.only = arguments.only or [name for name in VARIANTS if name.startswith(default_prefix(arguments.gpus))]
    if any(VARIANTS[name].model != TINY for name in arguments.only):
        require_gpus(arguments.gpus)
    corpora = {model: Corpus(model, DOCUMENTS_PER_GPU * arguments.gpus) for model in ("llama3_8b", "qwen25_3b", TINY)}

    def read(made: Attempt, ended: Ended) -> dict[str, Any]:
        variant = VARIANTS[made.name]
        rows = [int(word.split("=")[1]) for word in made.command if "global_batch_size" in word][-1]
        return measured(ended, corpora[variant.model], rows * variant.length // arguments.gpus)

    with tempfile.TemporaryDirectory() as folder:
        attempts = (attempt(name, corpora[VARIANTS[name].model], Path(folder), arguments) for name in arguments.only)
        run_all(attempts, arguments.output / "peer_torchtitan.jsonl", arguments.timeout_s, read)


if __name__ == "__main__":
    main()
