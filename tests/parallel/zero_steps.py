"""What a rank of real DeepSpeed holds in a step: `python zero_steps.py RANKS RANK:STAGE-FORMAT,... ...`.

Prints a line of JSON per argument. Each is measured in a forked process, which saves the imports: DeepSpeed changes
torch for the rest of a process, and nothing can be measured after its stage 3. The other ranks are pretended: torch's
fake process group answers every collective at once with what it was given, which leaves the sizes and lifetimes of
tensors as they are.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 30_000,
}  # fmt: skip
PASSES = 2
FORMATS: dict[str, dict[str, Any]] = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "cast": {"bf16": {"enabled": True}},
}


class Living(TorchDispatchMode):
    """The bytes of all storages that live, and the most that there were since it was asked last."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # with the bytes, which DeepSpeed does not change
        self._most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.see(result)
        return result

    def see(self, result: Any) -> None:
        """Note the storages of tensors; only a new one can raise the maximum."""
        num_seen = len(self._storages)
        for tensor in tree_iter(result):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if len(self._storages) > num_seen:
            self._most = max(self._most, self.now())

    def now(self) -> int:
        """Bytes."""
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        return sum(num_bytes for _, num_bytes in self._storages.values())

    def most(self) -> int:
        """Bytes since the last call."""
        most, self._most = self._most, 0
        return most


def follow(stage: int, number_format: str) -> dict[str, float]:
    """The sizes, and bytes: `rest` before the first step; at most in the second, `step`; and how many more a second
    pass has in its forward part than the first, `earlier`. Of the master copy the share that bf16 does not hold,
    `beyond_bf16`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 256 * 256},
        **FORMATS[number_format],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    living, tokens = Living(), torch.arange(8)[None]
    gc.collect()
    living.see([each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)])
    found = SIZES | {
        "num_layers": model.config.num_hidden_layers,
        "num_parameters": num_parameters,
        "rest": living.now(),
        "beyond_bf16": beyond_bf16(engine.optimizer),
    }
    forward = []
    with living:
        for _ in range(2):  # the optimizer makes its moments in the first step
            for _ in range(PASSES):
                living.most()
                loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
                forward.append(living.most())
                engine.backward(loss)
                del loss
                living.most()
                engine.step()  # which only counts, until the last pass
                found["step"] = living.most()
    engine.destroy()
    return found | {"earlier": forward[-1] - forward[-PASSES]}


def beyond_bf16(optimizer: Any) -> float:
    """Of a rank's master copy, before any step, the share of numbers that are others when they are cast and back."""
    in_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    parts = optimizer.fp32_partitioned_groups_flat if in_stage_3 else optimizer.single_partition_of_fp32_groups
    master = torch.cat([part.detach().flatten() for part in parts])
    return float((master != master.bfloat16().float()).float().mean())


def main() -> None:
    """Follow the cases of every argument, and print what was found."""
    ranks, *groups = sys.argv[1:]
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # neither collect nor search what the imports made
    for group in groups:
        child = os.fork()
        if child:
            if os.waitpid(child, 0)[1] != 0:
                sys.exit(f"failed: {group}")
            continue
        rank, _, cases = group.partition(":")
        os.environ["RANK"] = rank
        torch.distributed.init_process_group("fake", rank=int(rank), world_size=int(ranks), store=FakeStore())
        words = [(case, *case.split("-")) for case in cases.split(",")]
        print(json.dumps({case: follow(int(stage), number_format) for case, stage, number_format in words}))
        return


if __name__ == "__main__":
    main()
