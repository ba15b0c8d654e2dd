"""Set-up of the ranks before the trainer exists, and the parallelism check after the trainer has wrapped the model."""

from __future__ import annotations

import math
import os
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
from tunebook.facts.sharing import offloaded_states, uses_nvme
from tunebook.facts.strategies import STRATEGIES
from tunebook.files import atomic_write_json
from tunebook.model.fp8 import count_fp8_layers
from tunebook.parallel.deepspeed import keep_format_of_persistent, zero_stage
from tunebook.parallel.wrapped import find_parallelism, require_expected
from tunebook.processes import free_port
from tunebook.record.manifest import add_to_manifest
from tunebook.record.run_folder import DEEPSPEED_FILE


def join_ranks(config: RunConfig) -> None:
    """Create what a sharding library needs before it is used.

    A rank that no launcher started becomes a group of one; otherwise DeepSpeed would look for MPI, and accelerate would
    ignore FSDP. On a CPU the process group is created here: ZeRO-3 needs it before the model, and transformers (5.17 to
    5.23) creates it without `launcher.timeout_s` there.
    """
    strategy = config.parallelism.strategy
    is_zero, is_on_cpu = zero_stage(strategy) is not None, config.hardware.generation is Generation.cpu
    timeout = timedelta(seconds=config.launcher.timeout_s)
    if not STRATEGIES[strategy].is_copied and "WORLD_SIZE" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    if is_zero and (is_on_cpu or offloaded_states(config)) and os.environ.get("RANK", "0") == "0":
        from torch.utils.cpp_extension import get_default_build_root

        folder = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
        print(
            "DeepSpeed compiles its operators at their first use on a machine, which takes 1 to 4 minutes; if it never "
            f"ends, a killed process left a file there: find {folder} -name lock -delete",
            flush=True,
        )
    if is_zero and is_on_cpu:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timeout)
    elif is_on_cpu and "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=timeout)
    if uses_nvme(config):
        _require_libaio()


def bound_deepspeed_groups(config: RunConfig) -> None:
    """Create DeepSpeed's process groups with `launcher.timeout_s`; by default they have torch's own time-out."""
    if zero_stage(config.parallelism.strategy) is None:
        return
    from deepspeed.comm import comm

    comm.cdb.new_group = partial(torch.distributed.new_group, timeout=timedelta(seconds=config.launcher.timeout_s))


def _require_libaio() -> None:
    """Check before the model is loaded. DeepSpeed's own error does not name the package."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise RequestError(
            "offloading to nvme needs libaio, which is not installed; try `apt install libaio-dev`, or "
            "parallelism=zero3_offload",
            problem_id="libaio-missing",
        )


class ParallelismCheck(TrainerCallback):
    """Compares the wrapped model with the configuration, on every rank, and records what was found."""

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
        """All ranks get all findings, so that they raise together."""
        model = self.trainer.model_wrapped
        keep_format_of_persistent(model)
        fp8 = {"fp8_layers": count_fp8_layers(model)} if self.config.precision.compute is Compute.fp8 else {}
        sequence = self.trainer.sequence
        group = {} if sequence is None else {"sequence_group_size": sequence.ranks.size()}
        by_rank = gather_object([find_parallelism(model) | fp8 | group])
        if state.is_world_process_zero:
            self._write_down(by_rank[0])
        require_expected(self.config, by_rank, self.unit_classes, self.num_fp8_layers)

    def _write_down(self, wrapping: dict[str, Any]) -> None:
        plugin = getattr(self.trainer.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:
            # accelerate sets an infinite number of steps for "never print", which JSON cannot represent.
            settings = {key: value for key, value in plugin.deepspeed_config.items() if value != math.inf}
            atomic_write_json(self.folder / DEEPSPEED_FILE, settings)
        add_to_manifest(self.folder, {"parallelism_found": wrapping})
