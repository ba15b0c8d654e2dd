"""Checkpoints of whole runs: killed at random moments, and refused or gone back behind by the launcher."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.system.conftest import ONE_THREAD, SAVED, TWO_RANKS
from tunebook.checkpoint.verify import verified_record
from tunebook.files import sha256_file
from tunebook.record.metrics import read_metrics

CASES = {"ddp": 2, "ddp_lora": 2}
KILLS_OF_CASE = 3


def test_killed_runs_lose_nothing_and_end_with_the_bits_of_those_that_nobody_killed(run, project_root):
    """A small version of the benchmark, whose recorded figures are of hundreds."""
    words = [sys.executable, str(project_root / "benchmarks" / "checkpoint_kills.py")]
    ended = run([*words, "--kills", str(KILLS_OF_CASE * len(CASES)), "--only", *CASES], timeout_s=600)
    assert ended.exit_code == 0, ended.output
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    assert [(line["case"], line["kills"], line["ranks"]) for line in lines] == [
        (case, KILLS_OF_CASE, ranks) for case, ranks in CASES.items()
    ]
    for line in lines:
        assert line["attempts"] == line["kills"] + line["runs"]  # each kill was followed by a start that went on
        assert (line["lost"], line["damaged"], line["different"]) == (0, 0, 0)


def command(outputs: Path, *overrides: str) -> list[str]:
    """As the fixture `saved_by` trains."""
    words = ["tunebook", "train", "quickstart", "evaluation=none", f"outputs={outputs}", *SAVED, *TWO_RANKS]
    return [*words, *overrides]


def test_two_ranks_record_what_they_saved(saved_by):
    record = verified_record(saved_by("ddp").folder / "checkpoints" / "checkpoint-15")
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"} <= set(record.files)
    assert (record.identity.strategy, record.identity.world_size, record.step) == ("ddp", 2, 15)


def test_a_named_run_is_gone_back_in_to_the_same_bits(run_forked, read_run, saved_by, tmp_path):
    whole = saved_by("ddp")
    earlier = tmp_path / "earlier"
    shutil.copytree(whole.folder, earlier)
    file = earlier / "checkpoints" / "checkpoint-20" / "rng_state_1.pth"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    words = command(tmp_path / "outputs", f"training.resume={earlier}")
    ended = run_forked(words, **ONE_THREAD)
    assert ended.exit_code == 0, ended.output
    words = " ".join(ended.output.split())
    assert "checkpoint-20 is passed over: rng_state_1.pth is not what was written" in words
    assert f"resuming from {earlier / 'checkpoints' / 'checkpoint-15'}: every file in it was read" in words
    later = read_run(tmp_path / "outputs" / "quickstart" / "latest")
    assert later.losses == whole.losses[15:]
    model = (later.folder / "model" / "model.safetensors").read_bytes()
    assert model == (whole.folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.learning_rate=1e-5"], "optimizer.learning_rate was 0.0012 and is 1e-05"),
        (["parallelism=zero1"], "parallelism was single or ddp and is zero1"),
        (["parallelism=single", "hardware.gpus_per_node=1"], "the number of ranks was 2 and is 1"),
    ],
    ids=["config", "strategy", "ranks"],
)
def test_another_run_is_refused_before_anything_starts(run_forked, saved_by, tmp_path, overrides, message):
    ended = run_forked(command(tmp_path, f"training.resume={saved_by('ddp').folder}", *overrides))
    assert ended.exit_code == 2, ended.output
    assert message in " ".join(ended.output.split())
    assert "Traceback" not in ended.output
    assert not (tmp_path / "quickstart").exists()


def test_zero_resumes_with_the_written_hyperparameters_as_ddp_does(run_forked, read_run, saved_by, tmp_path):
    """DeepSpeed restores those of the checkpoint, and the clipping with them."""
    other = ["optimizer.learning_rate=4e-4", "optimizer.weight_decay=0.5", "optimizer.beta2=0.9"]
    other += ["training.max_grad_norm=0.05", "training.resume_anyway=[config]", "schedule.warmup_steps=5"]
    found = {}
    for strategy in ("ddp", "zero2"):
        resumed = f"training.resume={saved_by(strategy).folder / 'checkpoints' / 'checkpoint-15'}"
        ended = run_forked(command(tmp_path / strategy, f"parallelism={strategy}", resumed, *other))
        assert ended.exit_code == 0, ended.output
        assert "optimizer.learning_rate was 0.0012 and is 0.0004" in " ".join(ended.output.split())
        found[strategy] = read_run(tmp_path / strategy / "quickstart" / "latest")
    zero2, ddp = ([line["learning_rate"] for line in read_metrics(found[name].folder)] for name in ("zero2", "ddp"))
    assert len(zero2) == 5
    assert zero2 == ddp
    assert found["zero2"].losses == pytest.approx(found["ddp"].losses, rel=1e-5)


class RunsCode:
    def __reduce__(self):
        return (os.system, (f"touch {PROOF}",))


PROOF = "code_of_a_checkpoint_ran"


# bf16: DeepSpeed gathers small parameters in fp32 after a step, and would in bf16 in the first step of a resume.
# Adapters of rank 8 are small; without norms to train, DeepSpeed has no other sum of gradients in fp32.
@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        ("zero2", []),
        ("zero3", ["precision=bf16"]),
        ("zero3", ["precision=bf16", "peft=lora", "peft.rank=8"]),
    ],
)
def test_a_checkpoint_of_zero_is_resumed_to_the_same_losses(
    run_forked, read_run, saved_by, tmp_path, strategy, overrides
):
    of_zero = saved_by(strategy, *overrides)
    named = f"training.resume={of_zero.folder / 'checkpoints' / 'checkpoint-15'}"
    ended = run_forked(command(tmp_path, f"parallelism={strategy}", *overrides, named))
    assert ended.exit_code == 0, ended.output
    assert "complete.json proves that, but not who wrote it; files that would run code are refused" in ended.output
    assert read_run(tmp_path / "quickstart" / "latest").losses == of_zero.losses[15:]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_with_another_number_of_ranks_the_losses_are_the_same_but_for_roundings(
    run_forked, read_run, saved_by, tmp_path, strategy
):
    """DeepSpeed cuts its shards anew."""
    whole = saved_by(strategy)
    words = [f"parallelism={strategy}", "hardware.gpus_per_node=1", "training.resume_anyway=[world_size]"]
    resumed = f"training.resume={whole.folder / 'checkpoints' / 'checkpoint-15'}"
    ended = run_forked(command(tmp_path, *words, resumed))
    assert ended.exit_code == 0, ended.output
    assert read_run(tmp_path / "quickstart" / "latest").losses == pytest.approx(whole.losses[15:], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("global_step15/mp_rank_00_model_states.pt", 2),
        ("global_step15/zero_pp_rank_1_mp_rank_00_optim_states.pt", 2),
        ("global_step15/zero_pp_rank_1_mp_rank_00_optim_states.pt", 1),  # through DeepSpeed's universal checkpoint
    ],
)
def test_code_in_a_checkpoint_of_zero_is_not_run_though_its_record_fits(run_forked, saved_by, tmp_path, name, ranks):
    checkpoint = tmp_path / "checkpoint-15"
    shutil.copytree(saved_by("zero2").folder / "checkpoints" / "checkpoint-15", checkpoint)
    content = torch.load(checkpoint / name, weights_only=False)
    torch.save(content | {"evil": RunsCode()}, checkpoint / name)
    record = json.loads((checkpoint / "complete.json").read_text())
    record["files"][name] = {"size": (checkpoint / name).stat().st_size, "sha256": sha256_file(checkpoint / name)}
    (checkpoint / "complete.json").write_text(json.dumps(record))
    words = ["parallelism=zero2", f"hardware.gpus_per_node={ranks}"]
    words += ["training.resume_anyway=[world_size]"] if ranks == 1 else []
    ended = run_forked(command(tmp_path / "outputs", *words, f"training.resume={checkpoint}"))
    assert ended.exit_code == 4, ended.output
    assert f"{checkpoint / name} holds something that no checkpoint of a run needs" in ended.output
    assert not list(tmp_path.rglob(PROOF))
    assert not (Path.cwd() / PROOF).exists()


# What a rank of FSDP does with its shards, without the Trainer, which runs FSDP on GPUs alone.
FSDP = """
import os, pickle, sys
from pathlib import Path
from types import SimpleNamespace
from tunebook.train.rank_process import RankEnd

end = RankEnd()

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import fsdp_utils
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from tunebook.checkpoint.unpickling import restricted_unpickling
from tunebook.errors import DataError

source, folder, proof = sys.argv[1:]

class RunsCode:
    def __reduce__(self):
        return os.system, (f"touch {proof}",)

state = PartialState(cpu=True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
rank = SimpleNamespace(process_index=state.process_index, num_processes=2, wait_for_everyone=state.wait_for_everyone)

def make(seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, betas=(0.5, 0.6))
    model(torch.tensor([[seed, 2, 3]])).logits.sum().backward()
    optimizer.step()
    return model, optimizer

def flat(model, optimizer):
    states = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    tensors = [*model.parameters(), *states]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

model, optimizer = make(1)
saved = flat(model, optimizer)
fsdp_utils.save_fsdp_model(plugin, rank, model, folder)
fsdp_utils.save_fsdp_optimizer(plugin, rank, optimizer, model, folder)
(optimizers,), (models,) = Path(folder).glob("optimizer*"), Path(folder).glob("pytorch_model_fsdp_0")
for damaged in (None, models / ".metadata", optimizers / ".metadata"):
    state.wait_for_everyone()
    if damaged and rank.process_index == 0:
        whole = damaged.read_bytes()
        damaged.write_bytes(pickle.dumps(RunsCode()))
    state.wait_for_everyone()
    other, its_optimizer = make(2)
    try:
        with restricted_unpickling():
            fsdp_utils.load_fsdp_model(plugin, rank, other, folder)
            fsdp_utils.load_fsdp_optimizer(plugin, rank, its_optimizer, other, folder)
    except DataError as error:
        print(f"rank {state.process_index}: refused: {error.message}", flush=True)
    else:
        same = all(torch.equal(one, two) for one, two in zip(saved, flat(other, its_optimizer), strict=True))
        rate = its_optimizer.param_groups[0]["lr"]
        print(f"rank {state.process_index}: same {same}, rate {rate}, of {len(saved)} tensors", flush=True)
    state.wait_for_everyone()
    if damaged and rank.process_index == 0:
        damaged.write_bytes(whole)
state.destroy_process_group()
end.leave(0)
"""


def test_fsdps_shards_are_resumed_and_run_no_code(run_forked, layouts, tmp_path):
    (tmp_path / "resume.py").write_text(FSDP)
    base, folder = layouts.write_base(tmp_path / "base", layouts.TINY, "float32"), tmp_path / "shards"
    ended = run_forked([str(tmp_path / "resume.py"), str(base), str(folder), str(tmp_path / PROOF)], ranks=2)
    assert ended.exit_code == 0, ended.output
    (models,), (optimizers,) = folder.glob("pytorch_model_fsdp_0"), folder.glob("optimizer*")
    for rank in (0, 1):
        assert ended.output.count(f"rank {rank}: same True, rate 0.1, of ") == 1
        for place in (models, optimizers):
            assert f"rank {rank}: refused: {place / '.metadata'} holds something" in ended.output
    assert not list(tmp_path.rglob(PROOF))
