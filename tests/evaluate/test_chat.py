"""Chat with a real model that answers what a test wants: streaming, history, commands, loading, Ctrl-C."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from tests.evaluate.conftest import cpu_run
from tests.image_models import FAMILIES, draw_image, write_model
from tunebook.config.choices import Compute, Generation, PeftMethod, TrainOn, Weights
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.schema import RunConfig
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import Encoder
from tunebook.data.template import template_hash
from tunebook.errors import DataError, RequestError
from tunebook.evaluate.chat import HELP, Chat, Sampling, chat_command, converse, load_chat
from tunebook.evaluate.target import Target, find_target
from tunebook.model.tokenizer import stop_ids, tokenizer_hash
from tunebook.record.manifest import system_prompt_hash

from ..data.conftest import chat_row

Models = Callable[..., PreTrainedModel]
Chats = Callable[..., Chat]
SAMPLING = Sampling(max_new_tokens=16, temperature=0.0, seed=0)


@pytest.fixture
def scripted(tokenizer: PreTrainedTokenizerBase) -> Models:
    """A Qwen2 that answers every prompt with one text and EOS: its layer adds nothing, its head knows what follows."""

    def make(answer: str, *, context: int = 96) -> PreTrainedModel:
        encode: Any = tokenizer
        (newline,) = encode("\n")["input_ids"]  # the generation prompt ends with it
        chain = [newline, *encode(answer)["input_ids"], tokenizer.eos_token_id]
        assert len(set(chain[:-1])) == len(chain) - 1, "a token that comes twice has one successor only"
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=832, hidden_size=256, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=False,
        )  # fmt: skip
        model: Any = Qwen2ForCausalLM(config)
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.down_proj.weight.zero_()
            model.lm_head.weight.zero_()
            for token, successor in pairwise(chain):
                model.lm_head.weight[successor] += model.model.embed_tokens.weight[token]
        made: PreTrainedModel = model
        return made

    return make


@pytest.fixture
def chat_of(tokenizer: PreTrainedTokenizerBase, scripted: Models) -> Chats:
    """A conversation with a model that always answers the same."""

    def make(answer: str, *, max_new_tokens: int = 16, system: str | None = None, **options: Any) -> Chat:
        model = scripted(answer, **options)
        sampling = replace(SAMPLING, max_new_tokens=max_new_tokens)
        stops = stop_ids(model, tokenizer)
        return Chat(model=model, tokenizer=tokenizer, stop_ids=stops, sampling=sampling, system_prompt=system)

    return make


def ask(chat: Chat, question: str = "rain") -> tuple[str, str | None]:
    """The answer as it was shown, and the note."""
    pieces: list[str] = []
    note = chat.ask(question, pieces.append)
    return "".join(pieces), note


@pytest.mark.parametrize(
    ("written", "num_tokens", "shown", "is_whole"),
    [
        ("apple bird cat", 16, "apple bird cat", True),  # at the trained EOS
        ("apple bird cat", 2, "apple bird", False),
        ("é🦊w", 16, "é🦊w", True),  # 2 + 4 + 1 tokens: letters come whole
        ("", 16, "", True),
    ],
)
def test_an_answer_is_shown_and_kept(chat_of: Chats, written: str, num_tokens: int, shown: str, is_whole: bool) -> None:
    chat = chat_of(written, max_new_tokens=num_tokens)
    answer, note = ask(chat)
    assert answer == shown
    assert [turn["content"] for turn in chat.turns] == (["rain", shown] if shown else [])
    assert bool(note) is not (is_whole and bool(shown))


def test_a_prompt_is_encoded_as_in_training(chat_of: Chats, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [{"role": "user", "content": "Reverse the order: rain key chair"}]
    row = chat_row([*turns, {"role": "assistant", "content": "chair key rain"}])
    (document,) = Encoder(CorpusKind.conversation, TrainOn.assistant, tokenizer).encode([row])
    prompt = chat_of("apple")._encode(turns)
    assert document.input_ids[: len(prompt)] == prompt
    assert all(label == -100 for label in document.labels[: len(prompt)])
    assert document.labels[len(prompt)] != -100


def test_drawing_is_repeated_by_the_seed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    def draw(seed: int) -> str:
        sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed)
        chat = Chat(model=model, tokenizer=tokenizer, stop_ids=[2], sampling=sampling)
        chat.reset()
        return ask(chat)[0]

    assert draw(1) == draw(1) != draw(2)


def test_the_model_reads_the_history_until_it_is_reset(chat_of: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("apple bird", system="lemon")
    prompts: list[list[tuple[str, str]]] = []
    generate = chat.model.generate

    def note(prompt: torch.Tensor, **options: Any) -> Any:
        text = str(chat.tokenizer.decode(prompt[0]))
        turns = [turn.partition("\n") for turn in text.replace("<|im_end|>", "").split("<|im_start|>")[1:-1]]
        prompts.append([(role, content.strip()) for role, _, content in turns])
        return generate(prompt, **options)

    monkeypatch.setattr(chat.model, "generate", note)
    ask(chat, "rain")
    ask(chat, "key")
    chat.reset()
    ask(chat, "moon")
    assert prompts == [
        [("system", "lemon"), ("user", "rain")],
        [("system", "lemon"), ("user", "rain"), ("assistant", "apple bird"), ("user", "key")],
        [("system", "lemon"), ("user", "moon")],
    ]


def test_a_conversation_longer_than_the_context_is_refused_and_not_kept(chat_of: Chats) -> None:
    chat = chat_of("apple", context=64)
    ask(chat, "rain")
    with pytest.raises(RequestError) as error:
        ask(chat, "rain " * 80)
    assert error.value.problem_id == "chat-too-long"
    assert [turn["content"] for turn in chat.turns] == ["rain", "apple"]
    assert ask(chat, "key")[0] == "apple"


def test_ctrl_c_ends_an_answer_and_what_there_is_of_it_is_kept(chat_of: Chats) -> None:
    def interrupt(piece: str) -> None:
        if piece:
            raise KeyboardInterrupt

    chat = chat_of("apple bird cat")
    with pytest.raises(KeyboardInterrupt):
        chat.ask("rain", interrupt)
    assert [turn["content"] for turn in chat.turns] == ["rain", "apple"]


def talk(chat: Chat, *lines: str, color: bool = False) -> str:
    """What the terminal shows while these lines are typed, and then Ctrl-D."""
    waiting = iter(lines)
    screen = io.StringIO()

    def read_line(prompt: str) -> str:
        line = next(waiting, None)
        if line is None:
            raise EOFError
        screen.write(f"{prompt}{line}\n")
        return line

    console = Console(file=screen, width=100, force_terminal=color, color_system="standard" if color else None)
    converse(chat, console, read_line)
    return screen.getvalue()


def test_questions_are_answered_and_streamed_text_is_no_markup(chat_of: Chats) -> None:
    chat = chat_of("[red] :x w", max_new_tokens=40)
    shown = talk(chat, "[bold]rain[/bold]", "", "   ", color=True)
    assert shown.startswith("> [bold]rain[/bold]\n[red] :x w\n")
    assert [turn["content"] for turn in chat.turns] == ["[bold]rain[/bold]", "[red] :x w"]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(chat_of: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Console, "out", interrupt)
    assert talk(chat_of("apple bird"), "rain", "key").count("(stopped)") == 2


def test_commands_are_no_questions(chat_of: Chats) -> None:
    chat = chat_of("apple")
    assert HELP in talk(chat, "rain", "/reset", "/help", "/etc/passwd")
    assert [turn["content"] for turn in chat.turns[::2]] == ["/etc/passwd"]
    assert talk(chat, "/exit", "rain") == "> /exit\n"


@pytest.fixture
def run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, scripted: Models) -> Path:
    """A finished run whose model answers "apple bird"."""
    folder = tmp_path / "outputs" / "quickstart" / "2026-01-02T03-04-05Z"
    for part in (scripted("apple bird"), tokenizer):
        part.save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(config_to_yaml(cpu_run()))
    manifest = {
        "format": 1,
        "status": {"state": "finished", "reason": None},
        "chat_template_sha256": template_hash(tokenizer),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "system_prompt_sha256": system_prompt_hash(None),
        "config_sha256": "c",
        "model": {"weights_fingerprint": None},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def change_run(run: Path, edit: Callable[[RunConfig], None], **manifest: Any) -> None:
    """Change the configuration and the manifest of a run."""
    config = load_config(run / "run.yaml")
    edit(config)
    (run / "run.yaml").write_text(config_to_yaml(config))
    manifest["system_prompt_sha256"] = system_prompt_hash(config.dataset.system_prompt)
    (run / "manifest.json").write_text(json.dumps(json.loads((run / "manifest.json").read_text()) | manifest))


def load(run: Path | None, folder: Path) -> Chat:
    return load_chat(Target(run=run, folder=folder), SAMPLING)[0]


def test_a_run_answers_with_its_own_tokenizer_and_system_prompt(run: Path) -> None:
    def edit(config: RunConfig) -> None:
        config.model.path, config.dataset.system_prompt = "/nowhere/model", "Answer with words."

    change_run(run, edit)  # a run can be moved away from where its base model was
    chat, description = load_chat(Target(run=run, folder=run / "model"), SAMPLING)
    assert "template and tokenizer are those of the run" in description
    assert (chat.system_prompt, ask(chat)) == ("Answer with words.", ("apple bird", None))
    assert load_chat(Target(run=run, folder=run / "model"), SAMPLING, "")[0].system_prompt is None


def test_an_adapter_is_loaded_on_its_base(run: Path, scripted: Models, tmp_path: Path) -> None:
    """The projection is the base's plus B @ A, and everything else is the base's."""
    base = Path(shutil.move(run / "model", tmp_path / "base"))

    def edit(config: RunConfig) -> None:
        config.model.path, config.model.weights, config.model.facts = str(base), Weights.pretrained, None
        config.peft.method, config.peft.target_modules = PeftMethod.lora, ["o_proj"]

    change_run(run, edit)
    settings = LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(scripted("apple bird"), settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_()
    adapted.save_pretrained(run / "model")
    parts = {name.split(".")[-2]: part for name, part in load_file(run / "model/adapter_model.safetensors").items()}
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    expected = weights[name] + parts["lora_B"] @ parts["lora_A"]
    assert expected.abs().max() > 0
    torch.testing.assert_close(load(run, run / "model").model.state_dict(), weights | {name: expected})
    change_run(run, edit, model={"weights_fingerprint": "1" * 64})
    with pytest.raises(DataError) as raised:
        load(run, run / "model")
    assert raised.value.problem_id == "base-changed"


@pytest.mark.parametrize("piped", [None, "two lines\nof réin\n"])
def test_a_question_or_piped_text_gets_one_answer_and_nothing_else_on_stdout(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, piped: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped or ""))
    question = None if piped else "/help"  # no command outside of a conversation
    chat_command("quickstart", run.parents[1], question=question, is_model=False, system=None, sampling=SAMPLING)
    assert capfd.readouterr() == ("apple bird\n", f"the newest finished run: {run}\n")


@pytest.mark.parametrize(("question", "target"), [(" ", "quickstart"), ("a", "quickstrat")])
def test_wrong_requests_are_refused(run: Path, question: str, target: str) -> None:
    with pytest.raises(RequestError):
        chat_command(target, run.parents[1], question=question, is_model=False, system=None, sampling=SAMPLING)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_a_run_is_computed_as_it_was_trained_and_a_folder_in_its_own_format(
    run: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    def edit(config: RunConfig) -> None:
        config.hardware.generation, config.precision.compute = Generation.hopper, Compute.bf16

    change_run(run, edit)
    chat = load(run, run / "model")
    assert (chat.model.device.type, chat.model.dtype, chat.autocast_dtype) == ("cuda", torch.float32, torch.bfloat16)
    assert ask(chat)[0] == "apple bird"
    bare = Path(shutil.copytree(run / "model", tmp_path / "bare"))
    half: Any = Qwen2ForCausalLM.from_pretrained(bare)
    half.to(dtype).save_pretrained(bare)
    chat = load(None, bare)
    kept = torch.float32 if dtype is torch.float16 else dtype  # fp16 is computed by autocast
    assert (chat.model.device.type, chat.model.dtype) == ("cuda", kept)
    assert ask(chat)[0] == "apple bird"


def test_images_are_shown_with_the_first_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "qwen", FAMILIES["qwen2_5_vl"])
    draw_image(0, 100, 60).save(tmp_path / "a.png")
    target = find_target(str(folder), tmp_path, is_model=True)
    chat, _ = load_chat(target, SAMPLING, images=[str(tmp_path / "a.png")])
    model: Any = chat.model
    seen, generate = [], model.generate

    def note(prompt: torch.Tensor, **options: Any) -> Any:
        seen.append((prompt, options["image_grid_thw"], len(options["pixel_values"])))
        return generate(prompt, **options)

    monkeypatch.setattr(model, "generate", note)
    for _ in range(2):
        ask(chat, "What?")
    for prompt, grid, num_patches in seen:  # 112 x 56 pixels: 8 x 4 patches, four of them a token
        assert int((prompt == model.config.image_token_id).sum()) == 8
        assert grid.tolist() == [[1, 4, 8]] and num_patches == 32
    for name, problem in ((str(tmp_path / "b.png"), "b.png does not exist"), ("http://127.0.0.1:1/a", "fetched")):
        with pytest.raises(RequestError, match=problem) as caught:
            load_chat(target, SAMPLING, images=[name])
        assert caught.value.problem_id == "chat-image"
