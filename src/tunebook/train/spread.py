"""How the model is spread over the ranks: what has to be set up before the trainer, and the check after it wrapped."""

from __future__ import annotations

import math
import os
import socket
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.config.choices import Compute, Generation
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.facts.strategies import STRATEGIES
from tunebook.files import atomic_write_json
from tunebook.model.fp8_layers import count_fp8_layers
from tunebook.parallel.deepspeed import uses_nvme, zero_stage
from tunebook.parallel.expected import require_expected, require_fp8
from tunebook.parallel.found import find_parallelism
from tunebook.parallel.operator_builds import build_operators_in_turn
from tunebook.record.files import DEEPSPEED_FILE
from tunebook.record.manifest import MANIFEST_FILE, update_manifest


def join_ranks(config: RunConfig) -> None:
    """Set up what a sharding library looks for before it is asked for anything.

    One rank that no launcher started is made a group of one, or DeepSpeed would look for MPI and accelerate leave FSDP
    out. On a CPU the process group is made here: ZeRO-3 needs it before the model is made, and transformers (5.17 to
    5.23) makes it without `launcher.timeout_s` where it is told of no GPU.
    """
    strategy = config.parallelism.strategy
    is_zero, is_on_cpu = zero_stage(strategy) is not None, config.hardware.generation is Generation.cpu
    timeout = timedelta(seconds=config.launcher.timeout_s)
    if not STRATEGIES[strategy].is_copied and "WORLD_SIZE" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())})
    if is_zero:
        build_operators_in_turn(config.launcher.start_timeout_s)
    if is_zero and is_on_cpu:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timeout)
    elif is_on_cpu and "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timeout)
    if uses_nvme(config):
        _require_libaio()


def bound_deepspeed_groups(config: RunConfig) -> None:
    """Let the groups that DeepSpeed makes of ranks wait for `launcher.timeout_s`, once it has joined them.

    Its collectives go through groups of its own, which it makes without a time-out: torch's default, whatever the
    group of all ranks was given.
    """
    if zero_stage(config.parallelism.strategy) is None:
        return
    from deepspeed.comm import comm

    comm.cdb.new_group = partial(torch.distributed.new_group, timeout=timedelta(seconds=config.launcher.timeout_s))


def _require_libaio() -> None:
    """DeepSpeed would look for it after the model is loaded, and end in a traceback."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise RequestError(
            "parallelism.offload_optimizer=nvme and offload_parameters=nvme go through libaio, which is not found "
            "here; try `apt install libaio-dev`, or parallelism=zero3_offload",
            problem_id="libaio-missing",
        )


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class ParallelismCheck(TrainerCallback):
    """Compares the wrapped model with what was asked for, on every rank, and writes down what it is."""

    def __init__(
        self, config: RunConfig, trainer: Any, folder: Path, unit_classes: list[str], num_fp8_layers: int = 0
    ) -> None:
        self.config = config
        self.unit_classes = unit_classes
        self.num_fp8_layers = num_fp8_layers
        self.trainer = trainer
        self.folder = folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All ranks see all ranks' findings, so that they raise together."""
        model = self.trainer.model_wrapped
        fp8 = {"fp8_layers": count_fp8_layers(model)} if self.config.precision.compute is Compute.fp8 else {}
        by_rank = gather_object([find_parallelism(model) | fp8])
        if state.is_world_process_zero:
            self._write_down(by_rank[0])
        require_expected(self.config, by_rank, self.unit_classes)
        require_fp8(self.config, by_rank, self.num_fp8_layers)

    def _write_down(self, found: dict[str, Any]) -> None:
        plugin = getattr(self.trainer.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:
            # accelerate says "never print" as an infinite number of steps, which JSON cannot hold.
            settings = {key: value for key, value in plugin.deepspeed_config.items() if value != math.inf}
            atomic_write_json(self.folder / DEEPSPEED_FILE, settings)
        if (self.folder / MANIFEST_FILE).exists():
            update_manifest(self.folder, {"parallelism_found": found})
