"""Forgetting the order of parameters, on DeepSpeed's own coordinator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tunebook.parallel.trace import forget_parameter_order


@pytest.fixture
def engine():
    """As much of a ZeRO-3 engine as has a coordinator, which needs no process group until it gathers."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        InflightParamRegistry,
        PartitionedParameterCoordinator,
    )

    coordinator = PartitionedParameterCoordinator(
        prefetch_bucket_sz=1, max_reuse_distance_in_numel=1, max_available_parameters_in_numel=1,
        allgather_stream=torch.Stream(device="cpu") if hasattr(torch, "Stream") else None,
        inflight_param_registry=InflightParamRegistry(),
    )  # fmt: skip
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    return SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload)), coordinator


def test_a_recorded_order_is_forgotten_and_once_is_enough(engine):
    model, coordinator = engine
    forget_parameter_order(model)  # nothing is recorded yet: DeepSpeed itself would raise
    coordinator.reset_step = None
    coordinator._PartitionedParameterCoordinator__trace_mode = type(
        coordinator._PartitionedParameterCoordinator__trace_mode
    ).COMPLETE
    forget_parameter_order(model)
    assert coordinator.is_invalid_trace()
    forget_parameter_order(model)
    assert coordinator.is_invalid_trace()


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), SimpleNamespace(optimizer=SimpleNamespace())])
def test_what_is_no_zero3_engine_is_left_alone(model):
    before = dict(vars(model))
    forget_parameter_order(model)
    assert vars(model) == before
