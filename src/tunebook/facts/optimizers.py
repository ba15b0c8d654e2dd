"""Optimizers: what transformers calls them, what they keep of each parameter, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import OptimizerName


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """One optimizer. Sizes are bytes per trained parameter of both of Adam's moments together."""

    optim: str  # the value of transformers' `optim`
    state_bytes: int | None  # None: two moments in the format of the weights
    is_paged: bool = False  # the driver moves its state between GPU and host as it is needed
    same_steps_unpaged: OptimizerName | None = None  # of a paged one: the optimizer that keeps the state on the GPU
    keeps_embeddings_in_fp32: bool = False  # transformers asks bitsandbytes for that, where it finds the parameter
    package: str | None = None  # what it needs besides torch
    needs_gpu: bool = False
    takes_dtensors: bool = True  # FSDP2's sharded tensors
    can_be_offloaded: bool = True  # to the host, where DeepSpeed's own Adam for CPUs updates

    @property
    def is_8bit(self) -> bool:
        """Whether its moments are kept in 8 bits, which learns slightly differently."""
        return self.state_bytes is not None and self.state_bytes < 4


def _bitsandbytes(optim: str, state_bytes: int, unpaged: OptimizerName | None = None) -> OptimizerFacts:
    """bitsandbytes 0.50: GPU kernels that know no DTensor; its 32-bit moments are fp32 whatever the weights are."""
    return OptimizerFacts(
        optim=optim,
        state_bytes=state_bytes,
        is_paged=unpaged is not None,
        same_steps_unpaged=unpaged,
        keeps_embeddings_in_fp32=state_bytes == 2,
        package="bitsandbytes",
        needs_gpu=True,
        takes_dtensors=False,
        can_be_offloaded=False,
    )


OPTIMIZERS: dict[OptimizerName, OptimizerFacts] = {
    OptimizerName.adamw: OptimizerFacts(optim="adamw_torch_fused", state_bytes=None),
    OptimizerName.adamw_8bit: _bitsandbytes("adamw_8bit", 2),
    OptimizerName.paged_adamw_32bit: _bitsandbytes("paged_adamw_32bit", 8, OptimizerName.adamw),
    OptimizerName.paged_adamw_8bit: _bitsandbytes("paged_adamw_8bit", 2, OptimizerName.adamw_8bit),
}
RUNS_EVERYWHERE = OptimizerName.adamw  # with every strategy, on every GPU and on CPUs
