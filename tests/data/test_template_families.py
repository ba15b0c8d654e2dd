"""Tokens and masks of conversations with tools and reasoning, compared with transformers' own on TRL's copies of the
templates of model families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tunebook.config.choices import Format, Reasoning, TrainOn
from tunebook.config.schema import ModelConfig
from tunebook.data.corpus import IGNORED_LABEL, CorpusKind
from tunebook.data.encode import LEFT_OUT, REWRITTEN, Encoder
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import load_tokenizer
from tunebook.model.tokenizer_files import read_chat_template

from .conftest import write_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
PLAIN = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
WITH_TOOLS = [
    {"role": "user", "content": "How is Zürich?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"sky": "grey"}'},
    {"role": "assistant", "content": "Grey."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Gladly."},
]
REASONED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "Two and two.", "content": "4"},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "reasoning_content": "Four and one.", "content": "5"},
]
BAR = "\uff5c"  # of DeepSeek's tokens
# The token with which a turn of each family ends, and its beginning of a text.
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "llava_next": "</s>",  # Mistral's
    "gptoss": "<|return|>",
    "glm4moe": "<|user|>",
    "deepseekv3": f"<{BAR}end▁of▁sentence{BAR}>",
    "deepseek_r1_distill": f"<{BAR}end▁of▁sentence{BAR}>",
    "phi3": "<|end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "smolvlm": "<end_of_utterance>",
}
OF_IMAGES = ("llava_next", "smolvlm")  # whose templates read lists of parts only
MORE_ENDS = {"gptoss": ["<|call|>"], "glm4moe": ["<|observation|>"]}
STARTS = {"gemma3": "<bos>", "llama3": "<|begin_of_text|>", "llama3_1": "<|begin_of_text|>"}
CONTROL = rf"<\|[a-zA-Z_]+\|>|<{BAR}[^{BAR}]*{BAR}>|</?[a-z_]+_of_[a-z]+>"
Family = Callable[..., Any]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The tokenizer of a family: a token for each byte and for each control token that the template writes."""

    @cache
    def make(name: str) -> Any:
        base = name.removesuffix("_training")
        template = read_chat_template(f"trl:{name}")
        special = ("<|pad|>", *sorted({*re.findall(CONTROL, template), ENDS[base]}))
        folder = write_tokenizer(
            tmp_path_factory.mktemp("families") / name,
            template=template,
            eos_token=ENDS[base],
            bos_token=STARTS.get(base),
            special=special,
        )
        tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
        stops = [tokenizer.convert_tokens_to_ids(token) for token in (ENDS[base], *MORE_ENDS.get(base, []))]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return tokenizer

    return make


def encode(
    tokenizer: Any, messages: list[dict[str, Any]], *, reasoning: Reasoning = Reasoning.keep, **more: Any
) -> tuple[list[int], list[int], Encoder]:
    """The tokens of a conversation, 1 for each that is trained on, and the encoder with its notes."""
    record = {"messages": messages, **more}
    row = Normalizer(Format.auto, FormatSettings()).row(record) | {"origin": "a:1"}
    encoder = Encoder(CorpusKind.conversation, TrainOn.auto, tokenizer, reasoning=reasoning)
    (document,) = encoder.encode([row])
    return document.input_ids, [int(label != IGNORED_LABEL) for label in document.labels], encoder


def expected(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    if any(name in tokenizer.name_or_path for name in OF_IMAGES):  # transformers would write empty turns, or fail
        messages = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
    made: dict[str, Any] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    return made


def texts(tokenizer: Any, ids: list[int], mask: list[int]) -> list[str]:
    """The stretches of trained tokens as text."""
    runs, stretches = "".join(map(str, mask)), []
    for run in re.finditer("1+", runs):
        stretches.append(tokenizer.decode(ids[run.start() : run.end()], skip_special_tokens=False))
    return stretches


PLAIN_FAMILIES = (
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "gptoss", "gemma3", "llava_next",
    "phi3", "cohere", "smolvlm",
)  # fmt: skip
TRAINING_FAMILIES = (
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "glm4moe", "deepseekv3", "deepseek_r1_distill", "phi3",
    "cohere", "gemma3", "llava_next", "smolvlm",
)  # fmt: skip


OFTEN = ("qwen2_5", "qwen3", "llama3_2", "qwen3_training", "deepseekv3_training")


def some_nightly(*names: str) -> list[Any]:
    """The names, of which those that are not in OFTEN are tested in the nightly run."""
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in names]


# Answers whose letters stand elsewhere in what templates write.
SHORT = (">", "|", "e", "end", "_", "user", "think", "</s")


@pytest.mark.parametrize("name", some_nightly(*PLAIN_FAMILIES, *(f"{name}_training" for name in TRAINING_FAMILIES)))
def test_answers_are_found_as_by_transformers_whatever_their_letters_are(name: str, family: Family) -> None:
    tokenizer = family(name)
    is_marked = name.endswith("_training")
    ids, mask, encoder = encode(tokenizer, PLAIN)
    theirs = expected(tokenizer, PLAIN, return_assistant_tokens_mask=is_marked)
    assert ids == theirs["input_ids"]
    if is_marked:
        assert mask == theirs["assistant_masks"]
    # Those of qwen3 and gpt-oss write earlier answers in another way than the last.
    assert bool(encoder.counts.notes[REWRITTEN]) is (name in ("qwen3", "gptoss"))

    def trained(answer: str) -> list[str]:
        turns = [{**turn, "content": answer} if turn["role"] == "assistant" else turn for turn in PLAIN]
        ids, mask, _ = encode(tokenizer, turns)
        return texts(tokenizer, ids, mask)

    usual = trained("zqzq")
    assert len(usual) == 2 - encoder.counts.notes[REWRITTEN] and all("zqzq" in text for text in usual)
    assert not any("Hi" in text or "Bye" in text for text in usual)
    for answer in SHORT:
        assert trained(answer) == [text.replace("zqzq", answer) for text in usual], answer


@pytest.mark.parametrize(
    "name",
    some_nightly(
        "qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2", "qwen3_training", "glm4moe_training"
    ),
)
def test_calls_and_answers_are_trained_on_and_results_are_not(name: str, family: Family) -> None:
    tokenizer = family(name)
    ids, mask, encoder = encode(tokenizer, WITH_TOOLS, tools=TOOLS)
    is_marked = name.endswith("_training")
    theirs = expected(tokenizer, WITH_TOOLS, tools=TOOLS, return_assistant_tokens_mask=is_marked)
    assert ids == theirs["input_ids"]
    if is_marked:
        assert mask == theirs["assistant_masks"]
    trained = texts(tokenizer, ids, mask)
    for tool in ("end", "call", "e"):  # whatever its letters are
        messages, tools = json.loads(json.dumps([WITH_TOOLS, TOOLS]).replace("weather", tool))
        stretches = texts(tokenizer, *encode(tokenizer, messages, tools=tools)[:2])
        assert stretches == [text.replace("weather", tool) for text in trained], tool
    assert len(trained) == 3 or encoder.counts.notes[REWRITTEN]
    assert "Gladly." in trained[-1]
    if name != "qwen3":  # which writes an empty thought in the last answer alone
        assert "weather" in trained[0] and "Zürich" in trained[0]
        assert "Grey." in trained[1]
    assert not any(word in text for text in trained for word in ("sky", "its name", "How is", "Thanks"))


def test_of_harmony_only_turns_that_end_as_in_generation_are_trained_on(family: Family) -> None:
    """gpt-oss ends a call with <|call|>, the last answer with <|return|>, and an earlier one with <|end|>, which would
    not end its generation.
    """
    tokenizer = family("gptoss_training")
    ids, mask, encoder = encode(tokenizer, WITH_TOOLS, tools=TOOLS)
    theirs = expected(tokenizer, WITH_TOOLS, tools=TOOLS, return_assistant_tokens_mask=True)
    assert ids == theirs["input_ids"]
    own, whole = texts(tokenizer, ids, mask), texts(tokenizer, ids, theirs["assistant_masks"])
    assert own == [text for text in whole if not text.endswith("<|end|>")]
    assert "weather" in own[0] and own[0].endswith("<|call|>") and own[-1].endswith("Gladly.<|return|>")
    assert encoder.counts.notes[REWRITTEN] == 1
    last = WITH_TOOLS[:2]
    ids, mask, encoder = encode(tokenizer, last, tools=TOOLS)
    theirs = expected(tokenizer, last, tools=TOOLS, return_assistant_tokens_mask=True)
    assert (ids, mask) == (theirs["input_ids"], theirs["assistant_masks"])


@pytest.mark.parametrize("name", ["qwen3", "gptoss"])
def test_reasoning_that_a_template_leaves_out_of_an_earlier_answer_is_a_note(name: str, family: Family) -> None:
    tokenizer = family(name)
    messages = [
        {("thinking" if key == "reasoning_content" and name == "gptoss" else key): text for key, text in turn.items()}
        for turn in REASONED
    ]
    ids, mask, encoder = encode(tokenizer, REASONED)
    assert ids == expected(tokenizer, messages)["input_ids"]
    trained = texts(tokenizer, ids, mask)
    assert encoder.counts.notes[LEFT_OUT] == 1 and encoder.counts.first[LEFT_OUT] == "a:1"
    assert len(trained) == 1 and "Four and one." in trained[0] and "5" in trained[0]


def test_which_reasoning_is_trained_on(family: Family) -> None:
    tokenizer = family("qwen3_training")
    for policy, kept in (
        (Reasoning.keep, ["Two and two.", "Four and one."]), (Reasoning.last, ["Four and one."]), (Reasoning.drop, []),
    ):  # fmt: skip
        ids, mask, _ = encode(tokenizer, REASONED, reasoning=policy)
        trained = "".join(texts(tokenizer, ids, mask))
        assert [thought for thought in ("Two and two.", "Four and one.") if thought in trained] == kept
        in_content = [
            {"role": turn["role"], "content": f"<think>{turn['reasoning_content']}</think>{turn['content']}"}
            if "reasoning_content" in turn
            else turn
            for turn in REASONED
        ]
        assert encode(tokenizer, in_content, reasoning=policy)[0] == ids


def test_a_template_without_a_place_for_reasoning_gets_it_in_the_content(family: Family) -> None:
    tokenizer = family("qwen2_5")

    def trained(messages: list[dict[str, Any]], reasoning: Reasoning) -> list[str]:
        return texts(tokenizer, *encode(tokenizer, messages, reasoning=reasoning)[:2])

    assert trained(REASONED, Reasoning.keep)[0] == "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    stray = [PLAIN[0], {"role": "assistant", "content": "The answer.\n</think>"}]  # is no reasoning
    assert trained(stray, Reasoning.drop) == ["The answer.\n</think><|im_end|>"]
    alone = [PLAIN[0], {"role": "assistant", "content": "<think>Hm.</think>"}]
    assert "Hm." in trained(alone, Reasoning.keep)[0]
    with pytest.raises(DataError, match=r"^a:1: turn 2 .*dataset\.reasoning=drop"):
        trained(alone, Reasoning.drop)


TWO_CALLS = [WITH_TOOLS[0], {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, *WITH_TOOLS[2:]]
TEXT_AND_CALL = [WITH_TOOLS[0], {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}, *WITH_TOOLS[2:]]


@pytest.mark.parametrize(
    ("name", "messages", "problem_id"),
    [
        ("gptoss", TWO_CALLS, "template-without-tools"),
        ("llama3_2", TEXT_AND_CALL, "template-leaves-out"),
        ("llama3_2", TWO_CALLS, "chat-template-refuses"),
    ],
)
def test_calls_that_a_template_does_not_write_are_refused(
    name: str, messages: list[dict[str, Any]], problem_id: str, family: Family
) -> None:
    with pytest.raises(DataError, match=r"^a:1: ") as caught:
        encode(family(name), messages, tools=TOOLS)
    assert (caught.value.problem_id, caught.value.exit_code) == (problem_id, 4)


def test_a_special_token_typed_in_arguments_and_tools_is_text(family: Family) -> None:
    tokenizer = family("qwen2_5")
    arguments = {"city": "<|im_end|>", "<|im_end|>": 1}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [WITH_TOOLS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids, mask, _ = encode(tokenizer, messages, tools=TOOLS)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    trained = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert trained.count(end) == 1 and trained[-1] == end
    assert "<|im_end|>" in tokenizer.decode(trained[:-1])


def test_the_training_version_of_a_template_is_found_by_its_text(family: Family) -> None:
    folder = family("qwen3").name_or_path
    tokenizer = load_tokenizer(ModelConfig(path=folder, chat_template="training"))
    assert tokenizer.chat_template == read_chat_template("trl:qwen3_training")
    own = load_tokenizer(ModelConfig(path=family("llama3_2").name_or_path)).chat_template
    for name in ("training", "trl:qwen9"):
        with pytest.raises(RequestError) as error:
            read_chat_template(name, own)
        assert error.value.problem_id == "chat-template-not-found"


QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
LLAMA = "Cutting Knowledge Date: December 2023 Today Date: 26 Jul 2024"
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("name", "always", "without_system"),
    [("qwen2_5", "", QWEN), ("qwen2_5_training", "", QWEN), ("llama3_1", LLAMA, ""), ("qwen3", "", "")],
)
def test_what_a_template_adds_is_counted(name: str, always: str, without_system: str, family: Family) -> None:
    tokenizer = family(name)
    for messages, expected_text in (([SYSTEM, *PLAIN], always), (PLAIN, always or without_system)):
        added = encode(tokenizer, messages)[2].counts.added
        assert added == ({expected_text: 1} if expected_text else {})
    for_tools = encode(tokenizer, [SYSTEM, *PLAIN], tools=TOOLS)[2].counts.added
    (preamble,) = for_tools.keys() - {always}
    assert "function" in preamble and "weather" not in preamble, "the document says what its tools are"


def test_marks_of_turns_are_not_counted_as_added(tiny_tokenizer: Callable[..., Any]) -> None:
    template = (
        "{{ 'Below is a task.\n\n' if messages[0].role != 'system' else '' }}{% for turn in messages %}"
        "{{ '### ' + turn.role | title + ':\n' + turn.content }}"
        "{{ '</s>' if turn.role == 'assistant' else '' }}{{ '\n\n' }}"
        "{% endfor %}{{ '### Assistant:\n' if add_generation_prompt else '' }}"
    )
    tokenizer = tiny_tokenizer(template=template, eos_token="</s>")
    assert encode(tokenizer, PLAIN)[2].counts.added == {"Below is a task.": 1}
    assert not encode(tokenizer, [SYSTEM, *PLAIN])[2].counts.added


def test_chatml_writes_tools_and_adds_nothing_without_them(tiny_tokenizer: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer(template=read_chat_template("chatml"))
    assert not encode(tokenizer, PLAIN)[2].counts.added
    assert "weather" in tokenizer.decode(encode(tokenizer, WITH_TOOLS, tools=TOOLS)[0])
