"""Runs and checkpoints as each strategy lays them out, of any size: for the tests here and in `tests/system`.

Weights are random. ZeRO's and FSDP's files hold what an export reads of them; real ones are tried in `tests/system`.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.checkpoint.record import (
    RECORD_FILE,
    CheckpointRecord,
    FileEntry,
    Identity,
    checkpoint_path,
    list_files,
)
from tunebook.config.choices import Attention, Checkpointing, Compute, Generation, PeftMethod, ScheduleName, Switch
from tunebook.config.frozen import config_to_yaml, load_config, plain_config
from tunebook.config.schema import (
    ActivationConfig,
    AttentionConfig,
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    PeftSettings,
    PrecisionConfig,
    ScheduleConfig,
    TrainingConfig,
)
from tunebook.data.template import template_hash
from tunebook.files import atomic_write_json, sha256_file
from tunebook.model.adapters import adapter_config
from tunebook.model.tokenizer import load_tokenizer, tokenizer_hash
from tunebook.record.manifest import read_manifest, system_prompt_hash

ROOT = Path(__file__).resolve().parents[3]
STEP = 3
RANKS = 2
RANK = 4  # of the adapters
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
Tensors = dict[str, torch.Tensor]


def write_base(folder: Path, sizes: dict[str, Any], dtype: str) -> Path:
    """A base model with the quickstart's tokenizer and random weights."""
    shutil.copytree(ROOT / "recipes" / "quickstart" / "model", folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype} | sizes
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: value.to(getattr(torch, dtype)) for name, value in drawn(folder, seed=0).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_run(folder: Path, base: Path, *, peft: str = "full", state: str = "finished", **peft_settings: Any) -> Path:
    """A run folder without a model or a checkpoint."""
    folder.mkdir(parents=True)
    adapted: dict[str, Any] = {"rank": RANK, "alpha": 8, "target_modules": ["q_proj", "down_proj"]} | peft_settings
    config = plain_config(
        recipe="tiny",
        model=ModelConfig(path=str(base)),
        dataset=DatasetConfig(path="train.jsonl"),
        hardware=HardwareConfig(generation=Generation.cpu, gpus_per_node=1),
        precision=PrecisionConfig(compute=Compute.fp32, tf32=Switch.disabled),
        attention=AttentionConfig(implementation=Attention.sdpa),
        activation=ActivationConfig(checkpointing=Checkpointing.disabled),
        peft=PeftSettings(method=PeftMethod[peft], **adapted),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        schedule=ScheduleConfig(name=ScheduleName.constant),
        training=TrainingConfig(global_samples=8, max_length=256, num_epochs=2, seed=1),
    )
    (folder / "run.yaml").write_text(config_to_yaml(config))
    (folder / "plan.json").write_text("{}")
    status = {"state": state, "exit_code": 0, "reason": None, "started": "2026-01-01T00:00:00+00:00", "step": STEP}
    manifest = {
        "format": 1, "recipe": "tiny", "title": "A tiny run", "status": status, "config_sha256": "d" * 64,
        "world_size": RANKS, "model": {"weights_fingerprint": None}, **trained_with(),
    }  # fmt: skip
    atomic_write_json(folder / "manifest.json", manifest)
    return folder


def change_manifest(run: Path, **facts: Any) -> None:
    """Replace facts of a run's manifest, and add those of its status."""
    manifest = read_manifest(run)
    status = manifest["status"] | facts.pop("status", {})
    atomic_write_json(run / "manifest.json", manifest | facts | {"status": status})


@functools.cache
def trained_with() -> dict[str, str | None]:
    """What a manifest records of the quickstart's tokenizer, which every base here has."""
    tokenizer = load_tokenizer(ModelConfig(path="book:recipes/quickstart/model"))
    return {
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "chat_template_sha256": template_hash(tokenizer),
        "system_prompt_sha256": system_prompt_hash(None),
    }


def base_of(run: Path) -> Path:
    """The base model's folder."""
    line = next(line for line in (run / "run.yaml").read_text().splitlines() if line.startswith("  path: "))
    return Path(line.removeprefix("  path: "))


def drawn(base: Path, seed: int) -> Tensors:
    """A whole model's random fp32 weights, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    tied = set(model.all_tied_weights_keys)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(tensor.shape).normal_(0, 0.1, generator=generator)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def drawn_adapter(run: Path, seed: int) -> tuple[Tensors, Any]:
    """An adapter's random fp32 weights by their names in its file, and its settings."""
    from peft import get_peft_model, get_peft_model_state_dict

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base_of(run)))
        settings = adapter_config(load_config(run / "run.yaml"))
        assert settings is not None
        settings.base_model_name_or_path = str(base_of(run))
        adapted = get_peft_model(base, settings)
    generator = torch.Generator().manual_seed(seed)
    named = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    weights = {name: torch.empty(value.shape).normal_(0, 0.1, generator=generator) for name, value in named.items()}
    return weights, settings


def trained(run: Path, form: str, dtype: str = "float32") -> Tensors:
    """What a checkpoint of a form holds, by the names in its safetensors."""
    weights = drawn_adapter(run, 1)[0] if "adapter" in form else drawn(base_of(run), 1)
    return {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}


def write_checkpoint(run: Path, form: str, dtype: str = "float32", *, step: int = STEP) -> Path:
    """A complete checkpoint in a form: whole, zero2, zero3, fsdp, adapter, zero3_adapter or fsdp_adapter."""
    folder = checkpoint_path(run / "checkpoints", step)
    folder.mkdir(parents=True)
    weights = trained(run, form, dtype)
    if form == "whole":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif form == "adapter":
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        drawn_adapter(run, 1)[1].save_pretrained(str(folder))
    elif form.startswith("zero"):
        write_zero(folder, _as_shards_name(weights, form), stage=int(form[4]))
    else:
        write_fsdp(folder, _as_shards_name(weights, form) if form == "fsdp_adapter" else weights)
    if not form.startswith("fsdp"):  # accelerate saves nothing else there
        for name in (*TOKENIZER_FILES, *(() if "adapter" in form else ("config.json",))):
            shutil.copy2(base_of(run) / name, folder)
    write_record(folder)
    return folder


def _as_shards_name(weights: Tensors, form: str) -> Tensors:
    """Shards of an adapter carry its name, `default`."""
    if "adapter" not in form:
        return weights
    return {name.replace(".weight", ".default.weight"): weight for name, weight in weights.items()}


def write_zero(folder: Path, weights: Tensors, *, stage: int, ranks: int = RANKS) -> None:
    """ZeRO's partitions of fp32 masters, in two groups as the Trainer's optimizer has them."""
    partitions = folder / "global_step3"
    partitions.mkdir()
    (folder / "latest").write_text("global_step3")
    names = list(weights)
    groups = [[name for name in names if weights[name].dim() > 1], [n for n in names if weights[n].dim() <= 1]]
    shapes = [{name: weights[name].shape for name in group} for group in groups if group]
    cut: Callable[[Tensors, int, int], list[torch.Tensor]] = _stage_3 if stage == 3 else _stage_1_or_2
    pieces = [cut({name: weights[name] for name in group}, rank, ranks) for rank in range(ranks) for group in shapes]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(ranks):
        mine = [piece for found in pieces[rank * len(shapes) : (rank + 1) * len(shapes)] for piece in found]
        state = {"zero_stage": stage, "partition_count": ranks if stage == 3 else [ranks] * len(shapes), key: mine}
        torch.save({"optimizer_state_dict": state}, partitions / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {"param_shapes": shapes, "shared_params": {}, "module": {}, "buffer_names": []}
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(model, partitions / name)


def _stage_1_or_2(weights: Tensors, rank: int, ranks: int) -> list[torch.Tensor]:
    joined = torch.cat([weight.flatten() for weight in weights.values()])
    aligned = 2 * ranks * math.ceil(joined.numel() / (2 * ranks))
    padded = torch.nn.functional.pad(joined, (0, aligned - joined.numel()))
    return [padded.chunk(ranks)[rank].clone()]


def _stage_3(weights: Tensors, rank: int, ranks: int) -> list[torch.Tensor]:
    """In two subgroups of whole parameters."""
    shares = []
    for weight in weights.values():
        length = math.ceil(weight.numel() / ranks)
        padded = torch.nn.functional.pad(weight.flatten(), (0, length * ranks - weight.numel()))
        shares.append(padded[rank * length : (rank + 1) * length])
    half = len(shares) // 2
    return [torch.cat(part) for part in (shares[:half], shares[half:]) if part]


def write_fsdp(folder: Path, weights: Tensors) -> None:
    """A sharded checkpoint of one process, by the calls that accelerate makes."""
    import torch.distributed.checkpoint as dist_cp

    sharded = folder / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        dist_cp.save({"model": weights}, storage_writer=dist_cp.FileSystemWriter(sharded), no_dist=True)


def write_record(folder: Path) -> None:
    """The record that makes a checkpoint complete."""
    (folder / RECORD_FILE).unlink(missing_ok=True)
    files = {name: FileEntry(size=size, sha256=sha256_file(folder / name)) for name, size in list_files(folder).items()}
    identity = Identity(
        strategy="single", peft="full", world_size=RANKS, model={}, config_sha256="c", settings={},
        data_sha256="f", tokenizer_sha256=None, chat_template_sha256=None,
    )  # fmt: skip
    step = int(folder.name.rpartition("-")[2])
    record = CheckpointRecord(step=step, saved="now", seconds=0.0, versions={}, identity=identity, files=files)
    atomic_write_json(folder / RECORD_FILE, asdict(record))
