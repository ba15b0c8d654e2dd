"""The tables of other tools' names: every suggestion is valid, and they are used before spelling suggestions."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from tunebook.config.compose import compose
from tunebook.config.foreign import (
    Foreign,
    Form,
    all_names,
    answer_choice,
    answer_key,
    describe,
    entries,
    find_command,
    find_key,
    find_option,
)
from tunebook.config.schema import GROUPS
from tunebook.config.walk import all_keys
from tunebook.errors import RequestError
from tunebook.explain import explain

# What stands for a value in the tables that only the user knows.
PLACEHOLDERS = {"=N": "=8", "=ORG/NAME": "=org/name", "=FILE_OR_GLOB": "=x.jsonl", "=FILE": "=x", "=FOLDER": "=/x"}


def value_for(entry: Foreign, form: Form) -> str:
    """A value for a form: the first that its pattern allows, or the entry's example."""
    if form.when in ("PATH", "HUB"):
        return {"PATH": "./x.jsonl", "HUB": "org/name"}[form.when]
    if form.when is None or form.fits(entry.example):
        return entry.example
    first = form.when.split("|")[0]
    return (
        first
        if re.fullmatch(r"[\w-]+", first)
        else {"a share": "0.1", "two numbers": "0.9,0.95"}.get(form.means or "", "")
    )


def overrides(entry: Foreign, form: Form) -> list[str]:
    """The arguments that a form suggests, as the shell passes them."""
    words = shlex.split(" ".join(form.words(value_for(entry, form))))
    return [
        re.sub(r"=(N|ORG/NAME|FILE_OR_GLOB|FILE|FOLDER)$", lambda found: PLACEHOLDERS[found[0]], word) for word in words
    ]


def together(requests: list[tuple[str, ...]]) -> list[list[str]]:
    """Arguments that go into one command: no key twice, and no key of a group whose choice is also named."""
    batches: list[dict[str, str]] = []
    for words in requests:
        request = {word.partition("=")[0]: word for word in words}
        for batch in batches:
            shared = {key.split(".")[0] for key in request} & {key.split(".")[0] for key in batch}
            if not (request.keys() & batch.keys() or shared & (request.keys() | batch.keys())):
                batch |= request
                break
        else:
            batches.append(request)
    return [list(batch.values()) for batch in batches]


TYPED = sorted({tuple(overrides(entry, form)) for entry in entries() for form in entry.forms if form.type is not None})


@pytest.mark.parametrize("words", together(TYPED), ids=lambda words: words[0])
def test_what_is_to_be_typed_is_taken(words: list[str]) -> None:
    """Composing takes 0.1 s, so as many as possible at once; an error names the word."""
    assert all(word.partition("=")[0] in all_keys() | set(GROUPS) for word in words)
    compose("quickstart", words)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.names[0][0])
def test_an_entry_says_something_and_takes_any_value(entry: Foreign) -> None:
    assert entry.say or all(form.type or form.say for form in entry.forms)
    for form in entry.forms:
        assert form.type or form.say
        if form.when not in (None, "PATH", "HUB"):
            re.compile(form.when)
            assert form.means or re.fullmatch(r"[\w|. *-]+", form.when), "say in `means` what the pattern is"
    if entry.forms:
        assert entry.forms[-1].when is None, "the last form is for any other value"
    for name, _ in entry.names:
        assert name == name.lower().replace("-", "_"), "as it is looked up"
        assert name in GROUPS or name not in all_keys(), "a key of Tunebook's own"


def test_the_tables_know_more_than_sixty_names_of_each_large_tool() -> None:
    tools = [tool for entry in entries() for _, users in entry.names for tool in users]
    assert len(all_names()) > 600
    assert {tool for tool in tools if tools.count(tool) > 60} >= {"transformers", "TRL", "axolotl", "LLaMA-Factory"}
    assert {tool for tool in tools if tools.count(tool) > 10} >= {"PEFT", "DeepSpeed", "accelerate", "torchtune"}


def test_every_setting_of_the_libraries_beneath_is_known() -> None:
    from peft import LoraConfig
    from trl import ModelConfig, ScriptArguments, SFTConfig

    for kind in (SFTConfig, ModelConfig, ScriptArguments, LoraConfig):
        names = {field.name for field in dataclasses.fields(kind)} - set(GROUPS)
        assert sorted(name for name in names if find_key(name) is None) == [], kind.__name__


# --- what is answered to each


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("per_device_train_batch_size=2", "training.micro_batch_size=2"),
        ("learning_rate=1e-4", "optimizer.learning_rate=1e-4"),
        ("num_train_epochs=3", "training.num_epochs=3"),
        ("training.num_train_epochs=3", "training.num_epochs=3"),
        ("bf16=true", "precision=bf16"),
        ("bf16=False", "precision=fp32"),
        ("fp16=true", "precision=fp16"),
        ("gradient_checkpointing=true", "activation=checkpointing"),
        ("disable_gradient_checkpointing=true", "activation=stored"),
        ("disable_gradient_checkpointing=false", "activation=checkpointing"),
        ("lora_r=16", "peft=lora peft.rank=16"),
        ("peft.r=8", "peft.rank=8"),
        ("peft.lora_alpha=16", "peft.alpha=16"),
        ("output_dir=/x", "outputs=/x"),
        ("deepspeed=ds.json", "parallelism=zero2"),
        ("deepspeed=configs/ds_zero3_offload.json", "parallelism=zero3_offload"),
        ("hydra.run.dir=/x", "outputs=/x"),
        ("optimizer.lr=1e-4", "optimizer.learning_rate=1e-4"),
        ("gradient_accumulation_steps=4", "training.global_samples=N"),
        ("max_seq_length=512", "training.max_length=512"),
        ("save_steps=10", "training.save_every_steps=10"),
        ("save_total_limit=1", "training.keep_checkpoints=1"),
        ("resume_from_checkpoint=true", "training.resume=auto"),
        ("resume_from_checkpoint=/x/checkpoint-5", "training.resume=/x/checkpoint-5"),
        ("resume=false", "training.resume=never"),
        ("report_to=wandb", "tracking=wandb"),
        ("report_to=none", "tracking=none"),
        ("warmup_ratio=0.1", "schedule.warmup_steps=null schedule.warmup_share=0.1"),
        ("schedule.warmup_ratio=0.1", "schedule.warmup_steps=null schedule.warmup_share=0.1"),
        ("warmup_steps=0.03", "schedule.warmup_steps=null schedule.warmup_share=0.03"),
        ("warmup_steps=30", "schedule.warmup_share=null schedule.warmup_steps=30"),
        ("lr_scheduler_type=cosine", "schedule=cosine"),
        ("model_name_or_path=Qwen/Qwen2.5-0.5B", "model=hub model.name=Qwen/Qwen2.5-0.5B"),
        ("model_name_or_path=./mine", "model=hub model.path=./mine"),
        ("model.model_name_or_path=./mine", "model.path=./mine"),
        ("batch_size=4", "training.micro_batch_size=4"),
        ("seed=1", "training.seed=1"),
        ("load_best_model_at_end=true", "training.load_best_at_end=true"),
        ("eval_steps=5", "training.evaluate_every_steps=5"),
        ("optim=adamw_8bit", "optimizer=adamw_8bit"),
        ("optim=adamw_torch_8bit", "optimizer=adamw_8bit"),
        ("optim=adafactor", "optimizer=adafactor"),
        ("use_muon=true", "optimizer=muon"),
        ("fsdp=full_shard", "parallelism=fsdp"),
        ("fsdp='shard_grad_op auto_wrap'", "parallelism=fsdp_grad_op"),
        ("world_size=2", "hardware.gpus_per_node=2"),
        ("nproc_per_node=gpu", "hardware.gpus_per_node=null"),
        ("betas=[0.9,0.98]", "optimizer.beta1=0.9 optimizer.beta2=0.98"),
        ("lora_target_modules=q_proj,v_proj", "peft=lora peft.target_modules=[q_proj,v_proj]"),
        ("lora_target_modules=all-linear", "peft=lora peft.target_modules=[]"),
        ("learning_rate=1e-4,2e-4", "optimizer.learning_rate=1e-4,2e-4"),
        ("system_prompt=Be brief, always", "'dataset.system_prompt=\"Be brief, always\"'"),
        ("model.lora_r=4", "peft=lora peft.rank=4"),
        ("dataset.max_length=64", "training.max_length=64"),
        ("zero_optimization.stage=3", "parallelism=zero3"),
        ("TrainingArguments.Learning-Rate=1", "optimizer.learning_rate=1"),
        ("--weight_decay=0.1", "optimizer.weight_decay=0.1"),
    ],
)
def test_a_foreign_key_is_answered_with_what_to_type(word: str, instead: str) -> None:
    key, _, value = word.partition("=")
    answer = answer_key(key, value)
    assert answer is not None
    assert answer.startswith(f"there is no key '{key.lstrip('-')}'")
    ours = instead.lstrip("'").partition("=")[0]
    assert any(said in answer for said in (f"; type {instead} instead. ", f". Did you mean '{ours}'? Type {instead}. "))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("neftune_noise_alpha", "5", "as in transformers, TRL, axolotl, LLaMA-Factory: it is not offered. No noise"),
        ("tensor_parallel_size", "2", ": it is not offered. Data are split over the GPUs"),
        ("optim", "lion_32bit", ". Offered are adamw"),
        ("optim", "sgd", ". Offered are adamw"),
        ("report_to", "mlflow", ". Offered are tracking=wandb, tensorboard and trackio"),
        ("report_to", "[wandb,tensorboard]", ". One tracker at a time"),
        ("stage", "dpo", "as in LLaMA-Factory. Tunebook does supervised fine-tuning alone."),
        ("save_steps", "0.1", "counted in optimizer steps"),
    ],
)
def test_what_is_not_offered_is_said_to_be_not_offered(key: str, value: str, said: str) -> None:
    answer = answer_key(key, value)
    assert answer is not None
    assert said in answer
    assert "; type " not in answer


def test_unknown_name_gets_a_spelling_suggestion() -> None:
    assert answer_key("learning_ratee", "1") is None
    assert answer_key("training.max_stepss", "1") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bf16=true"], r"override 'bf16=true': there is no key 'bf16' as in .*; type precision=bf16 instead"),
        (["packing=true"], r"there is no packing 'true'; type packing=isolated instead\. .*Choices of packing: auto"),
        (["packing=false"], r"type packing=padded instead"),
        (["optimizer=adamw_torch"], "there is no optimizer 'adamw_torch'; type optimizer=adamw instead"),
        (["optimizer=lion_8bit"], "there is no optimizer 'lion_8bit'. Offered are adamw"),
        (["optimizer=adam_w"], "there is no optimizer 'adam_w'. Did you mean 'adamw'"),
        (["schedule=polynomial"], "there is no schedule 'polynomial'. Offered are constant"),
        (["schedule=cosine_with_restarts"], "there is no schedule 'cosine_with_restarts'. Offered are constant"),
        (["parallelism=deepspeed_stage_3"], "type parallelism=zero3 instead"),
        (["parallelism=zero4"], "Did you mean 'zero"),
        (["hardware=h100"], "type hardware=hopper instead"),
        (["model=Qwen/Qwen2.5-0.5B"], "type model=hub model.name=Qwen/Qwen2.5-0.5B instead"),
        (["model=qwen25_05"], "Did you mean 'qwen25_05b'"),
        (["dataset=chats.jsonl"], "type dataset=jsonl dataset.path=chats.jsonl instead"),
        (["peft=true"], "type peft=lora instead"),
        (["tracking=mlflow"], "Offered are tracking=wandb"),
        (["evaluation=gsm8k"], r"type evaluation=tasks evaluation\.tasks=\[gsm8k\] instead"),
        (["evaluation=leaderbord"], "Did you mean 'leaderboard'"),
        (["+lr=1e-4"], r"override '\+lr=1e-4': there is no key 'lr' .*; type optimizer\.learning_rate=1e-4"),
        (["+training.seed=1"], r"keys can be set, not added or removed; type training\.seed=1"),
        (["++trainer.max_epochs=3"], r"type training\.num_epochs=3 instead"),
        (["lora_r"], r"'lora_r' is no override, which is written key=value, and there is no key 'lora_r'"),
        (["hydra/launcher=joblib"], "Hydra's own keys are set by Tunebook; .*Trials are started by `tunebook sweep`"),
        (["trainin.max_length=4"], r"Did you mean 'training\.max_length'\? Type training\.max_length=4\."),
        (["training.seed"], r"'training\.seed' is no override: .*did you mean 'training\.seed=VALUE'"),
        (["hydra.job.chdir=true"], "Hydra's own keys are set by Tunebook"),
        (["lora_target_modules=q_proj,v_proj"], r"type peft=lora peft\.target_modules=\[q_proj,v_proj\] instead"),
        (["training={save_total_limit: 3}"], "type training.keep_checkpoints=VALUE instead"),
        (["seed=3"], r"no key 'seed' as in .*\. Did you mean 'training\.seed'\? Type training\.seed=3\. Of weights"),
        (["training.learning_ratee=1,2"], r"no key 'training\.learning_ratee'\. Did you mean"),
        (["training.seed=0,1"], "lists several values, and this command runs one; try `tunebook sweep`"),
        (["deepspeed.zero_optimization.stage=2"], "type parallelism=zero2 instead"),
        (["gradient_checkpointing_kwargs.use_reentrant=false"], "it is not offered"),
        (["bf16=true", "lora_r=4"], r"2 problems\n  1\. override 'bf16=true'.*\n  2\. override 'lora_r=4'"),
    ],
)
def test_the_table_answers_before_the_spelling_does(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compose("quickstart", words)


@pytest.mark.parametrize("key", ["overlap_comm", "nvme_path", "reduce_bucket_size", "state_dict"])
def test_key_of_another_choice_is_not_foreign(key: str) -> None:
    with pytest.raises(RequestError, match=rf"parallelism\.{key} has no meaning with parallelism=ddp"):
        compose("quickstart", ["parallelism=ddp", f"parallelism.{key}=x"])


def test_a_key_in_a_recipe_is_answered_with_the_recipes_value(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# @package _global_\ntraining:\n  save_total_limit: 3\n")
    with pytest.raises(RequestError, match=r"mine\.yaml: there is no key .*type training\.keep_checkpoints=3 instead"):
        compose("mine", [], [tmp_path])


# --- explained


def test_explain_says_what_a_name_is_here() -> None:
    assert explain("lora_r") == (
        "lora_r, as it is called in TRL, axolotl\n\nHere: peft=lora peft.rank=VALUE\n\n"
        "The rank of the adapters; peft=qlora puts them on a base of 4 bits."
    )
    text = describe("--BF16")
    assert text is not None
    assert "  true, 1, yes, full: precision=bf16\n  false, 0, no: precision=fp32\n" in text
    assert "Tunebook does not offer it.\n\nNo noise" in explain("training.neftune_noise_alpha")
    assert "  ORG/NAME: model=hub model.name=VALUE" in explain("model_name_or_path")
    assert "  true, 1, yes, bfd..., ffd: packing=isolated" in explain("packing")  # a group, by values of other tools
    with pytest.raises(RequestError, match=r"no rule 'lora_rr' to explain\. Did you mean 'lora_r'"):
        explain("lora_rr")


def test_commands_and_options_of_the_tables_lead_to_ones_that_are() -> None:
    from tunebook.cli import app
    from tunebook.cli_book import book_app
    from tunebook.cli_records import records_app

    registered = {
        command.name or command.callback.__name__
        for group in (app, records_app, book_app)
        for command in group.registered_commands
        if command.name or command.callback
    }
    for find, names in (
        (find_command, ("run", "sft", "evaluate", "infer", "serve", "merge", "dpo")),
        (find_option, ("-m", "--multirun", "--cfg", "--config", "--config-dir", "--config-name")),
    ):
        found = [find(name) for name in names]
        assert None not in found
    for name in ("run", "evaluate", "generate", "serve", "merge", "preprocess", "download", "tune", "ls"):
        entry = find_command(name)
        assert entry is not None
        assert (entry.forms[0].type or "").split()[1] in registered
    assert not {"run", "sft"} & registered


def test_unknown_choice_gets_a_spelling_suggestion() -> None:
    assert answer_choice("optimizer", "adamww", is_near_another=True) is None
    assert answer_choice("optimizer", "adamww") == (
        "Offered are adamw, adamw_8bit, paged_adamw_32bit, paged_adamw_8bit, adafactor, muon."
    )
    assert answer_choice("no-such-group", "x") is None
