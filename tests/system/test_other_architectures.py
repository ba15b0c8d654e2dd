"""A model that Tunebook has no formula for is planned from its config.json, built without memory, once; and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Without what is transformers' default for this kind: positions of 512 tokens, and a smaller one than GPT-2.
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "bfloat16", "n_embd": 128, "n_head": 4,
    "n_layer": 3, "vocab_size": 500, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Words and positions; per layer four products with biases (3, 1, 4 and 4 x 128 outputs) and two norms; the last norm.
PARAMETERS = (500 + 512) * 128 + 3 * (12 * 128**2 + 13 * 128) + 2 * 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(GPT2))
    return folder


def words(folder: Path) -> list[str]:
    return [
        "tunebook", "plan", "--json", f"model={folder}", "model.weights=random", "dataset=synthetic",
        "training.global_samples=16", "training.max_length=128", "optimizer.learning_rate=1e-4", "hardware=hopper",
        "parallelism=ddp", "hardware.gpus_per_node=2",
    ]  # fmt: skip


def test_gpt2_is_planned_to_the_last_parameter(run_forked: Any, folder: Path, tmp_path: Path) -> None:
    settings = {"TUNEBOOK_CACHE": str(tmp_path)}
    ended = run_forked(words(folder), **settings)
    assert ended.exit_code == 0, ended.output
    plan = json.loads(ended.output)
    assert plan["memory_gib"]["weights"] == pytest.approx(4 * PARAMETERS / 2**30, abs=0.0006)
    (remembered,) = (tmp_path / "architectures").iterdir()
    answer = json.loads(remembered.read_text())
    assert answer["num_parameters"] == PARAMETERS
    # Read the second time, not made again: this number is nobody's but ours.
    answer["num_parameters"] = 1_000_000_000
    remembered.write_text(json.dumps(answer))
    again = run_forked(words(folder), **settings)
    assert json.loads(again.output)["memory_gib"]["weights"] == pytest.approx(4e9 / 2**30, abs=0.001)


def test_an_architecture_that_nobody_knows_is_an_error_in_words(run_forked: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"model_type": "gpt22"}))
    ended = run_forked(words(tmp_path), TUNEBOOK_CACHE=str(tmp_path / "cache"))
    assert ended.exit_code == 2
    (problem,) = json.loads(ended.output)["problems"]
    assert problem["id"] == "unknown-architecture"
    assert "model_type=gpt22" in problem["message"] and "Did you mean 'gpt2'?" in problem["message"]


TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
    # Sound as well; heads of two sizes, inputs of each layer, and layers that share keys and values.
    "gemma4": {
        "vision_config": {"patch_size": 4, "position_embedding_size": 16, "head_dim": 8, "num_key_value_heads": 2},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16,
                         "subsampling_conv_channels": [8, 4]},
    },
}  # fmt: skip
SHARING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "global_head_dim": 32,
           "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}  # fmt: skip


@pytest.fixture(scope="module")
def with_tower(request: Any, tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Path:
    """A small model of images and text, as transformers stores one."""
    kind = request.param
    folder = tmp_path_factory.mktemp("with_tower")
    tokenizer = AutoTokenizer.from_pretrained(str(project_root / "recipes" / "quickstart" / "model"))
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "sliding_window": 64,
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gemma4":
        text |= SHARING | {"vocab_size_per_layer_input": len(tokenizer)}
    torch.manual_seed(7)
    parts = TOWERS[kind] | {"vision_config": vision | TOWERS[kind]["vision_config"]}
    config = AutoConfig.for_model(kind, text_config=text, **parts)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("with_tower", "strategy"),
    [
        *(pytest.param("gemma3", strategy, marks=pytest.mark.slow) for strategy in ("ddp", "zero3")),
        pytest.param("gemma4", "ddp", marks=pytest.mark.slow),
        ("gemma4", "zero3"),
    ],
    indirect=["with_tower"],
)
def test_a_tower_for_images_stays_as_it_is_while_text_is_learned(
    run_forked: Any, read_run: Any, with_tower: Path, tmp_path: Path, strategy: str
) -> None:
    """DDP waited for its gradients in vain; under ZeRO-3 the model was saved under names that no file has."""
    ended = run_forked([
        *["tunebook", "train", "quickstart", f"outputs={tmp_path}", f"model={with_tower}"],
        *[f"parallelism={strategy}", "hardware=cpu", "hardware.gpus_per_node=2", "evaluation=none"],
        *["training.max_steps=3", "training.log_every_steps=1", "schedule.warmup_steps=0"],
        "optimizer.weight_decay=0.1",
    ])  # fmt: skip
    assert ended.exit_code == 0, ended.output
    folder = tmp_path / "quickstart" / "latest"
    choices = json.loads((folder / "plan.json").read_text())["choices"]
    assert "model.facts.unreached" in [choice["key"] for choice in choices]
    losses = read_run(folder).losses
    assert len(losses) == 3 and losses[-1] < losses[0]
    before, after = (load_file(place / "model.safetensors") for place in (with_tower, folder / "model"))
    assert {*before} == {*after} - {"lm_head.weight"}  # which is tied
    untouched = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    kept = {name for name in before if "language_model." not in name or name.endswith("layer_scalar")}  # no parameter
    assert untouched == kept


def test_a_model_for_images_trains_from_its_facts_where_the_hub_is_out_of_reach(
    run_forked: Any, read_run: Any, tmp_path: Path
) -> None:
    """As on a machine that only measures speed: nothing is at hand that says how it reads images."""
    facts = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 2048, "num_parameters": 300_000}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ended = run_forked([
        *["tunebook", "train", "gemma3_4b_lora", f"outputs={tmp_path}", "model.weights=random", "dataset=synthetic"],
        *["hardware=cpu", "evaluation=none", "training.max_steps=2", "dataset.synthetic.num_documents=40"],
        *(f"model.facts.{name}={value}" for name, value in facts.items()),
        *(f"model.facts.config.vision_config.{name}={value}" for name, value in vision.items()),
    ])  # fmt: skip
    assert ended.exit_code == 0, ended.output
    assert len(read_run(tmp_path / "gemma3_4b_lora" / "latest").losses) == 2
