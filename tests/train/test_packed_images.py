"""Packed rows with images: a row gives the loss of its documents alone, and the leak probe sees a row that does not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.image_models import FAMILIES, draw_image, write_model
from tunebook.config.choices import Attention, PackingMode, Weights
from tunebook.config.schema import AttentionConfig, DatasetConfig, ModelConfig, PackingConfig, TrainingConfig
from tunebook.data.prepare import prepare
from tunebook.data.sampler import IMAGES, DocumentRows
from tunebook.errors import RequestError
from tunebook.facts.attention import BY_DOCUMENT
from tunebook.model.positions import position_by_document
from tunebook.model.processor import load_image_processor
from tunebook.model.tokenizer import load_tokenizer
from tunebook.model.varlen_attention import register
from tunebook.plan.architecture import read_facts
from tunebook.train.image_batches import ImageCollator

from .conftest import base_config, losses, outcome

SIZES = [(60, 40), (40, 60), (100, 30)]
PACKED = [name for name in FAMILIES if name != "gemma3"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Twelve documents with one, two or no images."""
    folder = tmp_path_factory.mktemp("pictures")
    for seed, size in enumerate(SIZES):
        draw_image(seed, *size).save(folder / f"{seed}.png")
    lines = []
    for number in range(12):
        names = [f"{(number + place) % 3}.png" for place in range(number % 3)]
        turns = [{"role": "user", "content": f"{'<image>' * len(names)}What is {number}?"}]
        turns += [{"role": "assistant", "content": f"It is {number * 7}."}]
        lines.append({"messages": turns, "images": names})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "train.jsonl"


def packed_config(folder, documents, mode=PackingMode.isolated, **training):
    """Two steps of six documents."""
    config = base_config(folder, documents)
    model = ModelConfig(path=str(folder), weights=Weights.pretrained)
    settings = {"global_samples": 6, "micro_batch_size": 1, "max_length": 512, "num_epochs": 1, "seed": 1}
    return replace(
        config,
        model=replace(model, facts=read_facts(model)),
        packing=PackingConfig(mode=mode),
        training=TrainingConfig(**settings | training),
        dataset=DatasetConfig(path=str(documents), num_workers=1),
    )


def model_of(tmp_path, name):
    family = FAMILIES[name]
    return write_model(tmp_path / name, family, template=f"{family.template}_training")


@pytest.mark.parametrize("attention", [Attention.sdpa, BY_DOCUMENT])
@pytest.mark.parametrize("name", PACKED)
def test_a_row_gives_the_loss_of_its_documents_alone(name, attention, documents, tmp_path):
    folder = model_of(tmp_path, name)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    processor = load_image_processor(ModelConfig(path=str(folder)), tokenizer)
    prepared = prepare(packed_config(folder, documents)).train.load()
    rows = DocumentRows(prepared, filler_token_id=0)
    register(BY_DOCUMENT)
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation={"text_config": attention.value}
    ).eval()
    position_by_document(model)

    def summed(row):
        collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id, padding_free=True)
        batch = ImageCollator(collate, processor)([rows[row]])
        labels = batch.pop("labels")[0]
        with torch.no_grad():
            log_probs = model(**batch, use_cache=False).logits[0].double().log_softmax(-1)
        places = (labels[1:] != -100).nonzero()[:, 0]
        return -log_probs[places, labels[places + 1]].sum().item(), len(places)

    together, num_tokens = summed([1, 0, 2, 5, 4])
    alone = [summed([document]) for document in (1, 0, 2, 5, 4)]
    assert num_tokens == sum(number for _, number in alone)
    assert together / num_tokens == pytest.approx(sum(loss for loss, _ in alone) / num_tokens, abs=1e-6)
    assert len(rows[[1, 0, 2, 5, 4]][IMAGES]) == 6


@pytest.mark.parametrize("name", PACKED)
def test_packed_training_has_the_losses_of_padded_rows(name, documents, train_in, tmp_path):
    folder = model_of(tmp_path, name)
    runs = {}
    for mode in PackingMode.isolated, PackingMode.padded:
        _, code, lines = train_in(tmp_path / mode.name, packed_config(folder, documents, mode))
        assert code == 0
        runs[mode] = losses(lines)
    assert len(runs[PackingMode.isolated]) == 2
    assert runs[PackingMode.isolated] == pytest.approx(runs[PackingMode.padded], rel=1e-6)


def test_gemma_needs_a_mask(documents, tmp_path):
    config = packed_config(model_of(tmp_path, "gemma3"), documents, PackingMode.padded)
    with pytest.raises(RequestError) as caught:
        prepare(replace(config, attention=AttentionConfig(implementation=Attention.flash_attention_2)))
    assert caught.value.problem_id == "images-without-mask"


def test_gemma_is_refused_and_the_probe_sees_why(documents, train_in, tmp_path, monkeypatch):
    config = packed_config(model_of(tmp_path, "gemma3"), documents)
    with pytest.raises(RequestError) as caught:
        prepare(config)
    assert caught.value.problem_id == "images-packed"
    architecture = config.model.facts.architecture
    monkeypatch.setattr("tunebook.data.prepare.PACKED_IMAGE_ARCHITECTURES", frozenset({architecture}))
    run, code, _ = train_in(tmp_path / "run", config)
    assert code == 7, outcome(run)


def test_the_probe_sees_a_mask_of_the_whole_row(documents, train_in, tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook.train.build.position_by_document", lambda model: None)
    run, code, _ = train_in(tmp_path / "run", packed_config(model_of(tmp_path, "qwen2_5_vl"), documents))
    assert code == 7, outcome(run)
