"""The speed of NeMo AutoModel's adapters on one GPU, as its published configuration measures it. One JSON line.

    python benchmarks/peer_automodel.py --output FILE --python-path SITE [--steps 8] [--warm-up-steps 4]

Its benchmark recipe with the settings of llama3_1_8b_peft_benchmark.yaml: Llama 3.1 8B, adapters of rank 16 on all
linear layers with a dropout of 0.1, 2 rows of 4,096 random tokens, 16 times a step, whole rows as one document. Weights
are random and read from a folder: to draw them as the settings say took it more than 200 s. SITE has nemo-automodel
0.7.0 with megatron-fsdp 0.5.0, flashoptim, torchdata, torchao and transformers 5.18.0.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from gpu_queue import require_gpus
from lines import Line, add_line, surroundings
from peer_documents import TINY, folders_of, last_words, median_speed, peer_parser, run_peer
from peer_trl import write_weights
from peer_unsloth import MODELS as WEIGHTS

_ITERATION = re.compile(r"Iteration \d+ \| num_label_tokens=\d+ \| Max Memory Allocated: ([\d.]+) GB \| loss=([-\d.]+)")
_SECONDS = re.compile(r"Max iter time: ([\d.]+) seconds")
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
MODELS = {"llama31_8b": 4096, "qwen25_7b": 4096, TINY: 64}  # tokens of a row
ROWS = 32  # a step
_START = """
from turns import end_steps_with, wait_for_gpus
wait_for_gpus()
from nemo_automodel.recipes.llm import benchmark
end_steps_with(benchmark.BenchmarkingRecipeForNextTokenPrediction, "_log_iteration_metrics")
benchmark.main()
"""


def configuration(folder: Path, weights: Path, model: str, steps: int, warm_up_steps: int) -> Line:
    """What its YAML file says, with the weights of a folder."""
    package = "nemo_automodel"
    return {
        "seed": 42,
        "benchmark": {"warmup_steps": warm_up_steps, "peak_tflops": 989, "nsys_start": -1, "nsys_end": -1,
                      "nsys_ranks": [], "num_nodes": 1},
        "step_scheduler": {"global_batch_size": ROWS, "local_batch_size": 2, "ckpt_every_steps": 1000,
                           "val_every_steps": 1000, "max_steps": steps},
        "dist_env": {"backend": "nccl", "timeout_minutes": 1},
        "rng": {"_target_": f"{package}.components.training.rng.StatefulRNG", "seed": 42, "ranked": True},
        "model": {
            "_target_": f"{package}.NeMoAutoModelForCausalLM.from_pretrained", "force_hf": True,
            "pretrained_model_name_or_path": str(weights),
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": str(folder / "checkpoints")},
        "peft": {"_target_": f"{package}.components._peft.lora.PeftConfig", "match_all_linear": True, "dim": 16,
                 "alpha": 32, "dropout": 0.1, "use_triton": model != TINY},
        "distributed": {"strategy": "fsdp2", "dp_size": "none", "tp_size": 1, "cp_size": 1,
                        "sequence_parallel": False},
        "loss_fn": {"_target_": f"{package}.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": f"{package}.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
                    "vocab_size": 100, "seq_len": MODELS[model], "num_samples": 1_000_000, "batch_size": 2},
        "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
        "optimizer": {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.999], "eps": 1e-8, "lr": 1e-5,
                      "weight_decay": 0.01},
    }  # fmt: skip


def measure(model: str, asked: argparse.Namespace) -> Line:
    """Train, and read the log."""
    log = asked.output.parent / f"automodel-{model}.txt"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        weights = asked.models / model
        write_weights(model, weights, log, folders_of())
        file = folder / "benchmark.yaml"
        file.write_text(json.dumps(configuration(folder, weights, model, asked.steps, asked.warm_up_steps)))
        (folder / "wandb.py").write_text("run = None  # the recipe imports it, also where it is not to report there\n")
        command = [sys.executable, "-c", _START, "--config", str(file)]
        started = time.time()
        exit_code = run_peer(command, log, asked.timeout_s, [*folders_of(asked.python_path), place])
    line = {"name": model, "peer": "automodel", "model": model, "weights": "random", "rank": 16, "exit_code": exit_code,
            "settings": f"2 rows of {MODELS[model]}, {ROWS} a step"}  # fmt: skip
    packages = ("nemo_automodel", "torch", "torchao", "transformers", "triton", "liger_kernel")
    return line | read_log(log, ROWS * MODELS[model], started, asked.warm_up_steps) | surroundings(
        packages, folders_of(asked.python_path)
    )  # fmt: skip


def read_log(log: Path, tokens_per_step: int, started: float, warm_up_steps: int) -> Line:
    """What its log says of each step."""
    text = log.read_text(errors="replace")
    steps = _ITERATION.findall(text)
    line = median_speed([tokens_per_step / float(seconds) for seconds in _SECONDS.findall(text)], warm_up_steps)
    if not line["timed_steps"]:
        return line | {"error": last_words(log)}
    first = next(row for row in text.splitlines() if _ITERATION.search(row))
    written = _TIME.search(first)
    ended = datetime.strptime(written[0], "%Y-%m-%d %H:%M:%S").timestamp() if written else None
    return line | {
        "first_step_s": round(ended - started, 1) if ended else None,
        "losses": [float(loss) for _, loss in steps],
        "memory_gib": max(float(gib) for gib, _ in steps),
    }


def main(words: list[str] | None = None) -> int:
    """Measure; 1 if it failed."""
    parser = peer_parser(__doc__, MODELS)
    parser.add_argument("--models", type=Path, default=WEIGHTS, help="where weights are written")
    asked = parser.parse_args(words)
    names = asked.only or ["llama31_8b"]
    if names != [TINY]:
        require_gpus(1)
    lines = []
    for name in names:
        lines.append(measure(name, asked))
        add_line(lines[-1], asked.output)
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
