"""How much host memory each rank needs to load a model, by strategy: one JSON line per case.

    python tests/bench/loading_memory.py --output FILE [--device cpu|cuda] [--ranks 4] [--only CASE ...] [--layers 20]

A Llama of 1.01 billion random bf16 weights (20 of TinyLlama's 22 layers: hidden 2048, vocabulary 32,000) is written to
a temporary folder as five safetensors files with their index, and loaded by torchrun's ranks with the code that a run
uses: `begin_loading`, the Trainer's arguments, `finish_loading`; for FSDP also accelerate's `fsdp2_prepare_model`,
which sends the weights to the ranks. Case `fsdp_upstream` is transformers' own `from_pretrained` on every rank with
accelerate's `cpu_ram_efficient_loading` asked for.

What is measured is host memory *for loading*, by the kernel's own record of each process:

    loading = VmHWM (the highest resident size while loading)
              - the resident size before: Python and the libraries, on a GPU also CUDA and NCCL
              - on a CPU the rank's own shard, which stays. On a GPU it is in the GPU's memory: nothing is taken off

VmHWM counts the pages of the weight files that rank 0 has mapped: they are what "reading the weights" is under ZeRO-3,
where rank 0 never has a copy of its own. Beside it stands the peak of anonymous memory alone (`anonymous_mib`,
sampled every 5 ms), which pages of files are no part of. On a CPU both count the buffers that a layer is gathered or
sent in, which are the GPU's memory on a GPU, so a CPU's figures are upper bounds of what a host needs. How large these
buffers are under ZeRO-3 is measured too: `gather_mib` is the peak while the largest parameter alone is gathered once
more. `largest_share_of_rank_0_loaded` is with them, `..._without_gather` is without them, on both sides of the ratio.
Python's allocator is told to give back what was freed (`GIVE_BACK`), or the figures would be those of its gaps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

MIB = 2**20
# glibc keeps what was freed, in pieces between the shards: without these ranks of ZeRO-3 had up to 1.5 GB of it.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "1"}
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CASES: dict[str, list[str]] = {
    "zero3": ["parallelism=zero3", "precision=fp32"],
    "zero3_cast": ["parallelism=zero3", "precision=bf16", "parallelism.mixed_precision=cast"],
    "fsdp": ["parallelism=fsdp", "precision=bf16"],
    "fsdp_upstream": ["parallelism=fsdp", "precision=bf16"],
    "ddp": ["parallelism=ddp", "precision=bf16"],
}


# ---- what one rank does


class Memory:
    """This process's resident memory from now on: the kernel's peak, and a sampled one of anonymous pages."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's record starts again from here
        self.before = _status("VmRSS")
        self.anonymous_before = self.anonymous_peak = _status("RssAnon")
        self._stop = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.anonymous_peak = max(self.anonymous_peak, _status("RssAnon"))

    def so_far(self, shard_bytes: int) -> dict[str, float]:
        """MiB, with a shard that is in host memory taken off."""
        peak = _status("VmHWM")
        return {
            "peak_mib": round(peak / MIB, 1),
            "before_mib": round(self.before / MIB, 1),
            "own_shard_mib": round(shard_bytes / MIB, 1),
            "loading_mib": round((peak - self.before - shard_bytes) / MIB, 1),
            "anonymous_mib": round((self.anonymous_peak - self.anonymous_before - shard_bytes) / MIB, 1),
        }


def _status(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def run_rank(folder: Path) -> NoReturn:
    """Load as `request.json` says and write `rank-N.json`: memory, where the weights are, and their sum by name."""
    from tunebook.errors import TunebookError
    from tunebook.train.rank_process import RankEnd

    end, rank = RankEnd(), int(os.environ["RANK"])
    try:
        found, code = _load(json.loads((folder / "request.json").read_text()), folder), 0
    except TunebookError as error:
        found, code = {"error": error.message, "problem_id": error.problem_id}, error.exit_code
    (folder / f"rank-{rank}.json").write_text(json.dumps(found | {"rank": rank, "exit_code": code}))
    end.leave(code)


def _load(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    from tunebook.config.choices import Generation
    from tunebook.config.compose import compose
    from tunebook.facts.sharing import sharing_of
    from tunebook.model.load import begin_loading, finish_loading
    from tunebook.parallel.fsdp import is_fsdp
    from tunebook.train.spread import join_ranks

    rank, on_gpu = int(os.environ["RANK"]), request["device"] == "cuda"
    config = compose(None, request["words"]).config
    config.hardware.generation = Generation.hopper if on_gpu else Generation.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    _import_all()
    refused = [_refusal(config, path, rank) for path in request["refused"]]
    _meet(device)
    memory, started = Memory(), time.monotonic()
    if not request["upstream"]:
        begun = begin_loading(config, rank)
    others = [_begun(words, rank) for words in request["others"]]
    join_ranks(config)
    arguments = _announce(config, folder, on_gpu, device)
    model = _upstream(config) if request["upstream"] else finish_loading(config, begun, rank, device)
    begun = None
    loaded = memory.so_far(0 if on_gpu or is_fsdp(config.parallelism.strategy) else _shard_bytes(model))
    found = {
        "loaded": loaded,
        "refused": refused,
        "sharing": sharing_of(config).value,
        "empty_parameters": _num_empty(model),
    }
    if found["sharing"] == "scatter":
        found["gather_mib"] = _gather_mib(model)
    if is_fsdp(config.parallelism.strategy) and request["wrap"]:
        model = _send(config, model, device)
        found["sent"] = memory.so_far(0 if on_gpu else _shard_bytes(model))
    found |= {"wall_s": round(time.monotonic() - started, 1), "sums": _sums(model) if request["sums"] else None}
    found["sums_of_others"] = []
    for other, its_begun in others:
        model = finish_loading(other, its_begun, rank, device)
        model = _send(other, model, device) if is_fsdp(other.parallelism.strategy) else model
        found["sums_of_others"].append(_sums(model))
    torch.distributed.barrier()
    del arguments  # transformers looks up ZeRO-3 there as long as it lives
    torch.distributed.destroy_process_group()
    return found


def _begun(words: list[str], rank: int) -> tuple[Any, Any]:
    """The configuration and the begun loading of another run of the same strategy."""
    from tunebook.config.choices import Generation
    from tunebook.config.compose import compose
    from tunebook.model.load import begin_loading

    config = compose(None, words).config
    config.hardware.generation = Generation.cpu
    return config, begin_loading(config, rank)


def _refusal(config: Any, path: str, rank: int) -> list[Any] | None:
    """What a rank ends with on a model that cannot be loaded: exit code, problem, message. None where it can."""
    from tunebook.errors import TunebookError
    from tunebook.model.load import begin_loading

    try:
        begin_loading(replace(config, model=replace(config.model, path=path)), rank)
    except TunebookError as error:
        return [error.exit_code, error.problem_id, error.message]
    return None


def _import_all() -> None:
    """So that no library is counted as loading."""
    import accelerate
    import deepspeed.runtime.engine
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import trl

    assert accelerate and transformers and trl and deepspeed


def _meet(device: Any) -> None:
    """So that neither CUDA nor NCCL is."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.distributed.all_reduce(torch.zeros(1, device=device))


def _announce(config: Any, folder: Path, on_gpu: bool, device: Any) -> Any:
    """The Trainer's arguments as far as loading hears of them."""
    from trl import SFTConfig

    from tunebook.config.choices import Compute
    from tunebook.parallel.deepspeed import deepspeed_settings, zero_stage

    settings = deepspeed_settings(config) if zero_stage(config.parallelism.strategy) is not None else None
    casts = settings is not None and "bf16" in settings and config.precision.compute is Compute.bf16
    arguments = SFTConfig(str(folder / "out"), deepspeed=settings, use_cpu=not on_gpu, bf16=casts, report_to=[])
    assert arguments.device.type == device.type
    return arguments


def _upstream(config: Any) -> Any:
    """What accelerate and transformers do when they are asked to load on one rank."""
    from transformers import AutoModelForCausalLM

    from tunebook.model.load import master_dtype

    os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
    return AutoModelForCausalLM.from_pretrained(config.model.path, dtype=master_dtype(config))


def _send(config: Any, model: Any, device: Any) -> Any:
    """accelerate's own preparation. Its Accelerator takes FSDP for a GPU's only; this asks less of it."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    from tunebook.parallel.units import unit_classes

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=config.parallelism.cpu_ram_efficient_loading,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=unit_classes(config, model),
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=device,
        is_main_process=torch.distributed.get_rank() == 0, torch_device_mesh=None,
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)


def _local(parameter: Any) -> Any:
    """What this rank holds of a parameter."""
    shard = getattr(parameter, "ds_tensor", parameter)
    return shard.to_local() if hasattr(shard, "to_local") else shard


def _shard_bytes(model: Any) -> int:
    return sum(shard.numel() * shard.element_size() for shard in map(_local, model.parameters()))


def _gather_mib(model: Any) -> float:
    """What gathering and scattering the largest parameter takes: what loading does with each, one after the other."""
    import deepspeed

    largest = max(model.parameters(), key=lambda parameter: parameter.ds_numel)
    memory = Memory()
    with deepspeed.zero.GatheredParameters([largest], modifier_rank=0):
        pass
    return memory.so_far(0)["loading_mib"]


def _num_empty(model: Any) -> int:
    """Parameters of which this rank's first million values are all zero: room that nothing was written to."""
    return sum(not bool(shard.flatten()[:1_000_000].any()) for shard in map(_local, model.parameters()))


def _sums(model: Any) -> dict[str, float]:
    """The sum of each whole parameter over all ranks."""
    import deepspeed
    import torch

    sums = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor"):
            with deepspeed.zero.GatheredParameters([parameter]):
                sums[name] = parameter.data.double().sum().item()
        elif hasattr(parameter, "full_tensor"):
            sums[name] = parameter.full_tensor().double().sum().item()
        else:
            sums[name] = parameter.detach().to(torch.float64).sum().item()
    return sums


# ---- the cases


def write_model(folder: Path, num_layers: int) -> int:
    """A Llama with random bf16 weights in five files, written one file at a time. Returns its number of parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = AutoConfig.for_model("llama", num_hidden_layers=num_layers, dtype="bfloat16", **SIZES)
    architecture.architectures = ["LlamaForCausalLM"]
    architecture.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(architecture).state_dict().items()
        }
    names, places = list(shapes), {}
    torch.manual_seed(0)
    for number in range(5):
        file = f"model-{number + 1:05}-of-00005.safetensors"
        part = {name: torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0, 0.02) for name in names[number::5]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(shape.numel() for shape in shapes.values())


def launch(folder: Path, words: list[str], ranks: int, **request: Any) -> tuple[int, list[dict[str, Any]], str]:
    """Load on so many ranks: torchrun's exit code, what each rank wrote, and what was printed."""
    folder.mkdir(parents=True)
    usual = {"device": "cpu", "wrap": True, "sums": False, "upstream": False, "refused": [], "others": []}
    whole = {"words": words} | usual | request
    (folder / "request.json").write_text(json.dumps(whole))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= GIVE_BACK
    ended = subprocess.run(
        [*command, __file__, "--rank-of", str(folder)], env=environment, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
    return ended.returncode, lines, ended.stdout


def overrides(model: Path, ranks: int) -> list[str]:
    """The words of a run of a model in a folder."""
    return [
        *["model=hub", f"model.path={model}", "dataset=synthetic", "training.global_samples=16"],
        *["attention=sdpa", "packing=isolated", "activation=stored", "training.max_length=512"],
        *["optimizer.learning_rate=1e-4", f"hardware.gpus_per_node={ranks}"],
    ]


def _case(name: str, model: Path, num_parameters: int, arguments: argparse.Namespace) -> dict[str, Any]:
    is_upstream = name == "fsdp_upstream"
    each_holds_all = name in ("fsdp_upstream", "ddp")
    ranks = 2 if each_holds_all and arguments.device == "cpu" else arguments.ranks  # 4 GB in fp32 on each
    code, lines, output = launch(
        arguments.scratch / name, [*overrides(model, ranks), *CASES[name]], ranks,
        device=arguments.device, upstream=is_upstream, wrap=not is_upstream,
    )  # fmt: skip
    line: dict[str, Any] = {
        "name": name, "overrides": CASES[name], "device": arguments.device, "ranks": ranks, "exit_code": code,
        "parameters": num_parameters, "weights": "random, bf16 on disk", **_versions(), "by_rank": lines,
    }  # fmt: skip
    if code or len(lines) != ranks:
        return line | {"output": output[-2000:]}
    for stage in ("loaded", "sent"):
        if stage in lines[0]:
            first, *others = [rank[stage]["loading_mib"] for rank in lines]
            line[f"largest_share_of_rank_0_{stage}"] = round(max(others) / first, 4)
    if "gather_mib" in lines[0]:
        first, *others = [rank["loaded"]["loading_mib"] - rank["gather_mib"] for rank in lines]
        line["largest_share_of_rank_0_without_gather"] = round(max(others) / first, 4)
    return line


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    found = {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
    return found | {"python": platform.python_version(), "date": date.today().isoformat()}


def main() -> int:
    """Write the model, run the cases one after the other, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of)
    if arguments.device == "cuda":
        from gpu_queue import require_gpus  # beside this file, which a test loads from elsewhere

        require_gpus(arguments.ranks)
    with tempfile.TemporaryDirectory(prefix="loading-") as scratch:
        arguments.scratch = Path(scratch)
        model = arguments.scratch / "model"
        model.mkdir()
        num_parameters = write_model(model, arguments.layers)
        for name in arguments.only:
            line = _case(name, model, num_parameters, arguments)
            print(json.dumps(line), flush=True)
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
