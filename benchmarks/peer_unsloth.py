"""The speed of Unsloth on one GPU, by TRL's SFTTrainer as its notebooks use it. One JSON line per variant.

    python benchmarks/peer_unsloth.py --output FILE --python-path SITE [--only NAME ...] [--steps 30]

SITE has unsloth with its own versions of trl, datasets and bitsandbytes. Weights are random, adapters of rank 16 are on
all linear layers. Rows of 8,192 tokens hold documents of 512 tokens, or short ones (250 tokens on average); 32,768
tokens a step. `stored` recomputes nothing. `checkpointing` is Unsloth's own, which keeps inputs in the host's memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpu_queue import require_gpus
from lines import add_line
from peer_documents import EQUAL, SHORT, TINY, folders_of, peer_parser
from peer_trl import PAIRS, PAIRS_A_STEP, Variant, measure, write_weights

MODELS = Path("/tmp/peer_models")
_ROWS = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
_MODES = {
    "stored": {"use_gradient_checkpointing": False},
    "checkpointing": {"use_gradient_checkpointing": "unsloth"},
    "4bit": {"use_gradient_checkpointing": "unsloth", "load_in_4bit": True},
}
VARIANTS: dict[str, Variant] = {
    f"{model}_{mode}{suffix}": Variant(
        model=model, length=8192, documents=documents, lengths=lengths, weights="bfloat16", rank=16, settings=_ROWS,
        unsloth=options,
    )
    for model in ("llama31_8b", "qwen3_4b", "qwen25_7b")
    for suffix, lengths, documents in (("", EQUAL, 4000), ("_short", SHORT, 8000))
    for mode, options in _MODES.items()
}  # fmt: skip
VARIANTS["llama31_8b_dpo"] = Variant(
    **PAIRS, model="llama31_8b", weights="bfloat16", rank=16, settings=PAIRS_A_STEP, unsloth=_MODES["checkpointing"]
)
VARIANTS["tiny"] = Variant(
    model=TINY, length=512, documents=200, weights="bfloat16", rank=4, settings=_ROWS, unsloth=_MODES["stored"]
)


def main(words: list[str] | None = None) -> int:
    """Measure one variant after the other; 1 if one failed."""
    parser = peer_parser(__doc__, VARIANTS)
    parser.add_argument("--models", type=Path, default=MODELS, help="16 GB of weights each")
    asked = parser.parse_args(words)
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(asked.output.parent / "unsloth_compiled_cache")
    names = asked.only or [name for name in VARIANTS if name.startswith("llama31_8b") and not name.endswith("_short")]
    if names != ["tiny"]:
        require_gpus(1)
    lines = []
    for name in names:
        variant, log = VARIANTS[name], asked.output.parent / f"unsloth-{name}.txt"
        weights = asked.models / variant.model
        write_weights(variant.model, weights, log, folders_of(asked.python_path))
        line = measure("unsloth", name, variant, asked, weights)
        apart = "Unsloth: Packing enabled" in log.read_text(errors="replace")
        lines.append(line | {"keeps_documents_apart": apart})
        add_line(lines[-1], asked.output)
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
