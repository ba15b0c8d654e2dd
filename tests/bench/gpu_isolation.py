"""What the leak probe measures: by how much the logits of a packed document move when the other one in its row changes.

    python tests/bench/gpu_isolation.py --output DIR [--only NAME ...] [--deadline-s 500] [--list]
    python tests/bench/gpu_isolation.py --output DIR --small

Isolated documents should not move at all in rows of one shape; the bound in `train/isolation.py` is set by what is
measured here. The first form trains one step of published sizes (cut to some layers, random weights, generated
documents) with each attention kernel and number format on one GPU, and takes what the run itself recorded. The second
looks at small models of every architecture that isolates or leaks, on this machine's CPU. A line of JSON for each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_architectures import BASE, MODELS, config_of
from gpu_queue import Job, add_arguments, run_jobs

LENGTHS = [
    "training.max_steps=1", "training.max_length=512", "packing.row_length=1024", "training.global_samples=8",
    "dataset.synthetic.min_tokens=64", "dataset.synthetic.max_tokens=256", "dataset.synthetic.num_documents=64",
    "hardware.gpus_per_node=1",
]  # fmt: skip
PLAIN = ["model.compile_layers=false", "activation=stored"]
KERNELS = {
    name: [f"attention={name}", *PLAIN]
    for name in ("sdpa", "eager", "flex_attention", "varlen_attention", "varlen_attention_4", "sdpa_by_document")
} | {"compiled": ["attention=varlen_attention", "model.compile_layers=true", "activation=stored"]}
FORMATS = {
    "bf16": ["precision=bf16"],
    "fp16": ["precision=fp16"],
    "fp32": ["precision=fp32", "precision.tf32=disabled"],
    "tf32": ["precision=fp32", "precision.tf32=enabled"],
}
MORE = {
    "fsdp": ["parallelism=fsdp"],
    "zero2": ["parallelism=zero2"],
    "zero3": ["parallelism=zero3"],
    "liger": ["model.liger_kernel=true"],
    "lora": ["peft=lora"],
    "bf16_weights": ["precision.master_weights=bf16"],
}
# Experts and words make a model large, and a run slow to save: fewer of them are dispatched in the same way.
FEWER: dict[str, dict[str, int]] = {
    "qwen3_moe": {"num_experts": 64, "vocab_size": 32_768},
    "gpt_oss": {"num_local_experts": 16, "vocab_size": 32_768},
    "gemma3_text": {"vocab_size": 32_768},
}
# Of each model: kernel and format.
RUNS: dict[str, list[tuple[str, str]]] = {
    "qwen3": [
        *((kernel, "bf16") for kernel in KERNELS if kernel != "sdpa_by_document"),
        ("sdpa", "fp16"), ("varlen_attention", "fp16"), ("sdpa", "fp32"), ("sdpa", "tf32"), ("eager", "fp32"),
        ("sdpa_by_document", "fp32"), ("sdpa_by_document", "tf32"),
    ],
    "mistral": [("sdpa", "bf16"), ("varlen_attention", "bf16"), ("compiled", "bf16"), ("sdpa", "tf32")],
    "gemma3_text": [("sdpa", "bf16"), ("varlen_attention", "bf16"), ("eager", "bf16"), ("sdpa", "fp32")],
    "gpt_neox": [("sdpa", "bf16"), ("varlen_attention", "bf16"), ("compiled", "bf16")],
    "qwen3_moe": [
        ("sdpa", "bf16"), ("varlen_attention", "bf16"), ("compiled", "bf16"), ("eager", "bf16"), ("sdpa", "fp32"),
        ("sdpa", "tf32"), ("sdpa", "fp16"),
    ],
    "gpt_oss": [("eager", "bf16"), ("flex_attention", "bf16")],
}  # fmt: skip


def jobs_of(names: list[str], folder: Path) -> list[Job]:
    """One step of each model in each way."""
    own_keys = {word.partition("=")[0] for word in LENGTHS}
    shared = [*(word for word in BASE if word.partition("=")[0] not in own_keys), *LENGTHS]
    jobs: list[Job] = []
    for kind in names:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / "config.json").write_text(json.dumps(config_of(kind) | FEWER.get(kind, {})))
        ways = {f"{kernel}_{form}": [*KERNELS[kernel], *FORMATS[form]] for kernel, form in RUNS[kind]}
        if kind == "qwen3":
            ways |= {way: [*KERNELS["varlen_attention"], *FORMATS["bf16"], *words] for way, words in MORE.items()}
        for way, words in ways.items():
            overrides = [*shared, *words]
            line = {
                "kind": kind, "way": way, "model": MODELS[kind][0], "overrides": overrides, "weights": "random",
                "data": "generated documents of 64 to 256 tokens",
            }  # fmt: skip
            name, typed = f"{kind}_{way}", [*overrides, f"model.path={folder / kind}"]
            jobs.append(Job(name=name, gpus=(0,), words=typed, line=line, is_alone=False, turn_timeout_s=150))
    return jobs


def measure_small(output: Path) -> None:
    """Small models of every architecture that the rules know, in fp32 and under autocast to bf16, eager attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunebook.facts.architectures import LEAKING_ARCHITECTURES, LEAKING_THROUGH_MASKS, VARLEN_ARCHITECTURES
    from tunebook.train.isolation import LENGTHS as PROBED
    from tunebook.train.isolation import measure_isolation

    small = _small_models()

    class Eager:
        """The model over one row, its documents told apart by their positions."""

        def __init__(self, model: Any, is_bf16: bool) -> None:
            self.model, self.is_bf16 = model, is_bf16

        def logits(self, documents: list[list[int]]) -> torch.Tensor:
            ids = torch.tensor([token for document in documents for token in document])[None]
            positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.is_bf16):
                found: torch.Tensor = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            return found.float()

        def loss(self, documents: list[list[int]]) -> tuple[float, int]:
            return 1.0, sum(map(len, documents)) - len(documents)  # not asked about here

    experts = {"MixtralForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM"}
    kinds = {"isolates": VARLEN_ARCHITECTURES | experts, "leaks": LEAKING_ARCHITECTURES | LEAKING_THROUGH_MASKS}
    for known, architectures in kinds.items():
        for architecture in sorted(architectures):
            sizes = small.SMALL | small.MORE.get(architecture, {})
            sizes.pop(small.WORKED_OUT.get(architecture), None)
            config = AutoConfig.for_model(small.KINDS[architecture], **sizes)
            for form in ("fp32", "bf16"):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(
                    config, attn_implementation="eager", dtype=torch.float32
                ).eval()
                found = measure_isolation(Eager(model, form == "bf16"), 120, PROBED)
                line = {
                    "architecture": architecture, "known": known, "format": form, "kernel": "eager", "device": "cpu",
                    "moved": found.moved, "alone": found.alone, "leaking": found.leaking, "weights": "random",
                    "torch": torch.__version__,
                }  # fmt: skip
                print(json.dumps(line), flush=True)
                with (output / "small.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def _small_models() -> ModuleType:
    """The sizes that the test of leaking architectures has."""
    file = Path(__file__).resolve().parents[1] / "model" / "test_leaking_architectures.py"
    spec = importlib.util.spec_from_file_location("small_models", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, deadline_s=500)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--configs", type=Path, default=Path("/tmp/configs"), help="where config.json files are written"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.small:
        warnings.simplefilter("ignore")  # of architectures, about sizes that no published model has
        measure_small(arguments.output)
    else:
        run_jobs(jobs_of(arguments.only, arguments.configs), arguments)


if __name__ == "__main__":
    main()
