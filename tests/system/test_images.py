"""Images on two ranks over gloo: a rank without an image computes with the other, and the loss is that of one rank.

accelerate leaves FSDP2 out on a CPU, so the model is sharded here as accelerate does it on GPUs: blocks, then the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.image_models import FAMILIES, draw_image, write_model
from tunebook.data.sampler import epoch_order

NUM_STEPS, SEED = 6, 3
SETTINGS = [
    "evaluation=none", "hardware=cpu", "model.weights=pretrained", "training.global_samples=2", f"training.seed={SEED}",
    "training.micro_batch_size=1", "training.max_length=256", f"training.max_steps={NUM_STEPS}",
    "optimizer.learning_rate=1e-3", "schedule.warmup_steps=0", "training.log_every_steps=1", "packing=padded",
]  # fmt: skip

SHARDED = """
import json, sys
from tunebook.train.rank_process import RankEnd
end = RankEnd()
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from PIL import Image
from tunebook.config.schema import ModelConfig
from tunebook.model.blocks import transformer_blocks
from tunebook.model.processor import load_image_processor
from tunebook.model.tokenizer import load_tokenizer
from tunebook.train.image_batches import ImageCollator

torch.distributed.init_process_group("gloo")
rank, settings = torch.distributed.get_rank(), ModelConfig(path=sys.argv[1])
tokenizer = load_tokenizer(settings)
processor = load_image_processor(settings, tokenizer)
collate = ImageCollator(DataCollatorForLanguageModeling(pad_token_id=0), processor, needs_image=True)
image = tokenizer(processor.text_of_size((60, 40)), add_special_tokens=False)["input_ids"]
def batch(has_image):
    ids = [40, 41, *(image if has_image else []), 42, 43, 44]
    row = {"input_ids": ids, "labels": [-100] * (len(ids) - 3) + ids[-3:], "seq_lengths": [len(ids)]}
    return collate.with_images([row], [Image.new("RGB", (60, 40), "red")] if has_image else [])
def load():
    return AutoModelForImageTextToText.from_pretrained(settings.path, dtype=torch.float32)
whole = load()
expected = sum(whole(**batch(has_image)).loss for has_image in (True, False)) / 2
expected.backward()
model, mesh = load(), init_device_mesh("cpu", (2,))
units = [*transformer_blocks(model).values()]
for part in [*units, model]:
    fully_shard(part, mesh=mesh)
loss = model(**batch(rank == 0)).loss
loss.backward()
difference = 0.0
for (name, own), other in zip(model.named_parameters(), whole.parameters(), strict=True):
    if own.grad is not None:
        difference = max(difference, (own.grad.full_tensor() - other.grad).abs().max().item())
total = loss.detach().clone()
torch.distributed.all_reduce(total)
if rank == 0:
    print(json.dumps({
        "loss": total.item() / 2, "expected": expected.item(), "difference": difference,
        "units": sorted({type(unit).__name__.removeprefix("FSDP") for unit in units}),
    }))
torch.distributed.destroy_process_group()
end.leave(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL, and twelve documents of which every second one has an image."""
    folder = tmp_path_factory.mktemp("images")
    family = FAMILIES["qwen2_5_vl"]
    write_model(folder / "model", family, template=f"{family.template}_training")
    draw_image(0, 60, 40).save(folder / "a.png")
    lines = []
    for number in range(2 * NUM_STEPS):
        images = ["a.png"] * (number % 2)
        turns = [{"role": "user", "content": f"{'<image>' * len(images)}What is {number}?"}]
        turns += [{"role": "assistant", "content": f"It is {number}."}]
        lines.append({"messages": turns, "images": images})
    pairs = epoch_order(2 * NUM_STEPS, SEED, 0).reshape(NUM_STEPS, 2)
    assert 1 in pairs.sum(axis=1) % 2, "a step of one document with an image and one without"
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def losses_of(run_forked: Any, read_run: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def train(strategy: str, ranks: int, parts: str) -> list[float]:
        outputs = tmp_path_factory.mktemp("outputs")
        ended = run_forked([
            "tunebook", "train", str(folder / "train.jsonl"), f"model={folder / 'model'}", *SETTINGS,
            f"model.train=[{parts}]", f"parallelism={strategy}", f"hardware.gpus_per_node={ranks}",
            f"outputs={outputs}",
        ])  # fmt: skip
        assert ended.exit_code == 0, ended.output
        losses: list[float] = read_run(outputs / "train" / "latest").losses
        return losses

    return train


@pytest.fixture(scope="module")
def one_rank(losses_of: Any) -> dict[str, list[float]]:
    return {parts: losses_of("single", 1, parts) for parts in ("language", "language,vision")}


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("ddp", "language,vision"),
        ("zero3", "language"),
        pytest.param("ddp", "language", marks=pytest.mark.slow),
        pytest.param("zero2", "language,vision", marks=pytest.mark.slow),
        pytest.param("zero3", "language,vision", marks=pytest.mark.slow),
    ],
)
def test_a_rank_without_an_image_trains_with_the_others(
    losses_of: Any, one_rank: dict[str, list[float]], strategy: str, parts: str
) -> None:
    losses = losses_of(strategy, 2, parts)
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(one_rank[parts], rel=1e-5)


def test_fsdp_has_units_of_the_tower_and_a_rank_without_an_image(run_forked: Any, folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARDED)
    done = run_forked([str(program), str(folder / "model")], ranks=2)
    assert done.exit_code == 0, done.output
    (found,) = (json.loads(line) for line in done.output.splitlines() if line.startswith("{"))
    assert found["units"] == ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["difference"] < 1e-6
