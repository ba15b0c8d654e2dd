"""What runs of the GPU queue do on the GPUs: the peak and the kernels of one step, and the end of FSDP's passes."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent / "gpu_turns"))
from gpu_peak import at_the_peak, origin
from gpu_profile import EndOfPasses, covered, kind_of, longest_idle, summary

GIB = 2**30


def test_a_unit_whose_second_module_was_not_called_begins_anew(one_gloo_rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard([model[0], model[1]], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4))
    [unit] = [state for state in model._get_fsdp_state()._state_ctx.all_states if model[1] in state._modules]
    unit._modules_to_run_forward.add(model[1])  # as torch 2.11 leaves it
    EndOfPasses(SimpleNamespace(model_wrapped=model)).on_train_begin(None, None, None)
    assert not unit._modules_to_run_forward


def _frame(filename: str, line: int, name: str) -> dict[str, object]:
    return {"filename": filename, "line": line, "name": name}


def test_the_blocks_at_the_peak_are_told_by_size_and_origin() -> None:
    """3 GiB from before, of which one is given back; two of 2 GiB at the peak, and one of 1 GiB behind it."""
    asked = [_frame("/site/torch/nn/modules/module.py", 1, "call"), _frame("/site/llama/modeling.py", 7, "forward")]
    trace = [
        {"action": "free_requested", "addr": 1, "size": GIB},
        {"action": "alloc", "addr": 2, "size": 2 * GIB, "frames": asked},
        {"action": "alloc", "addr": 3, "size": 2 * GIB, "frames": asked},
        {"action": "free_requested", "addr": 2, "size": 2 * GIB},
        {"action": "alloc", "addr": 2, "size": GIB, "frames": []},
        {"action": "free_completed", "addr": 2, "size": GIB},
    ]
    found = at_the_peak(trace, allocated_after=5 * GIB)
    assert (found["peak_gib"], found["after_gib"], found["before the step"]) == (6.0, 5.0, 2.0)
    assert found["blocks"] == [{"gib": 4.0, "bytes": 2 * GIB, "count": 2, "asked": "llama/modeling.py:7 forward"}]


def test_an_origin_is_the_innermost_four_lines_without_torchs_dispatching() -> None:
    frames = [_frame(f"/a/b/{number}.py", number, "f") for number in range(6)]
    assert origin([_frame("/x/torch/_dynamo/eval_frame.py", 3, "g"), *frames]).count(" < ") == 3
    assert origin([]) == ""


def test_covered_counts_overlapping_spans_once() -> None:
    """[0, 4] and [2, 6] cover 6; [7, 8] one more; a span inside another nothing."""
    assert covered([(7.0, 8.0), (0.0, 4.0), (2.0, 6.0), (3.0, 4.0)]) == 7.0


def test_communication_that_nothing_hides_is_told_apart() -> None:
    """A product from 0 to 6 ms; messages from 4 to 9 and from 1 to 2 ms: 3 of their 6 ms are not hidden."""
    kernels = [
        ("nvjet_sm90_tst", 0.0, 6.0),
        ("ncclDevKernel_AllGather_RING_LL", 4.0, 9.0),
        ("ncclDevKernel_AllGather_RING_LL", 1.0, 2.0),
    ]
    found = summary(kernels, 0.010)
    assert (found["step_ms"], found["kernels_ms"]) == (10.0, 12.0)
    assert (found["computing_ms"], found["only_communicating_ms"]) == (6.0, 3.0)
    assert found["by_kind_ms"] == {"products": 6.0, "communication": 6.0}
    assert ["ncclDevKernel_AllGather_RING_LL", 6.0, 2] in found["longest"]


def test_idle_spans_are_told_with_what_ran_before_and_after_them() -> None:
    """Nothing ran from 6 to 7 and from 9 to 12 ms; a kernel inside another ends no span."""
    kernels = [("d", 12.0, 13.0), ("a", 0.0, 6.0), ("inside", 1.0, 2.0), ("b", 7.0, 9.0), ("at once", 9.0, 9.0)]
    assert longest_idle(kernels) == [(3.0, "b", "d"), (1.0, "a", "b")]
    assert longest_idle(kernels, at_most=1) == [(3.0, "b", "d")]
    found = summary(kernels, 0.014)
    assert (found["idle_ms"], found["longest_idle"]) == (5.0, [[3.0, "b", "d"], [1.0, "a", "b"]])


def test_copies_between_gpus_are_communication() -> None:
    """NCCL's kernels may have the name of what they do in it."""
    assert kind_of("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL") == "communication"
    assert kind_of("void pytorch_flash::flash_fwd_kernel") == "attention"


def test_rules_that_a_case_allows_are_not_checked() -> None:
    spec = spec_from_file_location("turns", Path(__file__).parent / "gpu_turns/sitecustomize.py")
    assert spec is not None and spec.loader is not None
    turns = module_from_spec(spec)
    spec.loader.exec_module(turns)
    rules = SimpleNamespace(check=lambda *_: [SimpleNamespace(id="dora-not-tested"), SimpleNamespace(id="other")])
    turns.allow(rules, ["dora-not-tested"])
    assert [problem.id for problem in rules.check("config")] == ["other"]
