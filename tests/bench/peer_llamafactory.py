"""The speed of LLaMA-Factory's supervised fine-tune on the documents of `gpu_runs.py`. One JSON line per variant.

    python tests/bench/peer_llamafactory.py --output DIR --site DIR [--only NAME ...] [--gpus 1] [--steps 25]

Needs llamafactory 0.9.5 and the transformers, trl, accelerate, peft and datasets it asks for, in `--site`. `default` is
what it does where the model, the data, bf16 and the length are said; the others are flags that make it faster. Full
fine-tune of Qwen2.5-3B, random weights: fp32 master weights and bf16 autocast (`pure_bf16`: bf16 weights and
optimizer). Real tokens are counted as its collator hands them over, without padding; the median after 10 steps.

It packs rows by itself: `packing` lets documents of a row see each other, `neat_packing` does not, by an N x N mask of
its own where flash-attn is not installed. Documents longer than a row are cut.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from gpu_queue import require_gpus
from peer_documents import DOCUMENTS_PER_GPU, TINY, Corpus
from peer_runs import WARM_UP_STEPS, Attempt, Ended, medians, parse, peer_environment, run_all, versions_of

PACKAGES = ("llamafactory", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "liger-kernel")
HERE = Path(__file__).parent
_FAST: dict[str, Any] = {"disable_gradient_checkpointing": True, "enable_liger_kernel": True,
                         "ddp_find_unused_parameters": False}  # fmt: skip
_ROWS_8192 = {"cutoff_len": 8192, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
_ROWS_4096 = {"cutoff_len": 4096, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "default_accumulated": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
    "neat_packing": _FAST | _ROWS_4096 | {"neat_packing": True},
    "packing": _FAST | _ROWS_8192 | {"packing": True},
    "packing_rows_16384": _FAST | _ROWS_8192 | {"packing": True, "cutoff_len": 16384, "gradient_accumulation_steps": 2},
    "packing_pure_bf16": _FAST | _ROWS_8192 | {"packing": True, "pure_bf16": True},
    "neat_packing_compiled": _FAST | _ROWS_4096 | {"neat_packing": True, "torch_compile": True},
}
DEFAULT = ("default", "neat_packing", "packing", "packing_pure_bf16")


def settings_of(variant: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What its YAML would say, less folders. `template: empty` adds nothing to a document."""
    return {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "template": "empty", "train_on_prompt": True,
        "dataset": "documents", "cutoff_len": 4096, "bf16": True, "learning_rate": 3e-5, "lr_scheduler_type": "cosine",
        "warmup_steps": 3, "max_steps": steps, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True,
    } | dict(variant)  # fmt: skip


def write_inputs(corpus: Corpus, folder: Path, environment: Mapping[str, str]) -> None:
    """Documents and their description, tokenizer and weights."""
    corpus.write_pairs(folder / "data")
    described = {"documents": {"file_name": "documents.jsonl"}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(described), encoding="utf-8")
    facts = corpus.facts
    config = {
        "model_type": "qwen2", "hidden_size": facts.hidden_size, "intermediate_size": facts.intermediate_size,
        "num_hidden_layers": facts.num_layers, "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads, "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings, "tie_word_embeddings": facts.tie_word_embeddings,
        "eos_token_id": corpus.eos_id, "pad_token_id": corpus.padding_id,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, str(HERE / "peer_llamafactory_run.py"), "weights", str(folder / "config.json")]
    subprocess.run([*command, str(folder / "model")], env=environment, check=True)
    corpus.write_tokenizer(folder / "model")


def attempt(name: str, corpus: Corpus, folder: Path, arguments: Any, environment: dict[str, str]) -> Attempt:
    """Its settings written, and the command that reads them."""
    settings = settings_of(VARIANTS[name], arguments.steps)
    settings |= {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in arguments.more)}
    places = {"model_name_or_path": str(folder / "model"), "dataset_dir": str(folder / "data"),
              "output_dir": str(folder / "runs" / name)}  # fmt: skip
    file = folder / f"{name}.json"
    file.write_text(json.dumps(settings | places), encoding="utf-8")
    # As `llamafactory-cli train` does: one process per GPU.
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.gpus}",
               "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(HERE / "peer_llamafactory_run.py"), str(file),
               str(folder / f"{name}.measured.json"), str(corpus.padding_id)]  # fmt: skip
    line = {"peer": "llamafactory", "settings": settings, "model": corpus.model, "weights": "random",
            "gpus": arguments.gpus, "machine": versions_of(PACKAGES, environment)}  # fmt: skip
    return Attempt(name=name, command=command, environment=environment, line=line)


def measured(file: Path, corpus: Corpus) -> dict[str, Any]:
    """What the meter has written."""
    if not file.exists():
        return {"steps": 0, "timed_steps": 0}
    found = json.loads(file.read_text(encoding="utf-8"))
    line = {"steps": len(found["speeds"])} | medians(found["speeds"])
    if not line["timed_steps"]:
        return line
    seconds = sorted(found["seconds"][WARM_UP_STEPS:])
    kept = ("memory_gib", "hardware", "weights_dtype", "attention", "rows_per_step")
    return line | {
        "mfu": corpus.mfu(line["tokens_per_second_per_gpu"]),
        "seconds_per_step": round(seconds[len(seconds) // 2], 4),
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
    } | {key: found[key] for key in kept}  # fmt: skip


def main() -> None:
    """Measure one variant after the other. `tiny` among the names: on a small model, to try this file on a CPU."""
    arguments = parse(__doc__, [*VARIANTS, TINY])
    if TINY not in arguments.only:
        require_gpus(arguments.gpus)
    corpus = Corpus(TINY if TINY in arguments.only else "qwen25_3b", DOCUMENTS_PER_GPU * arguments.gpus)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The setting of its launcher for several GPUs.
        shared = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1",
                  "HF_DATASETS_CACHE": str(folder / "cache")}  # fmt: skip
        environment = peer_environment(arguments.site, shared)
        write_inputs(corpus, folder, environment)
        names = [name for name in arguments.only if name != TINY] or DEFAULT
        attempts = (attempt(name, corpus, folder, arguments, environment) for name in names)

        def read(made: Attempt, ended: Ended) -> dict[str, Any]:
            return measured(folder / f"{made.name}.measured.json", corpus)

        run_all(attempts, arguments.output / "peer_llamafactory.jsonl", arguments.timeout_s, read)


if __name__ == "__main__":
    main()
