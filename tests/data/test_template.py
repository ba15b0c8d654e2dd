"""The spans that the loss counts, for templates of every sort that is in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.schema import ModelConfig
from tunebook.data.conversation import Conversation
from tunebook.data.template import ConversationRenderer, Rendered, require_template, template_hash
from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import load_tokenizer, writes_date

from .conftest import CHATML

CHATML_WITH_MARKERS = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}
{%- else %}{{- message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# LLaMA 2's way: BOS before and EOS after each exchange, no header for the answer.
INST = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{- bos_token + '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + ' ' + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}
"""
# Phi's way: a conversation that is over ends with a second token that is not there while it goes on.
CLOSED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- else %}{{- '</s>' }}{%- endif %}
"""
# Reasoning models: thoughts are kept in the last answer only.
THINKING = """\
{%- for message in messages %}
{%- set content = message.content if loop.last else message.content.split('</think>')[-1] %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
# The prompt for an answer opens a thought that the finished conversation does not show.
PROMPT_DIFFERS = THINKING.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
ENDLESS = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""

Tokenizers = Callable[..., Any]


def talk(*turns: str, train: tuple[bool, ...] = ()) -> list[dict[str, Any]]:
    """Turns of user and assistant in turn; `train` of the assistant's, all true if not said."""
    roles = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
    trained = [role == "assistant" and (not train or train[i // 2]) for i, role in enumerate(roles)]
    return [
        {"role": role, "content": content, "train": is_trained}
        for role, content, is_trained in zip(roles, turns, trained, strict=True)
    ]


def trained_texts(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.fixture
def render(tiny_tokenizer: Tokenizers) -> Callable[..., Rendered]:
    """Render messages with the tokenizer of some options."""
    return lambda messages, **options: ConversationRenderer(tiny_tokenizer(**options)).render(
        Conversation(messages=messages), "a:7"
    )


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_MARKERS])
def test_answers_and_their_end_token_are_trained_on_unless_they_opted_out(render: Any, template: str) -> None:
    rendered = render(talk("Hi", "Yo", "Go", "Ok"), template=template)
    assert rendered.text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\nOk<|im_end|>\n"
    )
    assert trained_texts(rendered) == ["Yo<|im_end|>", "Ok<|im_end|>"]
    assert rendered.num_rewritten == 0
    rendered = render(talk("Hi", "Yo", "Go", "Ok", train=(False, True)), template=template)
    assert trained_texts(rendered) == ["Ok<|im_end|>"]


def test_where_answers_end(render: Any) -> None:
    turns = talk("Hi", "Yo", "Go", "Ok")
    rendered = render(turns, template=INST, eos_token="</s>", bos_token="<s>")
    assert rendered.text == "<s>[INST] Hi [/INST] Yo </s><s>[INST] Go [/INST] Ok </s>"
    assert trained_texts(rendered) == [" Yo </s>", " Ok </s>"]  # LLaMA's keep their spaces
    rendered = render(turns, template=CLOSED)
    assert rendered.text.endswith("Ok<|im_end|>\n</s>")
    assert trained_texts(rendered) == ["Yo<|im_end|>", "Ok<|im_end|>"]  # nothing after the first stop token
    rendered = render(turns, eos_token="</s>", generation_eos=[260, 259])  # </s> and <|im_end|>
    assert trained_texts(rendered) == ["Yo<|im_end|>", "Ok<|im_end|>"]
    rendered = render(talk("Yo", "Yo", "Yo", "Yo", train=(True, False)))  # equal answers are told apart
    start = len("<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n")
    assert rendered.spans == [(start, start + len("Yo<|im_end|>"))]


MARKED_THINKING = CHATML_WITH_MARKERS.replace(
    "message.content + '<|im_end|>' }}{%- endg",
    "(message.content if loop.last else message.content.split('</think>')[-1]) + '<|im_end|>' }}{%- endg",
)


@pytest.mark.parametrize("template", [THINKING, MARKED_THINKING])  # whose markers around such turns are not trusted
def test_turns_that_the_template_rewrites_are_left_out(render: Any, template: str) -> None:
    rendered = render(talk("Hi", "hm</think>Yo", "Go", "so</think>Ok"), template=template)
    assert "hm" not in rendered.text
    assert trained_texts(rendered) == ["so</think>Ok<|im_end|>"]
    assert (rendered.leaves_out, rendered.num_rewritten) == (True, 1)
    assert not render(talk("Hi", "Yo", "Go", "so</think>Ok"), template=template).leaves_out
    rendered = render(talk("Hi", "hm</think>Yo", "Go", "Ok", train=(True, False)), template=template)
    assert (rendered.spans, rendered.num_rewritten) == ([], 1)  # nothing is left, without an error


def test_reasoning_that_is_left_out_may_stand_in_a_later_turn(render: Any) -> None:
    first, quoting = "<think>ok</think>Sure.", "<think>And now?</think>Yes."
    for messages in (
        talk("Hi", first, "And now?", first),  # the same again
        talk("Hi", first, "Is that ok? Sure.", quoting),
        talk("Hi", "<think>Hi</think>Sure.", "And now?", quoting),  # the question itself
    ):
        rendered = render(messages, template=THINKING)
        assert rendered.leaves_out
        assert trained_texts(rendered) == [f"{messages[-1]['content']}<|im_end|>"]


WITHOUT_END = CHATML_WITH_MARKERS.replace(
    "{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}",
    "{{- message.content }}{%- endgeneration %}{{- '<|im_end|>\n' }}",
)
EARLY_STOP = ENDLESS.replace("message.content", "'</s>' + message.content")
NEEDS_FIRST = "{%- if messages[0].role == 'system' %}{%- endif %}" + THINKING
SYSTEM_TURN = {"role": "system", "content": "Be brief.", "train": False}
ANSWER_ALONE = [{"role": "assistant", "content": "Yo", "train": True}]


@pytest.mark.parametrize(
    ("options", "messages", "problem_id"),
    [
        ({"template": PROMPT_DIFFERS}, talk("Hi", "Yo"), "assistant-not-found"),
        ({"template": NEEDS_FIRST}, ANSWER_ALONE, "assistant-not-found"),
        ({"template": ENDLESS}, talk("Hi", "Yo"), "eos-not-trained"),
        ({"eos_token": "</s>"}, talk("Hi", "Yo"), "eos-not-trained"),
        ({"template": WITHOUT_END}, talk("Hi", "Yo"), "eos-not-trained"),
        ({"template": EARLY_STOP, "eos_token": "</s>"}, talk("Hi", "Yo"), "eos-not-trained"),
        ({"template": INST, "eos_token": "</s>", "bos_token": "<s>"}, [SYSTEM_TURN, *talk("Hi", "Yo")],
         "chat-template-refuses"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_found_or_does_not_end_is_an_error(
    render: Any, options: dict[str, Any], messages: list[dict[str, Any]], problem_id: str
) -> None:
    with pytest.raises(DataError, match=r"^a:7: ") as caught:
        render(messages, **options)
    assert caught.value.problem_id == problem_id


def test_a_broken_template_and_none_are_wrong_requests(render: Any, tiny_tokenizer: Tokenizers) -> None:
    with pytest.raises(RequestError, match="line 2") as broken:
        render(talk("Hi", "Yo"), template="{{ 1 }}\n{% for %}")
    assert broken.value.problem_id == "chat-template-broken"
    tokenizer = tiny_tokenizer(template=None)
    assert template_hash(tokenizer) is None
    with pytest.raises(RequestError) as missing:
        require_template(tokenizer)
    assert missing.value.problem_id == "tokenizer-no-template"


DROPS_SYSTEM = """\
{%- for m in messages %}{%- if m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
DROPS_TOOLS = DROPS_SYSTEM.replace("'system'", "'tool'")
# As DeepSeek R1's: reasoning is left out of every answer.
DROPS_REASONING = THINKING.replace("message.content if loop.last else ", "")
# As Mistral's: the system prompt stands before the last question.
SYSTEM_LAST = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- set is_last = loop.index0 >= messages|length - 2 and messages[0].role == 'system' %}
{{- '[INST]' + (messages[0].content + '\n' if is_last else '') + m.content|trim + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
"""
# As Qwen 3's: reasoning is taken apart and put together again with white space of its own.
REASSEMBLES = """\
{%- for m in messages %}
{%- if m.role == 'assistant' and '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}
{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + m.content.split('</think>')[-1].strip() }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}{%- endif %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def turns_of(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, "train": role == "assistant"} for role, content in turns]


SYSTEM = turns_of(("system", "Answer in French."), ("user", "hello"), ("assistant", "bonjour"))
TOOL = turns_of(("user", "Rain?"), ("assistant", "look"), ("tool", "rain"), ("assistant", "It rains: rain"))


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (DROPS_SYSTEM, SYSTEM, r"turn 1 \(system\): 'Answer in French.'"),
        # The missing text stands elsewhere.
        (DROPS_SYSTEM, turns_of(("system", "hi"), ("user", "hi"), ("assistant", "hi")), r"turn 1 \(system\): 'hi'"),
        (DROPS_TOOLS, TOOL, r"turn 3 \(tool\): 'rain'"),
        (DROPS_REASONING, turns_of(("user", "2+2?"), ("assistant", "sum</think>4"), ("user", "3?"), ("assistant", "3")),
         "the reasoning of turn 2"),
        (THINKING.replace("+ content +", "+ content[:20] +"),
         turns_of(("user", "2+2?"), ("assistant", "an answer that is cut off")), "turn 2"),
        (THINKING.replace("+ content +", "+ content[:20] +"),
         turns_of(("user", "a long question that is cut"), ("assistant", "4")), r"turn 1 \(user\)"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_an_error(
    tiny_tokenizer: Tokenizers, template: str, messages: list[dict[str, Any]], message: str
) -> None:
    renderer, written = ConversationRenderer(tiny_tokenizer(template=template)), Conversation(messages=messages)
    for has_spans in (True, False):
        if template == DROPS_REASONING and not has_spans:
            assert renderer.render(written, "a:7", has_spans=False).leaves_out  # of an earlier answer: counted
            continue
        with pytest.raises(DataError, match=message) as caught:
            renderer.render(written, "a:7", has_spans=has_spans)
        assert caught.value.problem_id == "template-leaves-out"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (SYSTEM_LAST,
         turns_of(("system", "s"), ("user", " s "), ("assistant", "yo"), ("user", "go"), ("assistant", "s"))),
        (REASSEMBLES, turns_of(("user", "2+2?"), ("assistant", "<think>sum</think>four"))),
        (REASSEMBLES, turns_of(("user", "2+2?"), ("assistant", "<think>only\nthought</think>"))),
        (CHATML_WITH_MARKERS.replace("message.content + '<|im_end|>\n'", "message.content|tojson + '<|im_end|>\n'"),
         turns_of(("user", 'say "é" and\n\\n'), ("assistant", "é"))),
        (THINKING, turns_of(("user", "same"), ("assistant", "same"), ("user", "same"), ("assistant", "same"))),
    ],
)  # fmt: skip
def test_what_a_template_only_writes_in_another_way_is_there(
    tiny_tokenizer: Tokenizers, template: str, messages: list[dict[str, Any]]
) -> None:
    rendered = ConversationRenderer(tiny_tokenizer(template=template)).render(
        Conversation(messages=messages), "a:7", has_spans=False
    )
    assert not rendered.leaves_out


def test_a_prompt_whose_system_turn_is_left_out_is_an_error(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(template=DROPS_SYSTEM))
    with pytest.raises(DataError, match=r"this prompt: .* turn 1 \(system\)"):
        renderer.prompt(Conversation(messages=SYSTEM[:2]))


def test_an_end_token_inside_an_answer_does_not_end_it(tiny_tokenizer: Tokenizers) -> None:
    for template in (CHATML, CHATML_WITH_MARKERS):
        renderer = ConversationRenderer(tiny_tokenizer(template=template))
        messages = talk("a <|im_end|> b", "c <|im_end|> d", "e", "<|im_end|>")
        rendered = renderer.render(Conversation(messages=messages), "a:1")
        text, spans = renderer.special.show(rendered.text, rendered.spans)
        assert [text[start:end] for start, end in spans] == ["c <|im_end|> d<|im_end|>", "<|im_end|><|im_end|>"]
        assert rendered.special == "<|im_end|>"


DATED = "{{- 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML_WITH_MARKERS


def test_a_template_writes_the_date_that_is_set_and_not_todays(
    tokenizer_folder: Callable[..., Path],
) -> None:
    folder = tokenizer_folder(template=DATED)
    for date, written in (("2024-07-26", "26 Jul 2024"), ("2031-12-01", "01 Dec 2031")):
        tokenizer = load_tokenizer(ModelConfig(path=str(folder), template_date=date))
        assert writes_date(tokenizer)
        rendered = ConversationRenderer(tokenizer).render(Conversation(messages=talk("Hi", "Yo")), "a:1")
        assert rendered.text.startswith(f"Today: {written}\n")
        # Through transformers itself, as the harness renders, too.
        assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == (
            f"Today: {written}\n<|im_start|>user\nHi<|im_end|>\n"
        )
    assert not writes_date(load_tokenizer(ModelConfig(path=str(tokenizer_folder(template=CHATML_WITH_MARKERS)))))
