"""The speed of axolotl's supervised fine-tune on the documents of `gpu_speed.py`. One JSON line per variant.

    python tests/bench/peer_axolotl.py --output DIR --site DIR [--only NAME ...] [--gpus 1] [--steps 25]

Needs axolotl 0.19.0, the newest that allows torch 2.11, and what it imports, in `--site`. `default` is what it does
where the model, the data, the length and the batch that it requires are said; the others are flags that make it faster.
Full fine-tune of Qwen2.5-3B, random weights that its `bf16: true` loads and trains in bf16, without an fp32 copy. Real
tokens are counted as the model gets them, without padding; the median after 10 steps. Its packing isolates documents on
`sdpa` by a block mask, and with `sdpa_varlen` by torch's varlen kernels. Documents longer than a row are left out.
It was tried on a CPU; no GPU has measured it yet.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from peer_documents import Corpus
from peer_llamafactory import run_variants
from peer_runs import Attempt, versions_of

PACKAGES = ("axolotl", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "liger-kernel")
_PACKED: dict[str, Any] = {"sample_packing": True, "pad_to_sequence_len": True, "attn_implementation": "sdpa",
                           "sequence_len": 8192, "gradient_accumulation_steps": 4}  # fmt: skip
_LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True, "liger_rms_norm": True,
          "liger_glu_activation": True, "liger_fused_linear_cross_entropy": True}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "packed_sdpa": _PACKED | _LIGER | {"sequence_len": 4096, "gradient_accumulation_steps": 8},
    "packed_varlen": _PACKED | _LIGER | {"sdpa_varlen": True},
    "packed_varlen_compiled": _PACKED | {"sdpa_varlen": True, "torch_compile": True},
}
DEFAULT = ("default", "packed_sdpa", "packed_varlen")


def settings_of(variant: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What its YAML would say, less folders. `completion` adds nothing to a text but EOS."""
    settings: dict[str, Any] = {
        "sequence_len": 4096, "bf16": True, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
        "learning_rate": 3e-5, "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "warmup_steps": 3,
        "max_steps": steps, "logging_steps": 1, "save_strategy": "no", "val_set_size": 0.0,
    } | dict(variant)  # fmt: skip
    return settings | {"plugins": [*settings.get("plugins", []), "peer_axolotl_plugin.MeterPlugin"]}


def attempt(name: str, corpus: Corpus, folder: Path, arguments: Any, environment: dict[str, str]) -> Attempt:
    """Its settings written, and the command that reads them."""
    settings = settings_of(VARIANTS[name], arguments.steps)
    settings |= {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in arguments.more)}
    places = {
        "base_model": str(folder / "model"),
        "datasets": [{"path": str(folder / "texts" / "documents.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(folder / "prepared" / name),
        "output_dir": str(folder / "runs" / name),
    }
    if not (folder / "texts").exists():
        corpus.write_texts(folder / "texts")
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings | places), encoding="utf-8")
    # As `axolotl train --launcher torchrun` does.
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={arguments.gpus}",
               "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "axolotl.cli.train", str(file)]  # fmt: skip
    line = {"peer": "axolotl", "settings": settings, "model": corpus.model, "weights": "random",
            "gpus": arguments.gpus, "machine": versions_of(PACKAGES, environment)}  # fmt: skip
    told = {"PEER_MEASURED": str(folder / f"{name}.measured.json"), "PEER_PADDING_ID": str(corpus.padding_id)}
    return Attempt(name=name, command=command, environment=environment | told, line=line)


if __name__ == "__main__":
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
    run_variants(__doc__, "axolotl", VARIANTS, DEFAULT, attempt, quiet)
