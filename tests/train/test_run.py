"""One rank: its records, a loss that does not depend on the batching, and every ending with its exit code."""

from __future__ import annotations

import errno
import inspect
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from trl import SFTTrainer

from tunebook.config.choices import Generation, PackingMode, PeftMethod, Weights
from tunebook.data.prepared import load_prepared
from tunebook.data.sampler import epoch_order
from tunebook.errors import InvalidTrainingError, RequestError, StoppedError
from tunebook.evaluate.trained_model import load_trained
from tunebook.files import sha256_file
from tunebook.model.adapters import holds_model, is_adapter, with_adapter
from tunebook.model.load import load_model
from tunebook.record.manifest import read_manifest, start_manifest
from tunebook.train import build
from tunebook.train import run as train_run
from tunebook.train.methods.sft import RecipeTrainer
from tunebook.train.rank_process import StopRequest

from .conftest import losses, outcome, weights


def test_upstream_still_has_the_methods_we_override():
    checkpoints = ("_save_checkpoint", "_get_output_dir", "_push_from_checkpoint", "_load_best_model")
    resuming = ("create_scheduler", "_load_optimizer_and_scheduler", "_issue_warnings_after_load")
    losses = ("compute_loss", "log", "compute_loss_context_manager", "_determine_best_metric", "_save")
    for name in ("get_train_dataloader", "evaluate", "create_model_card", *losses, *checkpoints, *resuming):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (RecipeTrainer, SFTTrainer))
        assert list(ours.parameters) == list(theirs.parameters), name
    assert callable(SFTTrainer._run_epoch)  # ours hands on whatever it is given


def test_a_run_leaves_records_and_a_model_that_loads(config, run, changed):
    folder, code, lines = run(config)
    assert code == 0
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert losses(lines)[-1] < losses(lines)[0]
    assert lines[2]["documents_seen"] == 24
    assert lines[-1]["epoch"] == 2.0
    assert lines[-1]["tokens_seen"] == 2 * lines[2]["tokens_seen"]
    assert lines[0]["padding_share"] == 0
    assert outcome(folder)["exit_code"] == 0
    trained = changed(config, model={"path": str(folder / "model"), "weights": Weights.pretrained})
    assert load_model(trained).generation_config.eos_token_id is not None


def test_packed_padded_and_accumulated_steps_have_the_same_loss(config, run, changed):
    packed = losses(run(config, "packed")[2])
    padded = changed(config, packing={"mode": PackingMode.padded}, training={"micro_batch_size": 4})
    assert losses(run(padded, "padded")[2]) == pytest.approx(packed, rel=2e-5)
    short_rows = changed(config, packing={"row_length": 256}, training={"micro_batch_size": 1})
    assert losses(run(short_rows, "short")[2]) == pytest.approx(packed, rel=2e-5)


def test_trained_parameters_are_counted_beside_a_frozen_base_only(config, changed):
    """A token trains its own experts only, which `flops_per_token` knows; ZeRO-3's parameters are empty."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, bias=False))
    model[0].requires_grad_(False)
    assert train_run._num_adapted(config, model.parameters()) is None
    assert train_run._num_adapted(changed(config, peft={"method": PeftMethod.lora}), model.parameters()) == 8


def test_step_without_a_token_count_is_refused(config, run, monkeypatch):
    monkeypatch.setattr(RecipeTrainer, "_get_num_items_in_batch", lambda *_: None)
    folder, code, _ = run(config)
    assert code == 7
    assert "number of trained tokens of this step is unknown" in outcome(folder)["reason"]


def test_the_first_loss_is_that_of_the_documents_one_by_one(config, run, changed):
    folder, _, lines = run(changed(config, training={"max_steps": 1}))
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


def test_validation_loss_is_weighted_by_tokens(config, run, changed):
    still = changed(
        config,
        dataset={"validation_share": 0.3},
        optimizer={"learning_rate": 0.0},
        training={"global_samples": 4, "max_steps": 1, "evaluate_every_steps": 1},
    )
    folder, code, lines = run(still)
    assert code == 0
    expected, count = nll_per_token(load_model(still).eval(), prepared_of(folder).validation.load()[:])
    (line,) = [line for line in lines if "validation_loss" in line]
    assert line["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert line["validation_tokens"] == count


def test_the_best_model_is_kept_and_a_worsening_run_stops_early(config, run, changed, capsys):
    worsening = changed(
        config,
        dataset={"validation_share": 0.3},
        optimizer={"learning_rate": 0.3},
        training={
            "global_samples": 4,
            "num_epochs": 20,
            "evaluate_every_steps": 2,
            "save_every_steps": 2,
            "load_best_at_end": True,
            "early_stopping_patience": 2,
        },
    )
    folder, code, lines = run(worsening)
    assert code == 0
    validation = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min(validation, key=validation.get)
    assert max(validation) == best + 4  # two more validations, both worse
    kept = changed(worsening, model={"path": str(folder / "model"), "weights": Weights.pretrained})
    loss, _ = nll_per_token(load_model(kept).eval(), prepared_of(folder).validation.load()[:])
    assert loss == pytest.approx(validation[best], rel=1e-5)
    ending = outcome(folder)
    assert (ending["step"], ending["best_step"]) == (best + 4, best)
    assert ending["reason"] == (
        f"stopped early after step {best + 4}: no better validation loss in 2 evaluations; model/ is "
        f"checkpoint-{best} ({validation[best]:.4f})"
    )
    assert ending["reason"] in capsys.readouterr().out
    assert not (folder / "checkpoints" / "README.md").exists()  # upstream's card knows nothing of the run


def test_a_run_that_stops_early_and_keeps_its_last_weights_says_so(config, run, changed):
    worsening = changed(
        config,
        dataset={"validation_share": 0.3},
        optimizer={"learning_rate": 0.3},
        training={"global_samples": 4, "num_epochs": 20, "evaluate_every_steps": 1, "early_stopping_patience": 1,
                  "log_every_steps": 7},
    )  # fmt: skip
    folder, code, lines = run(worsening)
    assert code == 0
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    ending, last = outcome(folder), len(validation)
    assert (ending["step"], ending["best_step"]) == (last, None)
    assert ending["reason"] == (
        f"stopped early after step {last}: no better validation loss in 1 evaluation; the best was "
        f"{min(validation):.4f}, and model/ is that of the last step"
    )
    logged = [(line["step"], line["num_steps"]) for line in lines if "loss" in line]
    assert logged[-1][0] == last  # though no multiple of log_every_steps, and decided after the step's line was due
    assert sum(num_steps for _, num_steps in logged) == last


@pytest.mark.parametrize(("every", "expected"), [(4, [(4, 4), (6, 2)]), (10, [(6, 6)]), (3, [(3, 3), (6, 3)])])
def test_the_last_steps_are_logged_whatever_the_schedule(config, run, changed, every, expected):
    whole = losses(run(config, "whole")[2])
    folder, code, lines = run(changed(config, training={"log_every_steps": every}))
    assert (code, outcome(folder)["step"], outcome(folder)["reason"]) == (0, 6, "finished")
    assert [(line["step"], line["num_steps"]) for line in lines] == expected
    for line in lines:
        of_its_steps = whole[line["step"] - line["num_steps"] : line["step"]]
        assert line["loss"] == pytest.approx(sum(of_its_steps) / line["num_steps"], rel=1e-5)


def test_the_validation_loss_is_measured_at_the_end_when_nothing_says_how_often(config, run, changed):
    folder, code, lines = run(changed(config, dataset={"validation_share": 0.3}, training={"max_steps": 2}))
    assert code == 0
    assert [line["step"] for line in lines if "validation_loss" in line] == [2]
    assert (folder / "model").is_dir()


def test_a_full_disk_ends_with_3_and_leaves_no_half_checkpoint(config, run, changed, monkeypatch):
    saved = []

    def fill(trainer, folder):
        saved.append(Path(folder).name)
        if len(saved) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SFTTrainer, "_save_optimizer_and_scheduler", fill)
    folder, code, _ = run(changed(config, training={"save_every_steps": 2}))
    assert saved == ["checkpoint-2", "checkpoint-4"]
    assert code == 3
    assert "is full; free some space" in outcome(folder)["reason"]
    assert outcome(folder)["reason"].endswith("checkpoint-2")
    assert sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*")) == ["checkpoint-2"]


def test_memory_that_runs_out_ends_with_3_and_says_what_takes_less(config, run, changed, monkeypatch):
    steps = []

    def run_out(trainer, *args, **kwargs):
        steps.append(trainer.state.global_step)
        if trainer.state.global_step == 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return step(trainer, *args, **kwargs)

    step = SFTTrainer.training_step
    monkeypatch.setattr(SFTTrainer, "training_step", run_out)
    folder, code, _ = run(changed(config, training={"save_every_steps": 2}))
    assert (code, max(steps)) == (3, 3)
    reason = outcome(folder)["reason"]
    assert reason.startswith("the memory of the host ran out after step 3; ")
    assert reason.endswith("The last good checkpoint is " + str(folder / "checkpoints/checkpoint-2"))


def test_incompletely_written_model_is_removed(config, run, changed, monkeypatch):
    def fail(trainer, *args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(SFTTrainer, "_save", fail)
    folder, code, _ = run(changed(config, training={"max_steps": 1}))
    assert code == 1
    assert outcome(folder)["reason"] == "RuntimeError: no"
    assert not (folder / "model").exists()
    assert list(folder.glob(".model*")) == []


def test_the_manifest_records_the_model_that_was_written(config, run, changed, tmp_path):
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "old.safetensors").write_bytes(b"of an earlier attempt")
    (folder / ".model.replaced-1").mkdir()
    start_manifest(folder, config, world_size=1, command=["tunebook", "train"])
    folder, code, _ = run(changed(config, training={"max_steps": 1}))
    assert code == 0
    files = {path.name: path for path in (folder / "model").iterdir()}
    recorded = read_manifest(folder)["model_files"]
    assert recorded.keys() == files.keys() >= {"model.safetensors", "config.json", "tokenizer.json"}
    for name, path in files.items():
        assert recorded[name] == {"size": path.stat().st_size, "sha256": sha256_file(path)}
    assert list(folder.glob(".model*")) == []
    again = start_manifest(folder, config, world_size=1, command=["tunebook", "train"])  # only to evaluate it
    assert again["model_files"] == recorded


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 over transformers 5.23
def test_an_adapter_is_evaluated_on_the_base_that_it_was_trained_on(config, run, changed):
    lora = changed(config, peft={"method": PeftMethod.lora, "rank": 4}, training={"max_steps": 3})
    folder, code, lines = run(lora)
    assert code == 0
    assert holds_model(folder / "model")
    assert is_adapter(folder / "model")
    base = load_model(lora).eval()
    documents = prepared_of(folder).train.load()[:]
    untrained, _ = nll_per_token(base, documents)
    trained, _ = nll_per_token(with_adapter(base, folder / "model", PeftMethod.lora).eval(), documents)
    assert losses(lines)[-1] < losses(lines)[0]
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


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("method", [PeftMethod.full, PeftMethod.lora])
def test_a_base_model_learns_the_tokens_of_chatml(config, run, changed, base_without_chatml, method, is_tied):
    path, num_tokens = base_without_chatml(is_tied=is_tied)
    config = changed(
        config,
        model={"path": path, "chat_template": "chatml"},
        peft={"method": method, "rank": 4, "dropout": 0.0},
        training={"max_steps": 3},
    )
    folder, code, lines = run(config)
    assert code == 0
    assert losses(lines)[-1] < losses(lines)[0]
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


def test_generation_settings_that_cannot_be_saved_are_corrected_before_the_training(
    config, run, changed, tiny_model, tmp_path
):
    base = tmp_path / "base"
    load_model(config).save_pretrained(base)
    for file in tiny_model.iterdir():
        if not (base / file.name).exists():
            shutil.copy(file, base)
    (base / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": 0})
    )
    config = changed(config, model={"path": str(base), "weights": Weights.pretrained}, training={"max_steps": 1})
    folder, code, _ = run(config)
    assert code == 0
    written = json.loads((folder / "model" / "generation_config.json").read_text())
    assert (written["do_sample"], written["eos_token_id"]) == (True, [0, 2])


@pytest.mark.parametrize(
    ("error", "code", "is_waited_for"),
    [
        (RuntimeError("CUDA out of memory"), 1, False),
        (RequestError("of this rank alone"), 2, False),
        (StoppedError("agreed on"), 6, True),
        (InvalidTrainingError("seen by all"), 7, True),
    ],
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
    assert bool(closed) is is_waited_for


@pytest.mark.parametrize(
    ("generation", "mode", "replaced"),
    [
        (Generation.cpu, PackingMode.padded, []),
        (Generation.cpu, PackingMode.isolated, [True]),
        (Generation.hopper, PackingMode.padded, [False]),
    ],
)
def test_states_are_replaced_for_packed_rows_and_on_every_gpu(config, changed, monkeypatch, generation, mode, replaced):
    found = []
    monkeypatch.setattr(build, "isolate_documents", lambda model, *, is_on_cpu: found.append(is_on_cpu))
    chosen = changed(config, hardware={"generation": generation}, packing={"mode": mode})
    monkeypatch.setattr(build, "require_target_parameters", lambda config, adapted: None)
    assert build._finish_layers(chosen, mock.Mock(), mock.Mock()) == []
    assert found == replaced
