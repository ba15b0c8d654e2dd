"""How fast one GPU multiplies the matrices that a model's layers are made of, and what holds it back.

    python tests/bench/gpu_products.py --output FILE [--model qwen25_3b] [--rows 16384] [--ways cublas ...]

Each linear layer of a block gives three products: forward, of the gradient of its input, and of that of its weights.
Each is timed by itself for a while, in bf16 with fp32 sums, in several ways: by cuBLAS as torch calls it, by torch's
cuBLASLt, by the fastest Triton kernel that torch's own search finds; and by cuBLAS with zeros, which flip no bits
and so draw little power. A line of JSON for each says teraFLOP/s, and the clock and the power while it ran: where zeros
are faster at a higher clock, power is the limit, and no other kernel is much faster.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_queue import require_gpus
from gpu_recipes import facts_of

WAYS = ("cublas", "cublaslt", "triton", "zeros")
SPREAD = 0.02  # of weights; activations and gradients have one of 1


@dataclass(frozen=True, kw_only=True)
class Product:
    """`rows` x `inner` times `inner` x `columns`; what is transposed is so in memory."""

    name: str
    rows: int
    inner: int
    columns: int
    transposes: tuple[bool, bool]
    times: int  # in a block

    @property
    def flops(self) -> int:
        """Of one of them."""
        return 2 * self.rows * self.inner * self.columns


def products_of(facts: dict[str, Any], rows: int) -> Iterator[Product]:
    """Those of a block that passes `rows` tokens, forward and backward."""
    hidden, inner = facts["hidden_size"], facts["intermediate_size"]
    head = facts.get("head_dim") or hidden // facts["num_attention_heads"]
    queries, keys = facts["num_attention_heads"] * head, facts["num_key_value_heads"] * head
    layers = {
        "q_o": (hidden, queries, 2), "k_v": (hidden, keys, 2), "gate_up": (hidden, inner, 2), "down": (inner, hidden, 1)
    }  # fmt: skip
    for name, (into, out, times) in layers.items():
        shared = {"times": times}
        yield Product(name=f"{name}_forward", rows=rows, inner=into, columns=out, transposes=(False, True), **shared)
        yield Product(name=f"{name}_input", rows=rows, inner=out, columns=into, transposes=(False, False), **shared)
        yield Product(name=f"{name}_weight", rows=out, inner=rows, columns=into, transposes=(True, False), **shared)


def operands(product: Product, *, zeros: bool) -> tuple[Any, Any]:
    """The two matrices, laid out in memory as a linear layer has them."""
    import torch

    found = []
    sizes = [(product.rows, product.inner), (product.inner, product.columns)]
    for (rows, columns), transposed in zip(sizes, product.transposes, strict=True):
        shape = (columns, rows) if transposed else (rows, columns)
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * (0 if zeros else 1)
        found.append(values.t() if transposed else values)
    if not product.name.endswith("_weight"):
        found[1].mul_(SPREAD)
    return found[0], found[1]


def multiplier(way: str) -> Callable[[Any, Any], Any]:
    """The function that multiplies in this way."""
    import torch

    torch.backends.cuda.preferred_blas_library("cublaslt" if way == "cublaslt" else "cublas")
    if way != "triton":
        return torch.mm
    import torch._inductor.config as inductor

    inductor.max_autotune_gemm = True
    inductor.max_autotune_gemm_backends = "TRITON"
    inductor.max_autotune_gemm_search_space = "DEFAULT"
    inductor.triton.enable_persistent_tma_matmul = True
    torch._dynamo.reset()
    return torch.compile(torch.mm, dynamic=False)


def timed(multiply: Callable[[Any, Any], Any], left: Any, right: Any, seconds: float) -> dict[str, float]:
    """Milliseconds of one product among many in a row, and the GPU's clock and power towards the end of them."""
    import pynvml
    import torch

    device = pynvml.nvmlDeviceGetHandleByIndex(_physical())
    for _ in range(3):
        multiply(left, right)
    torch.cuda.synchronize()
    started = time.perf_counter()
    multiply(left, right)
    torch.cuda.synchronize()
    count = max(10, int(seconds / (time.perf_counter() - started)))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        multiply(left, right)
    end.record()
    time.sleep(0.7 * seconds)  # the queue is full: the GPU works while the host looks at it
    clock = pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)
    watts = pynvml.nvmlDeviceGetPowerUsage(device) / 1000
    end.synchronize()
    return {"ms": begin.elapsed_time(end) / count, "sm_mhz": clock, "watts": round(watts, 1)}


def _physical() -> int:
    """Of the GPU that torch calls the first, the number that the driver knows."""
    import os

    return int((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0])


def main() -> None:
    """Parse the arguments and write a line for each product in each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="qwen25_3b")
    parser.add_argument("--rows", type=int, default=16384, help="tokens of a pass")
    parser.add_argument("--seconds", type=float, default=0.4, help="that each is repeated for")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    require_gpus(1)
    import pynvml
    import torch

    pynvml.nvmlInit()
    shared = {"model": arguments.model, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    with arguments.output.open("a") as file:
        for way in arguments.ways:
            for product in products_of(facts_of(arguments.model), arguments.rows):
                line = {"name": product.name, "way": way, "sizes": [product.rows, product.inner, product.columns]}
                line |= {"in_a_block": product.times, **shared}
                try:
                    multiply = multiplier(way)
                    found = timed(multiply, *operands(product, zeros=way == "zeros"), arguments.seconds)
                    line |= found | {"tflops": round(product.flops / found["ms"] / 1e9, 1)}
                except Exception as error:  # a search that finds nothing is a result, too
                    line |= {"failed": f"{type(error).__name__}: {error}"[:300]}
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
