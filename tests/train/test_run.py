"""One rank: its records, a loss that does not depend on the batching, and every ending with its exit code."""

from __future__ import annotations

import errno
import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from trl import DPOTrainer, SFTTrainer
from trl.trainer import dpo_trainer

from tunebook.config.choices import PackingMode, PeftMethod, Weights
from tunebook.data.prepared import load_prepared
from tunebook.data.sampler import epoch_order
from tunebook.errors import InvalidTrainingError, RequestError, StoppedError
from tunebook.evaluate.trained_model import load_trained
from tunebook.files import sha256_file
from tunebook.model.adapters import holds_model, is_adapter, with_adapter
from tunebook.model.load import load_model
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import run as train_run
from tunebook.train.endings import memory_ran_out
from tunebook.train.methods.dpo import PairTrainer
from tunebook.train.methods.sft import RecipeTrainer
from tunebook.train.rank_process import StopRequest

from .conftest import losses, outcome, weights

PHASES = ["launch", "data", "model", "join_ranks", "weights", "trainer", "wrap", "checks", "first_step"]


def test_upstream_still_has_the_methods_we_override():
    checkpoints = ("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "_load_best_model")
    resuming = ("create_scheduler", "_load_optimizer_and_scheduler", "_issue_warnings_after_load")
    losses = ("compute_loss", "log", "compute_loss_context_manager", "_determine_best_metric", "_save")
    for kinds in ((RecipeTrainer, SFTTrainer), (PairTrainer, DPOTrainer)):
        for name in ("get_train_dataloader", "evaluate", "create_model_card", *losses, *checkpoints, *resuming):
            ours, theirs = (inspect.signature(getattr(kind, name)) for kind in kinds)
            assert list(ours.parameters) == list(theirs.parameters), name
    items = [inspect.signature(kind._get_num_items_in_batch) for kind in (PairTrainer, DPOTrainer)]
    assert list(items[0].parameters) == list(items[1].parameters)
    assert [*inspect.signature(DPOTrainer._compute_loss).parameters] == ["self", "model", "inputs", "return_outputs"]
    assert callable(dpo_trainer.create_model_from_path)  # replaced while a trainer is made
    assert callable(SFTTrainer._run_epoch)  # ours hands on whatever it is given


# Records


def test_a_run_leaves_records_and_a_model_that_loads(whole, config, changed):
    folder, lines = whole
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert losses(lines)[-1] < losses(lines)[0]
    assert lines[2]["documents_seen"] == 24
    assert lines[-1]["epoch"] == 2.0
    assert lines[-1]["tokens_seen"] == 2 * lines[2]["tokens_seen"]
    assert lines[0]["padding_share"] == 0
    saved = {line["step"]: line["save_seconds"] for line in lines if "save_seconds" in line}
    assert sorted(saved) == [3, 5] and saved[5] > 0  # in the line after the save
    assert (outcome(folder)["exit_code"], outcome(folder)["reason"], outcome(folder)["step"]) == (0, "finished", 6)
    trained = changed(config, model={"path": str(folder / "model"), "weights": Weights.pretrained})
    assert load_model(trained).generation_config.eos_token_id is not None


def test_the_manifest_records_the_start_and_the_model_that_was_written(whole, config, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "copy")
    manifest = read_manifest(folder)
    start = manifest["start_up"]
    assert list(start["rank"]) == PHASES
    assert abs(start["first_step_s"] - sum(start["rank"].values())) < 0.001 * len(PHASES)
    assert manifest["parallelism_found"] == {"strategy": "single", "wrapper": "Qwen2ForCausalLM", "ranks": 1}
    files, recorded = {path.name: path for path in (folder / "model").iterdir()}, manifest["model_files"]
    assert recorded.keys() == files.keys() >= {"model.safetensors", "config.json", "tokenizer.json"}
    for name, path in files.items():
        assert recorded[name] == {"size": path.stat().st_size, "sha256": sha256_file(path)}
    assert list(folder.glob(".model*")) == []
    again = start_manifest(folder, config, world_size=1, command=["tunebook", "train"])  # only to evaluate it
    assert again["model_files"] == recorded


def test_the_last_steps_are_logged_whatever_the_schedule(whole, config, run, changed):
    each = losses(whole[1])
    _, code, lines = run(changed(config, training={"log_every_steps": 4}))
    assert code == 0
    assert [(line["step"], line["num_steps"]) for line in lines] == [(4, 4), (6, 2)]
    assert losses(lines) == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 2], rel=1e-5)


def test_trackers_and_checkpoints_get_the_numbers_of_the_metrics(config, run, changed, monkeypatch):
    """An epoch has steps of 6, 6 and 4 documents. Upstream's has all six steps."""
    logged, log = [], SFTTrainer.log

    def remember(self, logs, start_time=None):
        log(self, logs, start_time)
        logged.append(dict(logs))

    monkeypatch.setattr(SFTTrainer, "log", remember)
    training = {"save_every_steps": 3, "evaluate_every_steps": 3, "global_samples": 6}
    config = changed(config, dataset={"validation_share": 0.25}, training=training)
    folder, code, lines = run(config)
    assert code == 0
    steps, validations = ([entry for entry in logged if key in entry] for key in ("loss", "eval_validation_loss"))
    trained, validated = ([line for line in lines if key in line] for key in ("loss", "validation_loss"))
    assert [entry["epoch"] for entry in steps] == [0.375, 0.75, 1.0, 1.375, 1.75, 2.0]
    for line, entry in zip(trained, steps, strict=True):
        assert entry["memory_gib"] == line["memory_gib"][0] > 0
        numbers = {key: line[key] for key in line.keys() - {"step", "memory_gib"} if line[key] is not None}
        assert numbers.items() <= entry.items()
        assert numbers.keys() >= {"tokens_seen", "documents_seen", "tokens_per_second_per_gpu", "seconds"}
        assert all(isinstance(value, int | float) for value in entry.values())
    assert [(entry["epoch"], entry["eval_validation_loss"]) for entry in validations] == [
        (epoch, line["validation_loss"]) for epoch, line in zip((1.0, 2.0), validated, strict=True)
    ]
    assert "train_samples_per_second" not in logged[-1]  # upstream's are rows
    state = json.loads((folder / "checkpoints" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["epoch"] == 2.0
    assert [{key: entry[key] for key in entry if key != "step"} for entry in state["log_history"]] == logged[:-1]


# Losses


def test_packed_padded_and_accumulated_steps_have_the_same_loss(whole, config, run, changed):
    packed = losses(whole[1])[:3]
    padded = {"packing": {"mode": PackingMode.padded}, "training": {"micro_batch_size": 4, "max_steps": 3}}
    assert losses(run(changed(config, **padded), "padded")[2]) == pytest.approx(packed, rel=2e-5)
    short = {"packing": {"row_length": 256}, "training": {"micro_batch_size": 1, "max_steps": 3}}
    assert losses(run(changed(config, **short), "short")[2]) == pytest.approx(packed, rel=2e-5)


def test_the_first_loss_is_that_of_the_documents_one_by_one(whole, config):
    folder, lines = whole
    order = epoch_order(24, config.training.seed, 0)[:8].tolist()
    expected, _ = nll_per_token(load_model(config).eval(), prepared_of(folder).train.load()[order])
    assert lines[0]["loss"] == pytest.approx(expected, rel=1e-5)


def nll_per_token(model, documents):
    """The mean negative log-likelihood of the trained-on tokens, each document by itself."""
    total, count = 0.0, 0
    for ids, labels in zip(documents["input_ids"], documents["labels"], strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        target = torch.tensor(labels)[1:]
        total += float(torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum"))
        count += int((target != -100).sum())
    return total / count, count


def prepared_of(folder):
    return load_prepared(Path(json.loads((folder / "prepared.json").read_text())["folder"]))


def test_validation_loss_is_weighted_by_tokens_and_measured_at_the_end(config, run, changed):
    still = changed(
        config,
        dataset={"validation_share": 0.3},
        optimizer={"learning_rate": 0.0},
        training={"global_samples": 4, "max_steps": 1},
    )
    folder, code, lines = run(still)
    assert code == 0
    expected, count = nll_per_token(load_model(still).eval(), prepared_of(folder).validation.load()[:])
    (line,) = [line for line in lines if "validation_loss" in line]
    assert line["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert line["validation_tokens"] == count


# The model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 over transformers 5.23
def test_an_adapter_is_evaluated_on_the_base_that_it_was_trained_on(config, run, changed):
    lora = changed(config, peft={"method": PeftMethod.lora, "rank": 4}, training={"max_steps": 3})
    folder, code, _ = run(lora)
    assert code == 0
    assert holds_model(folder / "model")
    assert is_adapter(folder / "model")
    base = load_model(lora).eval()
    documents = prepared_of(folder).train.load()[:]
    untrained, _ = nll_per_token(base, documents)
    trained, _ = nll_per_token(with_adapter(base, folder / "model", PeftMethod.lora).eval(), documents)
    assert trained < untrained - 0.01


@pytest.fixture
def base_without_chatml(tiny_model, tmp_path):
    """Make a base model whose tokenizer has neither ChatML's tokens nor a template."""

    def make(*, is_tied):
        folder = tmp_path / "base"
        shutil.copytree(tiny_model, folder)
        (folder / "chat_template.jinja").unlink()
        text = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "<|other|>")
        (folder / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|stop|>"))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        ends = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | ends))
        num_tokens = len(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())
        config = json.loads((folder / "config.json").read_text())
        sizes = {"vocab_size": num_tokens, "tie_word_embeddings": is_tied}
        (folder / "config.json").write_text(json.dumps(config | sizes))
        return str(folder), num_tokens

    return make


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 over transformers 5.23
@pytest.mark.parametrize(("method", "is_tied"), [(PeftMethod.full, True), (PeftMethod.lora, False)])
def test_a_base_model_learns_the_tokens_of_chatml(config, run, changed, base_without_chatml, method, is_tied):
    path, num_tokens = base_without_chatml(is_tied=is_tied)
    config = changed(
        config,
        model={"path": path, "chat_template": "chatml"},
        peft={"method": method, "rank": 4, "dropout": 0.0},
        training={"max_steps": 1},
    )
    folder, code, _ = run(config)
    assert code == 0
    end = num_tokens + 1  # <|im_end|>
    assert end in json.loads((folder / "model" / "generation_config.json").read_text())["eos_token_id"]
    before, after = load_model(config), load_trained(config, folder / "model")
    assert before.config.vocab_size == after.config.vocab_size == -(-(num_tokens + 2) // 64) * 64
    for matrix in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, matrix)().weight for model in (before, after))
        assert not torch.equal(new[end], old[end])
        assert method is PeftMethod.full or torch.equal(new[: end - 1], old[: end - 1])
    if method is PeftMethod.lora:
        added = [name for name in weights(folder / "model") if "lora_" not in name]
        assert len(added) == (1 if is_tied else 2)  # rows of two tokens, and no whole matrix


# Endings


@pytest.mark.parametrize(
    ("error", "code", "is_waited_for"),
    [
        (RuntimeError("something else"), 1, False),
        (RuntimeError("CUDA error: out of memory"), 3, False),
        (OSError(errno.ENOSPC, "No space left on device"), 3, False),
        (RequestError("of this rank alone"), 2, False),
        (StoppedError("agreed on"), 6, True),
        (InvalidTrainingError("seen by all"), 7, True),
    ],
    ids=str,
)
def test_only_ranks_that_end_together_wait_for_each_other(tmp_path, monkeypatch, error, code, is_waited_for):
    """All ranks close NCCL's group together, so a failed rank would wait for ranks that wait for it."""
    closed = []

    def fail(*_):
        raise error

    monkeypatch.setattr(train_run, "train", fail)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: closed.append(True))
    assert train_run.run_rank(tmp_path, StopRequest()) == code
    assert outcome(tmp_path)["exit_code"] == code
    assert bool(closed) is is_waited_for


def test_the_error_of_a_gpu_without_memory_says_what_filled_it(monkeypatch):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(1.8 * gib), int(79.2 * gib)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(76.6 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(66.3 * gib))
    error = memory_ran_out(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.47 GiB."))
    assert (error.exit_code, error.problem_id) == (3, "memory-ran-out")
    assert "66.3 of its 79.2 GiB" in error.message and "0.8;" in error.message
    assert "the host" in memory_ran_out(RuntimeError("DefaultCPUAllocator: can't allocate memory")).message
