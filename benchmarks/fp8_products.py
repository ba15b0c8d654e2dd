"""Speed and losses of a full fine-tune in fp8, by ways to compute its products, on one GPU. One JSON line for each.

    PYTHONPATH=src python benchmarks/fp8_products.py --output FILE [--only NAME ...] [--layers 8] [--row-length 8192]

The first layers of Llama 3.1 8B with random weights in fp32, documents of 512 tokens, 4 rows a step, nothing
recomputed; without `tunebook train`. `torchao` is what `precision=fp8` does. `fast` products sum in fewer bits than
fp32, as those of frozen layers do. `own` products have a scale for each token and feature, but for the weight's
gradient, which sums over tokens: one for the tensor (`own`), one for each feature (`own_by_feature`), or bf16
(`own_16_bit`). `--profile NAME` writes a table of the kernels of one step. On a CPU: `--layers 1 --hidden-size 512
--row-length 64`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from lines import add_line, surroundings


@dataclass(frozen=True)
class Variant:
    """How the products of trained layers are computed."""

    by: str | None  # torchao or own; None for bf16
    fast: frozenset[str] = frozenset()  # torchao's gradients that sum in fewer bits
    weight_gradient: str = "tensor"  # of own products: tensor, feature or 16_bit


VARIANTS = {
    "bf16": Variant(None),
    "torchao": Variant("torchao"),
    "torchao_fast_input": Variant("torchao", frozenset({"grad_input"})),
    "torchao_fast": Variant("torchao", frozenset({"grad_input", "grad_weight"})),
    "own": Variant("own"),
    "own_by_feature": Variant("own", weight_gradient="feature"),
    "own_16_bit": Variant("own", weight_gradient="16_bit"),
}


def main(words: list[str] | None = None) -> int:
    """Measure one variant after the other; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--row-length", type=int, default=8192, help="in tokens")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", choices=VARIANTS, metavar="NAME", help="write a table of its kernels")
    asked = parser.parse_args(words)
    from fp8_variants import measure  # which imports torch

    asked.output.parent.mkdir(parents=True, exist_ok=True)
    common = {"layers": asked.layers, "row_length": asked.row_length, **surroundings()}
    failed = 0
    for name in asked.only:
        try:
            line = measure(name, VARIANTS[name], asked)
        except Exception as error:  # the other variants may run
            line, failed = {"error": f"{type(error).__name__}: {error}"[:1000]}, 1
        add_line({"name": name} | line | common, asked.output)
    return failed


if __name__ == "__main__":
    sys.exit(main())
