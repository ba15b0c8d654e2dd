"""Exports of what DeepSpeed and FSDP really write: trained by `tunebook train`, or sharded by two ranks over gloo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tunebook.checkpoint.export.weights import Form, read_weights

STEP = 20  # of the newest checkpoint
SHARD = """
import sys
from types import SimpleNamespace

from tunebook.train.rank_process import RankEnd

end = RankEnd()

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

source, folder = sys.argv[1:]
state = PartialState(cpu=True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
rank = SimpleNamespace(process_index=state.process_index, num_processes=2)
assert state.num_processes == 2
for kind in ("full", "lora"):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    layers = model.model.layers
    if kind == "lora":
        torch.manual_seed(1)
        modules = ["q_proj", "down_proj"]
        settings = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
        model = get_peft_model(model, settings)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    assert type(model).__name__.startswith("FSDP")
    save_fsdp_model(plugin, rank, model, f"{folder}/{kind}", adapter_only=kind == "lora")
state.destroy_process_group()
end.leave(0)
"""


def without_gathered(layouts: Any, folder: Path) -> None:
    """Leave a run with a checkpoint that holds partitions alone, as without gathering."""
    checkpoint = folder / "checkpoints" / f"checkpoint-{STEP}"
    for name in ("model", "adapter_model"):
        (checkpoint / f"{name}.safetensors").unlink(missing_ok=True)
    shutil.rmtree(folder / "model")
    layouts.write_record(checkpoint)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_partitions_of_deepspeed_are_what_it_gathers(
    run_forked: Any, saved_by: Any, layouts: Any, tmp_path: Path, stage: int
) -> None:
    folder = tmp_path / "quickstart" / "run"
    shutil.copytree(saved_by(f"zero{stage}").folder, folder)
    checkpoint = folder / "checkpoints" / f"checkpoint-{STEP}"
    gathered = load_file(checkpoint / "model.safetensors")
    partitions = read_weights(checkpoint, Form.zero, is_adapter=False)
    for name, tensor in gathered.items():
        assert torch.equal(partitions[name], tensor), name
    without_gathered(layouts, folder)
    ended = run_forked(["tunebook", "export", str(folder), "--to", str(tmp_path / "out")])
    assert ended.exit_code == 0, ended.output
    assert "(ZeRO's partitions)" in ended.output
    assert "it equals the checkpoint bit for bit" in ended.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], gathered[name]) for name in found)
    again = run_forked(["tunebook", "export", str(folder), "--to", str(tmp_path / "out")])
    assert again.exit_code == 2
    assert "an export never writes over anything" in again.output


def test_an_exported_folder_is_evaluated_with_what_its_run_was_trained_with(
    run_forked: Any, saved_by: Any, tmp_path: Path
) -> None:
    folder, out = saved_by("zero2").folder, tmp_path / "out"
    ended = run_forked(["tunebook", "export", str(folder), "--checkpoint", str(STEP), "--to", str(out)])
    assert ended.exit_code == 0, ended.output
    (tmp_path / "outputs").mkdir()
    words = [
        "tunebook",
        "eval",
        f"model={out}",
        "suite=quickstart",
        "--limit",
        "2",
        "--outputs",
        str(tmp_path / "outputs"),
    ]
    ended = run_forked(words)
    assert ended.exit_code == 0, ended.output
    record = json.loads(next((tmp_path / "outputs").rglob("eval-*.json")).read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert record["bound"]["to"] == f"quickstart/{folder.name}"
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        assert record["bound"][key] == manifest[key]
    with (out / "chat_template.jinja").open("a") as stream:
        stream.write("{{ 1 }}")
    ended = run_forked(words)
    assert ended.exit_code == 4, ended.output
    assert "the chat template is not the one that the run quickstart/" in " ".join(ended.output.split())


def test_two_ranks_shards_of_fsdp_are_exported_and_merged(run_forked: Any, layouts: Any, tmp_path: Path) -> None:
    (tmp_path / "shard.py").write_text(SHARD)
    base = layouts.write_base(tmp_path / "base", {}, "float32")
    ended = run_forked([str(tmp_path / "shard.py"), str(base), str(tmp_path)], ranks=2)
    assert ended.exit_code == 0, ended.output
    for kind in ("full", "lora"):
        assert len(list((tmp_path / kind / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    whole, sharded = load_file(base / "model.safetensors"), read_weights(tmp_path / "full", Form.fsdp, is_adapter=False)
    for name, tensor in whole.items():
        assert torch.equal(sharded[name], tensor), name
    folder = layouts.write_run(tmp_path / "run", base, peft="lora")
    shutil.copytree(tmp_path / "lora", folder / "checkpoints" / "checkpoint-2")
    layouts.write_record(folder / "checkpoints" / "checkpoint-2")
    ended = run_forked(["tunebook", "export", str(folder), "--merge", "--to", str(tmp_path / "merged")])
    assert ended.exit_code == 0, ended.output
    assert "FSDP's sharded checkpoint" in ended.output
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    adapter = read_weights(tmp_path / "lora", Form.fsdp, is_adapter=True)
    name = "model.layers.1.self_attn.q_proj"
    names = [f"base_model.model.{name}.lora_{part}.weight" for part in "AB"]
    first, second = (adapter[name] for name in names)
    torch.testing.assert_close(merged[f"{name}.weight"], whole[f"{name}.weight"] + second @ first * (8 / 4))
    origin = json.loads((tmp_path / "merged" / "tunebook.json").read_text())
    assert (origin["is_merged"], origin["step"], origin["num_parameters"]) == (True, 2, 1_046_592)
