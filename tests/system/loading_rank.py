"""One rank that loads models as a run does, over gloo: started by `torchrun loading_rank.py FOLDER`.

It reads `request.json` and writes `rank-N.json`: the sums of each model's weights by name, and how a rank refuses each
damaged model. Loading is `begin_loading`, the Trainer's arguments, `finish_loading`; for FSDP also accelerate's
`fsdp2_prepare_model`, which sends the weights to the ranks: its Accelerator takes FSDP for a GPU's only.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from trl import SFTConfig

from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.errors import TunebookError
from tunebook.model.load import begin_loading, finish_loading
from tunebook.parallel.deepspeed import deepspeed_settings, zero_stage
from tunebook.parallel.fsdp import is_fsdp
from tunebook.parallel.wrapped import unit_classes
from tunebook.train.rank_process import RankEnd
from tunebook.train.spread import join_ranks

CPU = torch.device("cpu")


def main(folder: Path) -> NoReturn:
    """Load what `request.json` asks for."""
    end, rank = RankEnd(), int(os.environ["RANK"])
    request = json.loads((folder / "request.json").read_text())
    configs = [compose(None, [*words, "hardware=cpu"]).config for words in request["models"]]
    refused = [_refusal(configs[0], path, rank) for path in request["refused"]]
    torch.distributed.init_process_group("gloo")
    begun = [begin_loading(config, rank) for config in configs]
    join_ranks(configs[0])
    arguments = _trainer_arguments(configs[0], folder)
    sums = [_sums(_loaded(config, each, rank)) for config, each in zip(configs, begun, strict=True)]
    torch.distributed.barrier()
    del arguments  # transformers looks up ZeRO-3 there as long as it lives
    torch.distributed.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps({"sums": sums, "refused": refused}))
    end.leave(0)


def _refusal(config: RunConfig, path: str, rank: int) -> list[Any] | None:
    """Exit code, problem and message for a model that cannot be loaded; None if it can."""
    try:
        begin_loading(replace(config, model=replace(config.model, path=path)), rank)
    except TunebookError as error:
        return [error.exit_code, error.problem_id, error.message]
    return None


def _trainer_arguments(config: RunConfig, folder: Path) -> SFTConfig:
    """The Trainer's arguments as far as loading hears of them."""
    settings = deepspeed_settings(config) if zero_stage(config.parallelism.strategy) is not None else None
    arguments = SFTConfig(str(folder / "out"), deepspeed=settings, use_cpu=True, bf16=False, report_to=[])
    assert arguments.device.type == "cpu"
    return arguments


def _loaded(config: RunConfig, begun: Any, rank: int) -> Any:
    model = finish_loading(config, begun, rank, CPU)
    if not is_fsdp(config.parallelism.strategy):
        return model
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=config.parallelism.cpu_ram_efficient_loading,  # type: ignore[attr-defined]
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=unit_classes(config, model),
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=CPU, is_main_process=rank == 0,
        torch_device_mesh=None,
    )  # fmt: skip
    return fsdp2_prepare_model(accelerator, model)


def _sums(model: Any) -> dict[str, float]:
    """The sum of each whole parameter over all ranks."""
    import deepspeed

    sums = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor"):
            with deepspeed.zero.GatheredParameters([parameter]):
                sums[name] = parameter.data.double().sum().item()
        elif hasattr(parameter, "full_tensor"):
            sums[name] = parameter.full_tensor().double().sum().item()
        else:
            sums[name] = parameter.detach().double().sum().item()
    return sums


if __name__ == "__main__":
    main(Path(sys.argv[1]))
