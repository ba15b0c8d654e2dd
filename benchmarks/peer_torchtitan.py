"""The speed of torchtitan on the documents that Tunebook's speed is measured on. One JSON line per variant.

    python benchmarks/peer_torchtitan.py --output FILE --python-path SITE [--only NAME ...] [--gpus 4] [--steps 25]

SITE has torchtitan 0.3.0 with torchdata 0.11.0, torch_checkpointing 0.1.1, spmd_types 0.2.3, tyro and datasets < 4.8.
Its own trainer, started as its run_train.sh starts it; see `peer_torchtitan_models.py` for its configurations. Its text
data set lays documents end to end and cuts the stream into rows: no token is padding. Flex attention keeps documents
apart. Weights and optimizer are fp32, computed in bf16; with adapters all is bf16, and documents have 512 tokens.
32,768 tokens a GPU and optimizer step; the speed is what it logs (tps), the median after the first 10 steps. The first
step compiled for three minutes on an H200. Its CUDA graphs refuse rows of 16,384 tokens, since the masks of their
documents differ from step to step.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from gpu_queue import require_gpus
from lines import Line, add_line, surroundings
from peer_documents import (
    DOCUMENTS_PER_GPU,
    EQUAL,
    TINY,
    TOKENS_PER_STEP,
    Corpus,
    folders_of,
    last_words,
    median_speed,
    peer_parser,
    run_peer,
)

from tunebook.config.schema import SyntheticConfig

_STEP = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ - .*step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>[-\d.a-z]+)\s+"
    r"grad_norm:\s*[-\d.a-z]+\s+memory:\s*(?P<gib>[-\d.]+)GiB.*?tps:\s*(?P<tps>[\d,]+)\s"
)
_START = "from peer_torchtitan_start import main; main()"


@dataclass(frozen=True)
class Variant:
    """A configuration of `peer_torchtitan_models` and its rows."""

    model: str  # ours
    config: str
    rows: int = 1  # of a micro batch
    length: int = 8192  # of a row
    words: list[str] = field(default_factory=list)


_WITHOUT_GRAPHS = ["--training.disable_cuda_graphs"]
_LLAMA, _QWEN = "llama31_8b", "qwen25_3b"
VARIANTS: dict[str, Variant] = {
    "qwen3b_compiled_16384": Variant(_QWEN, "qwen3b_compiled", length=16384, words=_WITHOUT_GRAPHS),
    "qwen3b_compiled": Variant(_QWEN, "qwen3b_compiled"),
    "qwen3b_compiled_without_graphs": Variant(_QWEN, "qwen3b_compiled", words=_WITHOUT_GRAPHS),
    "qwen3b_compiled_selective": Variant(_QWEN, "qwen3b_compiled_selective", rows=2),
    "qwen3b_default": Variant(_QWEN, "qwen3b_default"),
    "llama8b_lora": Variant(_LLAMA, "llama8b_lora"),
    "llama8b_lora_without_graphs": Variant(_LLAMA, "llama8b_lora", words=_WITHOUT_GRAPHS),
    "llama8b_lora_budget": Variant(_LLAMA, "llama8b_lora_budget"),
    "llama8b_lora_recomputed": Variant(_LLAMA, "llama8b_lora_recomputed"),
    "llama8b_lora_fp8": Variant(_LLAMA, "llama8b_lora_fp8"),
    "llama8b_default": Variant(_LLAMA, "llama8b_default"),
    "llama8b_compiled": Variant(_LLAMA, "llama8b_compiled"),
    "llama8b_compiled_16384": Variant(_LLAMA, "llama8b_compiled", length=16384),
    "llama8b_compiled_selective": Variant(_LLAMA, "llama8b_compiled_selective", rows=2),
    "llama8b_fp8": Variant(_LLAMA, "llama8b_fp8"),
    "llama8b_fp8_16384": Variant(_LLAMA, "llama8b_fp8", length=16384),
    "tiny": Variant(TINY, "tiny", length=512, words=_WITHOUT_GRAPHS),
    "tiny_lora": Variant(TINY, "tiny_lora", length=512, words=_WITHOUT_GRAPHS),
}


def words_of(variant: Variant, gpus: int, steps: int) -> list[str]:
    """What is typed after `torchtitan.train`, less folders."""
    return [
        "--module=peer_torchtitan_models",
        f"--config={variant.config}",
        f"--training.seq_len={variant.length}",
        f"--training.local_batch_size={variant.rows}",
        f"--training.global_batch_size={gpus * _tokens(variant) // variant.length}",
        f"--training.steps={steps}",
        "--comm.train_timeout_seconds=300",  # of 100: the second step may compile again, for any length of document
        *variant.words,
    ]


def _tokens(variant: Variant) -> int:
    return 2 * variant.length if variant.model == TINY else TOKENS_PER_STEP


def measure(name: str, folder: Path, asked: argparse.Namespace) -> Line:
    """Write data and tokenizer, train, and read the log."""
    variant = VARIANTS[name]
    has_adapters = "lora" in variant.config
    corpus = Corpus(variant.model, DOCUMENTS_PER_GPU * asked.gpus, EQUAL if has_adapters else SyntheticConfig())
    place = folder / variant.model / ("adapters" if has_adapters else "whole")
    data, tokenizer = place / "data", place / "tokenizer"
    if not data.exists():
        corpus.write_texts(data)
        corpus.write_tokenizer(tokenizer)
    words = words_of(variant, asked.gpus, asked.steps)
    # As run_train.sh does, but for the port: several may run on one machine.
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={asked.gpus}", "--rdzv_backend=c10d",
               "--rdzv_endpoint=localhost:0", "--local-ranks-filter=0", "--role=rank", "--tee=3", "--no-python",
               sys.executable, "-c", _START, *words, f"--dataloader.dataset_path={data}",
               f"--hf_assets_path={tokenizer}", f"--dump_folder={folder / 'runs' / name}"]  # fmt: skip
    log, started = asked.output.parent / f"torchtitan-{name}.txt", time.time()
    exit_code = run_peer(
        command, log, asked.timeout_s, folders_of(asked.python_path), HF_DATASETS_CACHE=str(folder / "cache"),
        PYTORCH_ALLOC_CONF="expandable_segments:True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    line = {"name": name, "peer": "torchtitan", "model": variant.model, "weights": "random", "gpus": asked.gpus,
            "settings": words, "exit_code": exit_code}  # fmt: skip
    line |= read_log(log, variant, corpus, started, asked.warm_up_steps)
    return line | surroundings(("torchtitan", "torch", "torchao", "triton"), folders_of(asked.python_path))


def read_log(log: Path, variant: Variant, corpus: Corpus, started: float, warm_up_steps: int) -> Line:
    """What its log says of each step."""
    text = log.read_text(errors="replace")
    steps = [found.groupdict() for found in map(_STEP.search, text.splitlines()) if found]
    line = median_speed([float(step["tps"].replace(",", "")) for step in steps], warm_up_steps)
    if not line["timed_steps"]:
        return line | {"error": last_words(log)}
    speed = line["tokens_per_second_per_gpu"]
    first_step = datetime.strptime(steps[0]["time"], "%Y-%m-%d %H:%M:%S").timestamp()
    return line | {
        "mfu": None if "lora" in variant.config else corpus.mfu(speed),
        "seconds_per_step": round(_tokens(variant) / speed, 4),
        "first_step_s": round(first_step - started, 1),
        "losses": [float(step["loss"]) for step in steps],
        "memory_reserved_gib": max(float(step["gib"]) for step in steps),
    }


def main(words: list[str] | None = None) -> int:
    """Measure one variant after the other; 1 if one failed."""
    parser = peer_parser(__doc__, VARIANTS)
    parser.add_argument("--gpus", type=int, default=1)
    asked = parser.parse_args(words)
    names = asked.only or [name for name in VARIANTS if name.startswith("qwen3b_" if asked.gpus == 1 else "llama8b_")]
    if not all(name.startswith("tiny") for name in names):
        require_gpus(asked.gpus)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            lines.append(measure(name, Path(folder), asked))
            add_line(lines[-1], asked.output)
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
