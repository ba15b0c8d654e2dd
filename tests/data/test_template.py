"""The spans that the loss counts, for templates of every sort that is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunebook.data.template import ConversationRenderer, Rendered, require_template, template_hash
from tunebook.errors import DataError, RequestError

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


@pytest.mark.parametrize("template", [None, CHATML_WITH_MARKERS])
def test_answers_and_their_end_token_are_trained_on(tiny_tokenizer: Tokenizers, template: str | None) -> None:
    tokenizer = tiny_tokenizer(**({"template": template} if template else {}))
    rendered = ConversationRenderer(tokenizer).render(talk("Hi", "Yo", "Go", "Ok"), "a:1")
    assert rendered.text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\nOk<|im_end|>\n"
    )
    assert trained_texts(rendered) == ["Yo<|im_end|>", "Ok<|im_end|>"]
    assert rendered.num_rewritten == 0


@pytest.mark.parametrize("template", [None, CHATML_WITH_MARKERS])
def test_a_turn_that_opted_out_is_not_trained_on(tiny_tokenizer: Tokenizers, template: str | None) -> None:
    tokenizer = tiny_tokenizer(**({"template": template} if template else {}))
    messages = talk("Hi", "Yo", "Go", "Ok", train=(False, True))
    assert trained_texts(ConversationRenderer(tokenizer).render(messages, "a:1")) == ["Ok<|im_end|>"]


def test_equal_answers_are_told_apart(tiny_tokenizer: Tokenizers) -> None:
    rendered = ConversationRenderer(tiny_tokenizer()).render(talk("Yo", "Yo", "Yo", "Yo", train=(True, False)), "a:1")
    start = len("<|im_start|>user\nYo<|im_end|>\n<|im_start|>assistant\n")
    assert rendered.spans == [(start, start + len("Yo<|im_end|>"))]


def test_llama_answers_keep_their_spaces(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(template=INST, eos_token="</s>", bos_token="<s>")
    rendered = ConversationRenderer(tokenizer).render(talk("Hi", "Yo", "Go", "Ok"), "a:1")
    assert rendered.text == "<s>[INST] Hi [/INST] Yo </s><s>[INST] Go [/INST] Ok </s>"
    assert trained_texts(rendered) == [" Yo </s>", " Ok </s>"]


def test_nothing_after_the_first_stop_token_is_trained_on(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(template=CLOSED)
    rendered = ConversationRenderer(tokenizer).render(talk("Hi", "Yo", "Go", "Ok"), "a:1")
    assert rendered.text.endswith("Ok<|im_end|>\n</s>")
    assert trained_texts(rendered) == ["Yo<|im_end|>", "Ok<|im_end|>"]


def test_a_stop_token_of_the_generation_config_ends_a_turn(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(eos_token="</s>", generation_eos=[260, 259])  # </s> and <|im_end|>
    rendered = ConversationRenderer(tokenizer).render(talk("Hi", "Yo"), "a:1")
    assert trained_texts(rendered) == ["Yo<|im_end|>"]


def test_turns_that_the_template_rewrites_are_left_out(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(template=THINKING))
    rendered = renderer.render(talk("Hi", "hm</think>Yo", "Go", "so</think>Ok"), "a:1")
    assert "hm" not in rendered.text
    assert trained_texts(rendered) == ["so</think>Ok<|im_end|>"]
    assert rendered.num_rewritten == 1


def test_markers_around_rewritten_words_are_not_trusted(tiny_tokenizer: Tokenizers) -> None:
    template = CHATML_WITH_MARKERS.replace(
        "message.content + '<|im_end|>' }}{%- endg",
        "(message.content if loop.last else message.content.split('</think>')[-1]) + '<|im_end|>' }}{%- endg",
    )
    rendered = ConversationRenderer(tiny_tokenizer(template=template)).render(
        talk("Hi", "hm</think>Yo", "Go", "so</think>Ok"), "a:1"
    )
    assert trained_texts(rendered) == ["so</think>Ok<|im_end|>"]
    assert rendered.num_rewritten == 1


def test_a_rewritten_turn_alone_leaves_nothing_without_an_error(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(template=THINKING))
    rendered = renderer.render(talk("Hi", "hm</think>Yo", "Go", "Ok", train=(True, False)), "a:1")
    assert rendered.spans == []
    assert rendered.num_rewritten == 1


def test_an_answer_that_does_not_follow_its_prompt_is_an_error(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(template=PROMPT_DIFFERS))
    message = r"a:7: the assistant's last turn cannot be found.*writes '<think>', in the whole 'Yo<.*\{% generation %\}"
    with pytest.raises(DataError, match=message):
        renderer.render(talk("Hi", "Yo"), "a:7")


def test_a_turn_without_an_end_token_is_an_error(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(template=ENDLESS))
    with pytest.raises(DataError, match=r"a:7: .*never learn to stop.*type model\.eos_token=TOKEN"):
        renderer.render(talk("Hi", "Yo"), "a:7")


def test_an_end_token_that_generation_does_not_stop_at_is_an_error(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(eos_token="</s>"))
    with pytest.raises(
        DataError, match=r"ending with 'Yo<\|im_end\|>\\n'\) holds no token .*stops at \(</s>\)"
    ) as caught:
        renderer.render(talk("Hi", "Yo"), "a:7")
    assert """If <|im_end|> ends the turn, type 'model.eos_token="<|im_end|>"'""" in caught.value.message


def test_markers_that_leave_the_end_token_out_are_an_error(tiny_tokenizer: Tokenizers) -> None:
    template = CHATML_WITH_MARKERS.replace(
        "{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}",
        "{{- message.content }}{%- endgeneration %}{{- '<|im_end|>\n' }}",
    )
    assert template != CHATML_WITH_MARKERS
    with pytest.raises(DataError, match=r"turn's end before \{% endgeneration %\}"):
        ConversationRenderer(tiny_tokenizer(template=template)).render(talk("Hi", "Yo"), "a:7")


def test_what_the_template_refuses_is_said_with_its_reason(tiny_tokenizer: Tokenizers) -> None:
    renderer = ConversationRenderer(tiny_tokenizer(template=INST, eos_token="</s>", bos_token="<s>"))
    messages = [{"role": "system", "content": "Be brief.", "train": False}, *talk("Hi", "Yo")]
    message = r"a:7: the chat template refuses .*\(system, user, assistant\): Only user and assistant"
    with pytest.raises(DataError, match=message):
        renderer.render(messages, "a:7")


def test_an_answer_before_any_question_is_found_or_refused(tiny_tokenizer: Tokenizers) -> None:
    messages = [{"role": "assistant", "content": "Yo", "train": True}]
    assert trained_texts(ConversationRenderer(tiny_tokenizer()).render(messages, "a:1")) == ["Yo<|im_end|>"]
    needs_first = "{%- if messages[0].role == 'system' %}{%- endif %}" + THINKING
    with pytest.raises(DataError, match="cannot render the turns before the answer alone"):
        ConversationRenderer(tiny_tokenizer(template=needs_first)).render(messages, "a:7")


def test_a_template_that_is_not_jinja_is_a_wrong_request(tiny_tokenizer: Tokenizers) -> None:
    with pytest.raises(RequestError, match=r"not valid Jinja: line 2: .*model\.chat_template=FILE"):
        ConversationRenderer(tiny_tokenizer(template="{{ 1 }}\n{% for %}")).render(talk("Hi", "Yo"), "a:1")


def test_no_template_is_only_an_error_when_it_is_needed(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(template=None)
    assert template_hash(tokenizer) is None
    with pytest.raises(RequestError, match=r"no chat template.*model\.chat_template=FILE"):
        require_template(tokenizer)


def test_the_prompt_is_ready_for_the_answer(tiny_tokenizer: Tokenizers) -> None:
    prompt = ConversationRenderer(tiny_tokenizer()).prompt(talk("Hi"))
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_hash_follows_the_template(tiny_tokenizer: Tokenizers) -> None:
    first, again, other = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer(template=INST)
    assert template_hash(first) == template_hash(again) != template_hash(other)
