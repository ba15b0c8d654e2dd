"""The chat templates that recipes ship for models without one: what they write, and what of it is trained on."""

import pytest

from tunebook.config.book import book_root

CONVERSATION = [
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five."},
]


def rendered(recipe: str, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> tuple[str, list[str]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=(book_root() / "recipes" / recipe / "chat_template.jinja").read_text(),
        add_generation_prompt=add_generation_prompt,
        return_assistant_tokens_mask=True,
        bos_token="<|begin_of_text|>",
        eos_token="<|endoftext|>",
    )
    return texts[0], [texts[0][start:end] for start, end in spans[0]]


def test_llama3_template_writes_the_turns_of_llama3_instruct() -> None:
    text, trained = rendered("llama3_8b_ddp", CONVERSATION[:2], add_generation_prompt=False)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTwo and two?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
    )
    assert trained == ["Four.<|eot_id|>"]


def test_tulu_template_writes_the_turns_of_tulu3() -> None:
    text, trained = rendered("olmo3_7b_tulu3", CONVERSATION, add_generation_prompt=False)
    assert text == (
        "<|user|>\nTwo and two?\n<|assistant|>\nFour.<|endoftext|>\n"
        "<|user|>\nAnd one?\n<|assistant|>\nFive.<|endoftext|>"
    )
    assert trained == ["Four.<|endoftext|>", "Five.<|endoftext|>"]


def test_dolly_template_writes_the_headings_of_dolly() -> None:
    text, trained = rendered("dolly3b_ray_zero3_offload", CONVERSATION[:2], add_generation_prompt=False)
    assert text == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nTwo and two?\n\n### Response:\nFour.\n\n### End\n\n"
    )
    assert trained == ["Four.\n\n### End"]


@pytest.mark.parametrize("recipe", ["llama3_8b_ddp", "dolly3b_ray_zero3_offload", "olmo3_7b_tulu3"])
def test_a_template_prompts_with_how_the_whole_conversation_begins(recipe: str) -> None:
    whole, trained = rendered(recipe, CONVERSATION, add_generation_prompt=False)
    prompt, _ = rendered(recipe, CONVERSATION[:3], add_generation_prompt=True)
    assert whole.startswith(prompt)
    assert whole[len(prompt) :].startswith(trained[1])


@pytest.mark.parametrize("recipe", ["llama3_8b_ddp", "dolly3b_ray_zero3_offload", "olmo3_7b_tulu3"])
def test_a_template_keeps_the_system_turn(recipe: str) -> None:
    text, trained = rendered(
        recipe, [{"role": "system", "content": "Be short."}, *CONVERSATION[:2]], add_generation_prompt=False
    )
    assert text.index("Be short.") < text.index("Two and two?")
    assert "Be short." not in "".join(trained)
