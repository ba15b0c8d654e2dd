"""Training on images: the losses of TRL's own trainer, the parts that are trained, and batches without an image."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from PIL import Image
from torch.utils.data import SequentialSampler
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.image_models import FAMILIES, draw_image, load_processor, write_model
from tunebook.config.choices import ModelPart, PackingMode, PeftMethod, Weights
from tunebook.config.schema import DatasetConfig, ModelConfig, PackingConfig, PeftSettings, TrainingConfig
from tunebook.data.sampler import epoch_order
from tunebook.model.adapters import adapter_config, see_without_gradients
from tunebook.model.processor import load_image_processor
from tunebook.model.tokenizer import load_tokenizer
from tunebook.plan.architecture import read_facts
from tunebook.train.image_batches import ImageCollator, image_workers

from .conftest import base_config, losses, same_weights, weights

STEPS, ROWS = 20, 2
IMAGES = {"0.png": (0, 60, 40), "1.png": (1, 40, 60), "2.png": (2, 100, 30)}  # seed, width and height


@pytest.fixture(scope="module", params=FAMILIES)
def model_folder(request, tmp_path_factory):
    """A tiny model with weights."""
    family = FAMILIES[request.param]
    return write_model(
        tmp_path_factory.mktemp("models") / request.param, family, template=f"{family.template}_training"
    )


@pytest.fixture(scope="module")
def picture_documents(tmp_path_factory):
    """Forty documents with one, two or no images, in the form of LLaMA-Factory."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, drawn in IMAGES.items():
        draw_image(*drawn).save(folder / name)
    documents = []
    for number in range(STEPS * ROWS):
        names = [f"{(number + place) % 3}.png" for place in range(number % 3)]
        question = f"{'<image>' * len(names)}What is {number}?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {number * 7}."}]
        documents.append({"messages": turns, "images": names})
    (folder / "train.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    return folder / "train.jsonl"


def image_config(folder, documents):
    """Twenty steps of two documents."""
    config = base_config(folder, documents)
    model = ModelConfig(path=str(folder), weights=Weights.pretrained)
    return replace(
        config,
        model=replace(model, facts=read_facts(model)),
        packing=PackingConfig(mode=PackingMode.padded),
        training=TrainingConfig(
            global_samples=ROWS, micro_batch_size=ROWS, max_length=512, num_epochs=1, seed=1, save_every_steps=10
        ),
        dataset=DatasetConfig(path=str(documents), num_workers=1),
    )


class InOrder(SFTTrainer):
    """TRL's trainer without its own order of documents."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def losses_of_trl(folder, documents, config, tmp_path):
    """The losses of TRL's trainer on the same documents in the same order."""
    read = [json.loads(line) for line in documents.read_text().splitlines()]
    rows = []
    for number in epoch_order(len(read), config.training.seed, 0):
        document = read[number]
        question, answer = document["messages"]
        turns = [question | {"content": question["content"].replace("<image>", "")}, answer]
        rows.append({"messages": turns, "images": [draw_image(*IMAGES[name]) for name in document["images"]]})
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.language_model.", "model.text_model.", "lm_head.")))
    optimizer = config.optimizer
    trainer = InOrder(
        model,
        SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=ROWS,
            num_train_epochs=1,
            learning_rate=optimizer.learning_rate,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_epsilon=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=config.training.max_grad_norm,
            lr_scheduler_type="constant",
            warmup_steps=0,
            logging_steps=1,
            assistant_only_loss=True,
            max_length=None,
            activation_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            seed=1,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_processor(folder, load_tokenizer(ModelConfig(path=str(folder)))),
    )
    trainer.train()
    return losses(trainer.state.log_history)


def test_losses_are_those_of_trl(model_folder, picture_documents, train_in, tmp_path):
    config = image_config(model_folder, picture_documents)
    _, code, lines = train_in(tmp_path / "run", config)
    assert code == 0
    expected = losses_of_trl(model_folder, picture_documents, config, tmp_path / "trl")
    assert len(expected) == STEPS and expected[-1] < expected[0]
    assert losses(lines) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The tiny Qwen2.5-VL alone."""
    family = FAMILIES["qwen2_5_vl"]
    return write_model(tmp_path_factory.mktemp("models") / "qwen", family, template=f"{family.template}_training")


@pytest.mark.parametrize("mode", [PackingMode.padded, PackingMode.isolated])
def test_a_resumed_run_ends_with_the_same_bits(qwen, picture_documents, run, tmp_path, mode):
    config = image_config(qwen, picture_documents)
    config = replace(config, packing=PackingConfig(mode=mode), training=replace(config.training, micro_batch_size=1))
    whole, code, lines = run(config, "whole")
    assert code == 0
    shutil.copytree(whole / "checkpoints" / "checkpoint-10", tmp_path / "run" / "checkpoints" / "checkpoint-10")
    folder, code, resumed = run(config)
    assert code == 0
    assert losses(resumed) == losses(lines)[10:]
    assert same_weights(whole / "model", folder / "model")
    processor = load_image_processor(ModelConfig(path=str(folder / "model")), load_tokenizer(config.model))
    assert processor.text_of_size((60, 40)).startswith("<|image_pad|>"), "a trained model reads images on its own"


def test_a_model_for_images_keeps_its_processor_where_the_data_is_text(qwen, run, tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (tmp_path / "text.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 2)
    config = image_config(qwen, tmp_path / "text.jsonl")
    folder, code, _ = run(config)
    assert code == 0
    assert load_image_processor(ModelConfig(path=str(folder / "model")), load_tokenizer(config.model)).token_ids


@pytest.mark.parametrize(
    ("parts", "peft", "changed"),
    [
        (["language"], PeftMethod.full, {"language"}),
        (["language", "vision", "projector"], PeftMethod.full, {"language", "vision", "projector"}),
        (["projector"], PeftMethod.full, {"projector"}),
        (["language"], PeftMethod.lora, {"language"}),
        (["language", "projector"], PeftMethod.lora, {"language", "projector"}),
    ],
)
def test_the_parts_that_are_named_are_trained(qwen, picture_documents, train_in, tmp_path, parts, peft, changed):
    config = image_config(qwen, picture_documents)
    config = replace(
        config,
        model=replace(config.model, train=[ModelPart[part] for part in parts]),
        peft=PeftSettings(method=peft),
        training=replace(config.training, max_steps=2),
    )
    folder, code, _ = train_in(tmp_path / "run", config)
    assert code == 0
    after = weights(folder / "model")
    if peft is PeftMethod.full:
        before = weights(qwen)
        differing = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    else:
        differing = set(after)
    assert {part_of(name) for name in differing} == changed


def test_a_frozen_tower_is_not_recomputed_and_gradients_are_the_same(qwen, picture_documents):
    config = image_config(qwen, picture_documents)
    config = replace(config, peft=PeftSettings(method=PeftMethod.lora))
    tokenizer = load_tokenizer(config.model)
    processor = load_image_processor(config.model, tokenizer)
    ids, image = processor.blank()
    row = {"input_ids": np.array(ids), "labels": np.array(ids), "seq_lengths": [len(ids)]}
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    batch = ImageCollator(collate, processor).with_images([row], [image])
    found = []
    for change in (lambda *_: None, see_without_gradients):
        model = AutoModelForImageTextToText.from_pretrained(qwen, dtype=torch.float32)
        torch.manual_seed(0)
        adapted = get_peft_model(model, adapter_config(config, model))
        change(config, model)
        adapted.train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        with FlopCounterMode(display=False) as counter:
            adapted(**batch, use_cache=False).loss.backward()
        grads = {name: each.grad for name, each in adapted.named_parameters() if each.requires_grad}
        found.append((grads, counter.get_total_flops()))
    (expected, before), (grads, after) = found
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
    assert after < before


def part_of(name):
    return "projector" if "merger" in name else "vision" if "visual" in name else "language"


def test_pixels_in_the_format_of_the_computation_give_the_same_logits(model_folder):
    """Half the bytes, and no other number: the first layer rounds them so."""
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder)))
    processor = load_image_processor(ModelConfig(path=str(model_folder)), tokenizer)
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    ids, blank = processor.blank()
    noise = np.random.default_rng(0).integers(0, 256, (*blank.size[::-1], 3), dtype=np.uint8)
    row = {"input_ids": np.array(ids), "labels": np.array(ids), "seq_lengths": [len(ids)]}
    batches = [
        ImageCollator(collate, processor, dtype=dtype).with_images([dict(row)], [Image.fromarray(noise)])
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert [batch["pixel_values"].dtype for batch in batches] == [torch.float32, torch.bfloat16]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, logits = (model(**batch).logits for batch in batches)
    assert torch.equal(logits, expected)


def test_a_batch_without_an_image_gets_one_that_changes_no_loss(model_folder):
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    settings = ModelConfig(path=str(model_folder))
    tokenizer = load_tokenizer(settings)
    processor = load_image_processor(settings, tokenizer)
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    rows = [
        {"input_ids": np.array(ids), "labels": np.array([-100, *ids[1:]]), "seq_lengths": [len(ids)]}
        for ids in ([10, 20, 30, 40, 50], [60, 70, 80])
    ]
    plain = ImageCollator(collate, processor)([dict(row) for row in rows])
    filled = ImageCollator(collate, processor, needs_image=True)([dict(row) for row in rows])
    assert "pixel_values" not in plain and len(filled["pixel_values"])
    with torch.no_grad():
        expected, loss = model(**plain).loss, model(**filled).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(16, 1, 8), (32, 8, 3), (2, 4, 1)])
def test_ranks_share_the_cores_that_read_images(cores, ranks, workers, monkeypatch):
    monkeypatch.setattr("tunebook.train.image_batches.own_cores", lambda: [*range(cores)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert image_workers() == workers
