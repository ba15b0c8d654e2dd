"""Table of optimizers: how each is built, the state it keeps per parameter, and where it runs."""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import OptimizerName


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """One optimizer."""

    optim: str  # the value of transformers' `optim`
    factory: str | None = None  # module:function called with (model, config); None: transformers builds `optim`
    state_bytes: float | None  # per trained parameter, all moments together; None: moments in the weights' format
    matrix_moments: int = 2  # with None: moments of each weight matrix of a layer; all other parameters have two
    is_adam: bool = True  # reads beta1, beta2 and epsilon
    package: str | None = None  # required in addition to torch
    is_paged: bool = False  # the driver moves its state between GPU and host on demand
    keeps_embeddings_in_fp32: bool = False  # transformers asks bitsandbytes for fp32 moments of embeddings
    needs_gpu: bool = False
    needs_bf16: bool = False  # multiplies in bf16 in every step
    takes_dtensors: bool = True  # the sharded tensors of FSDP2
    takes_flat_pieces: bool = True  # DeepSpeed's 1-D slices of all parameters joined end to end
    can_be_offloaded: bool = True  # its step can run on the host


def _bitsandbytes(optim: str, state_bytes: int, *, is_paged: bool = False) -> OptimizerFacts:
    """bitsandbytes 0.50: GPU kernels without DTensor support; its 32-bit moments are fp32 whatever the weights are."""
    return OptimizerFacts(
        optim=optim,
        state_bytes=state_bytes,
        is_paged=is_paged,
        keeps_embeddings_in_fp32=state_bytes == 2,
        package="bitsandbytes",
        needs_gpu=True,
        takes_dtensors=False,
        can_be_offloaded=False,
    )


OPTIMIZERS: dict[OptimizerName, OptimizerFacts] = {
    OptimizerName.adamw: OptimizerFacts(optim="adamw_torch_fused", state_bytes=None),
    OptimizerName.adamw_8bit: _bitsandbytes("adamw_8bit", 2),
    OptimizerName.paged_adamw_32bit: _bitsandbytes("paged_adamw_32bit", 8, is_paged=True),
    OptimizerName.paged_adamw_8bit: _bitsandbytes("paged_adamw_8bit", 2, is_paged=True),
    # One row and one column of second moments per matrix, no first moment (transformers 5.23, optimization.py): less
    # than a thousandth of the weights. It builds them from the gradient's shape as plain tensors.
    OptimizerName.adafactor: OptimizerFacts(
        optim="adafactor",
        state_bytes=0,
        is_adam=False,
        takes_dtensors=False,
        takes_flat_pieces=False,
        can_be_offloaded=False,
    ),
    # torch's Muon orthogonalizes each matrix of a layer in bf16; AdamW updates the rest.
    OptimizerName.muon: OptimizerFacts(
        optim="adamw_torch_fused",
        factory="tunebook.train.muon:muon_with_adamw",
        state_bytes=None,
        matrix_moments=1,
        needs_bf16=True,
        takes_flat_pieces=False,
        can_be_offloaded=False,
    ),
}
