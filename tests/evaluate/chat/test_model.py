from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunebook.config.choices import PeftMethod, TrainOn, Weights
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import Encoder
from tunebook.errors import DataError, DoesNotFitError, RequestError
from tunebook.evaluate.chat import Ending, Generated, Sampling
from tunebook.evaluate.chat import model as chat_model
from tunebook.evaluate.chat.model import ChatModel, load
from tunebook.evaluate.chat.session import Session
from tunebook.evaluate.target import Target
from tunebook.evaluate.trained_model import load_trained
from tunebook.model.tokenizer import load_tokenizer, tokenizer_hash
from tunebook.record.model_origin import Origin

Models = Callable[..., ChatModel]
QUESTION = [{"role": "user", "content": "Reverse the order: rain key chair"}]


def generate(
    model: ChatModel, pieces: list[str], *, temperature: float = 0.0, tokens: int = 16, **more: Any
) -> Generated:
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature, seed=0)
    return model.generate(model.encode(QUESTION), sampling, pieces.append, **more)


@pytest.mark.parametrize(
    ("written", "num_tokens", "pieces", "ending"),
    [
        ("apple bird cat", 16, ["apple", " bird", " cat"], Ending.stop),  # at the trained EOS
        ("apple bird cat", 2, ["apple", " bird"], Ending.length),
        ("é🦊w", 16, ["é", "🦊", "w"], Ending.stop),  # 2 + 4 + 1 tokens: letters come whole
        ("w🦊", 3, ["w", "\ufffd"], Ending.length),  # two of the fox's four bytes are not lost
    ],
)
def test_an_answer_is_streamed(
    chat_model: Models, written: str, num_tokens: int, pieces: list[str], ending: Ending
) -> None:
    streamed: list[str] = []
    answer = generate(chat_model(written), streamed, tokens=num_tokens)
    assert answer == Generated(text="".join(pieces), ending=ending)
    assert streamed == pieces


def test_every_eos_of_the_generation_config_ends_an_answer(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase, chat_model: Models
) -> None:
    end_of_text: Any = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert end_of_text != tokenizer.eos_token_id
    model = scripted("apple", end=[end_of_text, 300, 301])
    assert generate(ChatModel(model, tokenizer, stop_ids=[tokenizer.eos_token_id]), []).text != "apple"
    both = ChatModel(model, tokenizer, stop_ids=[tokenizer.eos_token_id, end_of_text])
    assert generate(both, []) == Generated(text="apple", ending=Ending.stop)


def test_pieces_of_a_long_answer_join_to_what_the_tokenizer_makes_of_all_tokens(
    chat_model: Models, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens = [token for token in range(3, 300) if "\n" not in tokenizer.decode([token])][::-1]
    answer = generate(chat_model(tokens, context=1024), [], tokens=len(tokens))
    assert answer.text == tokenizer.decode(tokens)


def test_an_interruption_ends_it_at_the_next_token(chat_model: Models) -> None:
    pieces: list[str] = []
    answer = generate(chat_model("apple bird cat dog"), pieces, is_interrupted=lambda: len(pieces) >= 2)
    assert answer == Generated(text="apple bird cat", ending=Ending.interrupted)


def test_a_prompt_is_encoded_as_in_training(chat_model: Models, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "chair key rain"}]
    row: dict[str, Any] = {
        "messages": [{**turn, "train": turn["role"] == "assistant"} for turn in turns],
        "origin": "x",
    }
    (document,) = Encoder(CorpusKind.conversation, TrainOn.assistant, tokenizer).encode([row])
    prompt = chat_model("apple").encode(QUESTION)
    assert document.input_ids[: len(prompt)] == prompt
    assert all(label == -100 for label in document.labels[: len(prompt)])
    assert document.labels[len(prompt)] != -100


def test_bos_is_not_doubled(scripted: Callable[..., PreTrainedModel]) -> None:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    make: Any = PreTrainedTokenizerFast
    adds_bos = make(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    adds_bos.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
    assert adds_bos("a b")["input_ids"] == [1, 3, 4]
    model = ChatModel(scripted("apple"), adds_bos, stop_ids=[2])
    assert model.encode([{"role": "user", "content": "a b"}]) == [1, 3, 4]


def test_greedy_takes_no_notice_of_the_models_own_sampling(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    model = scripted("apple bird cat")
    assert model.generation_config is not None
    for key, value in {"do_sample": True, "temperature": 90.0, "top_p": 0.9, "top_k": 700}.items():
        setattr(model.generation_config, key, value)
    assert generate(ChatModel(model, tokenizer, stop_ids=[2]), []).text == "apple bird cat"


def test_drawing_is_repeated_by_the_seed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    random = ChatModel(model, tokenizer, stop_ids=[2])

    def draw(seed: int) -> str:
        random.seed(seed)
        return generate(random, [], temperature=1.0, tokens=12).text

    assert draw(1) == draw(1) != draw(2)


def test_drawing_is_from_every_token_unless_the_model_says_otherwise(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    model = scripted("apple")
    chat = ChatModel(model, tokenizer, stop_ids=[2])
    drawn = chat._settings(Sampling(max_new_tokens=5, temperature=0.7, seed=0))
    assert (drawn.do_sample, drawn.temperature, drawn.top_k, drawn.top_p) == (True, 0.7, 0, 1.0)
    assert model.generation_config is not None
    model.generation_config.top_k, model.generation_config.top_p = 20, 0.8
    drawn = chat._settings(Sampling(max_new_tokens=5, temperature=0.7, seed=0))
    assert (drawn.top_k, drawn.top_p) == (20, 0.8)


def test_the_context_is_the_models_or_else_the_tokenizers(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted("apple", context=77)
    assert ChatModel(model, tokenizer, stop_ids=[2]).context_tokens == 77
    monkeypatch.setattr(model, "config", PretrainedConfig())  # of an architecture that has no such limit
    assert ChatModel(model, tokenizer, stop_ids=[2]).context_tokens == tokenizer.model_max_length == 1024
    monkeypatch.setattr(tokenizer, "model_max_length", int(1e30))
    assert ChatModel(model, tokenizer, stop_ids=[2]).context_tokens == 2048


def test_a_template_that_refuses_is_an_error_in_words(chat_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chat_model("apple")
    monkeypatch.setattr(model._renderer, "_template", "{{ raise_exception('no system turns here') }}")
    with pytest.raises(DataError, match=r"refuses this conversation.*no system turns here"):
        model.encode(QUESTION)


def test_running_out_of_gpu_memory_is_an_error_in_words(chat_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    model = chat_model("apple")
    monkeypatch.setattr(model._model, "generate", fail)
    with pytest.raises(DoesNotFitError, match=r"ran out of memory on a conversation of \d+ tokens.*--max-new-tokens"):
        generate(model, [])


Scripted = Callable[..., PreTrainedModel]
SAMPLING = Sampling(max_new_tokens=16, temperature=0.0, seed=0)


@pytest.fixture
def target(run: Path) -> Target:
    return Target(run=run, folder=run / "model")


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    """A model folder outside of any run."""
    return Path(shutil.copytree(run / "model", tmp_path / "exported"))


def change(file: Path, **settings: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_config(run: Path, edit: Callable[[RunConfig], None]) -> None:
    config = load_config(run / "run.yaml")
    edit(config)
    (run / "run.yaml").write_text(config_to_yaml(config))


def answer_of(target: Target) -> str:
    return said(load(target).model)


def said(model: ChatModel) -> str:
    pieces: list[str] = []
    Session(model, SAMPLING, None).ask("rain", pieces.append)
    return "".join(pieces)


def adapter_of(model: PreTrainedModel, folder: Path) -> Path:
    """A LoRA on one projection, whose two parts are not zero."""
    torch.manual_seed(1)
    settings = LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_()
    adapted.save_pretrained(folder)
    return folder


def test_a_run_answers_with_its_own_tokenizer_and_says_so(target: Target) -> None:
    loaded = load(target)
    assert loaded.notes == ["the CPU in float32", "template and tokenizer are those of the run"]
    assert loaded.system_prompt is None
    assert said(loaded.model) == "apple bird"


def test_the_runs_system_prompt_comes_with_it(target: Target, run: Path) -> None:
    change_config(run, lambda config: setattr(config.dataset, "system_prompt", "Answer with words."))
    assert load(target).system_prompt == "Answer with words."


def test_a_run_can_be_moved_away_from_where_its_base_model_was(target: Target, run: Path) -> None:
    change_config(run, lambda config: setattr(config.model, "path", "/nowhere/model"))
    assert answer_of(target) == "apple bird"


@pytest.mark.parametrize("change", ["{{ 'x' }}", None])
def test_another_template_than_in_training_is_an_error(target: Target, run: Path, change: str | None) -> None:
    file = run / "model" / "chat_template.jinja"
    if change is None:
        file.unlink()
    else:
        file.write_text(file.read_text() + change)
    with pytest.raises(DataError, match=r"the chat template is not the one that .* was trained with") as raised:
        load(target)
    assert raised.value.problem_id == "template-changed"


def test_another_tokenizer_than_in_training_is_an_error(target: Target, run: Path) -> None:
    file = run / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"the tokenizer .* is not the one that .* was trained with") as raised:
        load(target)
    assert raised.value.problem_id == "tokenizer-changed"


def test_a_padding_token_that_the_trainer_gave_is_no_difference(target: Target, run: Path) -> None:
    without: Any = load_tokenizer(ModelConfig(path="book:recipes/quickstart/model"))
    without.pad_token = None
    change(run / "manifest.json", tokenizer_sha256=tokenizer_hash(without))
    assert answer_of(target) == "apple bird"


def test_without_a_manifest_it_says_that_nothing_was_compared(target: Target, run: Path) -> None:
    (run / "manifest.json").unlink()
    assert load(target).notes[-1] == "without a manifest nothing can be compared"


@pytest.fixture
def adapter(run: Path, scripted: Scripted, tmp_path: Path) -> Path:
    """The run's model becomes its base, in another folder, and an adapter takes its place."""
    base = Path(shutil.move(run / "model", tmp_path / "base"))

    def edit(config: RunConfig) -> None:
        config.model.path, config.model.weights, config.model.facts = str(base), Weights.pretrained, None
        config.peft.method, config.peft.target_modules = PeftMethod.lora, ["o_proj"]

    change_config(run, edit)
    return adapter_of(scripted("apple bird"), run / "model")


def test_a_runs_adapter_is_loaded_on_the_runs_base(run: Path, adapter: Path, tmp_path: Path) -> None:
    check_adapted(load(Target(run=run, folder=adapter)).model, tmp_path / "base", adapter)


def test_a_runs_adapter_is_not_loaded_on_other_weights_than_it_was_trained_on(
    run: Path, adapter: Path, tmp_path: Path
) -> None:
    change(run / "manifest.json", model={"weights_fingerprint": "1" * 64})
    with pytest.raises(DataError, match=rf"the weights of {tmp_path}/base have the fingerprint .* started from 11111"):
        load(Target(run=run, folder=adapter))


def test_a_base_that_is_named_on_the_hub_by_now_is_not_compared_and_that_is_noted(
    run: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tmp_path / "base")

    def edit(config: RunConfig) -> None:
        config.model.path, config.model.name, config.model.tokenizer = None, "org/base", base

    change_config(run, edit)
    change(run / "manifest.json", model={"weights_fingerprint": "1" * 64})

    def from_hub(config: RunConfig, folder: Path | None) -> Any:
        return load_trained(replace(config, model=ModelConfig(path=base)), folder)

    monkeypatch.setattr(chat_model, "load_trained", from_hub)
    notes = load(Target(run=run, folder=adapter)).notes
    assert any(note.startswith("the base model org/base is named on the hub and") for note in notes)


def test_an_exported_adapter_is_not_loaded_on_other_weights_either(
    run: Path, exported: Path, scripted: Scripted, tmp_path: Path
) -> None:
    adapter = adapter_of(scripted("apple bird"), tmp_path / "adapter")
    change(adapter / "adapter_config.json", base_model_name_or_path=str(exported))
    hashes = json.loads((run / "manifest.json").read_text())
    origin = Origin(
        run="quickstart/now", recipe="quickstart", config_sha256="c", tokenizer_sha256=hashes["tokenizer_sha256"],
        chat_template_sha256=hashes["chat_template_sha256"], system_prompt=None, weights_fingerprint="1" * 64,
    )  # fmt: skip
    with pytest.raises(DataError, match="is not the one that the run quickstart/now was trained on") as raised:
        load(Target(folder=adapter, origin=origin))
    assert raised.value.problem_id == "base-changed"


def test_an_adapter_without_a_run_is_loaded_on_the_base_that_it_names(
    exported: Path, scripted: Scripted, tmp_path: Path
) -> None:
    adapter = adapter_of(scripted("apple bird"), tmp_path / "adapter")
    change(adapter / "adapter_config.json", base_model_name_or_path=str(exported))
    check_adapted(load(Target(folder=adapter)).model, exported, adapter)


def check_adapted(model: ChatModel, base: Path, adapter: Path) -> None:
    """The projection is the base's plus B @ A, and everything else is the base's."""
    parts = {name.split(".")[-2]: part for name, part in load_file(adapter / "adapter_model.safetensors").items()}
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    expected = weights[name] + parts["lora_B"] @ parts["lora_A"]
    assert expected.abs().max() > 1
    torch.testing.assert_close(model._model.state_dict(), weights | {name: expected})


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("/nowhere/model", "base model, /nowhere/model, is not on this machine; copy it here"),
        (None, "does not say which base model"),
        ("someone/model", "hf download"),
    ],
)
def test_an_adapter_whose_base_is_not_here(
    scripted: Scripted, exported: Path, tmp_path: Path, base: str | None, message: str
) -> None:
    adapter = adapter_of(scripted("apple"), tmp_path / "adapter")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(exported / file, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    if base is None:
        del settings["base_model_name_or_path"]
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(RequestError, match=message):
        load(Target(folder=adapter))


def test_a_model_folder_answers_with_its_own_template(exported: Path) -> None:
    loaded = load(Target(folder=exported))
    assert loaded.notes == ["the CPU in float32", "the model's own template, without a run"]
    assert answer_of(Target(folder=exported)) == "apple bird"


def test_a_bf16_model_is_computed_in_fp32_on_a_cpu(exported: Path, scripted: Scripted) -> None:
    half: Any = scripted("apple bird")
    half.to(torch.bfloat16).save_pretrained(exported)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(Target(folder=exported)).notes[0] == "the CPU in float32"


def test_every_stop_token_of_the_models_generation_config_counts(
    exported: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    change(exported / "generation_config.json", eos_token_id=[0, 7])
    assert load(Target(folder=exported)).model._stop_ids == [0, tokenizer.eos_token_id, 7]


def test_a_model_without_a_template_is_refused_with_what_to_do(exported: Path) -> None:
    (exported / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match=r"has no chat template.*save it as chat_template\.jinja next to") as raised:
        load(Target(folder=exported))
    assert raised.value.problem_id == "tokenizer-no-template"


def test_a_tokenizer_without_eos_says_where_to_set_it(exported: Path) -> None:
    change(exported / "tokenizer_config.json", eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(
        RequestError, match=r"no EOS token.*set it in the model's own folder, in tokenizer_config\.json"
    ):
        load(Target(folder=exported))


def test_a_hub_name_without_network_says_what_to_type() -> None:
    with pytest.raises(RequestError, match=r"hf download someone/model --local-dir DIR.*tunebook chat DIR") as raised:
        load(Target(hub_name="someone/model"))
    assert raised.value.problem_id == "hub-out-of-reach"
