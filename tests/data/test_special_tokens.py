"""Special tokens that somebody typed: hidden from the template, and tokenized as text, as the token, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tunebook.config.choices import SpecialText, TrainOn
from tunebook.data.conversation import Conversation
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import SPECIAL_AS_TEXT, SPECIAL_KEPT, Document, Encoder
from tunebook.data.special_tokens import SpecialTokens
from tunebook.data.template import ConversationRenderer
from tunebook.errors import DataError

from .conftest import CHATML, chat_row, turns_of

Tokenizers = Callable[..., Any]

# As LLaMA 2's: BOS and EOS, no header before the answer, contents stripped.
INST = """\
{%- for m in messages %}{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{%- endif %}{%- endfor %}
"""


def talk(question: str, answer: str, origin: str = "a:1") -> dict[str, Any]:
    return chat_row([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], origin)


def encode(
    tokenizer: Any, row: dict[str, Any], special_text: SpecialText = SpecialText.auto, train_on: TrainOn = TrainOn.auto
) -> Document:
    return Encoder(CorpusKind.conversation, train_on, tokenizer, special_text).encode([row])[0]


def trained_text(tokenizer: Any, document: Document) -> str:
    ids = [label for label in document.labels if label != -100]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def letters(text: str) -> dict[str, int]:
    return {letter: number for number, letter in enumerate(dict.fromkeys(text))}


def bpe_with_prefix() -> Tokenizer:
    """As LLaMA 2's: every stretch of text gets a mark before it, and the special tokens are words of the vocabulary."""
    pieces = letters("▁abcdefghijklmnopqrstuvwxyz<>/|[]_ISNT.")
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: number + 3 for word, number in pieces.items()}
    vocab["▁a"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's and Gemma's: words with scores, a mark before each word."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(letter, -5.0) for letter in letters("▁abcdefghijklmnopqrstuvwxyz<>/|[]_ISNT.")]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("▁the", -1.0)], unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2's and Qwen's: special tokens come after the vocabulary, one has room to its right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate([*alphabet, "th"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(params=[bpe_with_prefix, unigram, byte_level])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    backend = request.param()
    added = [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens([*added, AddedToken("<pad>", special=True, rstrip=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    made.chat_template = INST
    return made


def test_the_copy_gives_all_other_text_the_tokens_that_the_tokenizer_gives(tokenizer: Any) -> None:
    special = SpecialTokens(tokenizer)
    before, after = "<s>[INST] the cat sat </s><pad>  <s> on the", " a mat</s>"
    plain = tokenizer.backend_tokenizer.encode(before + after, add_special_tokens=False).ids
    shared = tokenizer.backend_tokenizer.encode(before, add_special_tokens=False).ids
    assert plain[: len(shared)] == shared
    ids = special.encode_apart(f"{before}{special.hide('<pad>')}{after}", [])[0].ids
    assert ids[: len(shared)] == shared
    assert ids[-4:] == plain[-4:]
    assert special.encode_apart(before + after, [])[0].ids == plain
    text = "the cat sat on"
    assert special.plain_backend.encode(text).ids == tokenizer.backend_tokenizer.encode(text).ids  # BOS, too


@pytest.mark.parametrize("typed", ["<s>", "</s>", "<unk>", "<pad>"])
def test_as_text_an_answer_goes_on_after_it_and_holds_no_token(tokenizer: Any, typed: str) -> None:
    document = encode(tokenizer, talk(f"is {typed} a mark", f"it is {typed} the mark"))
    assert trained_text(tokenizer, document).replace(" ", "") == f"itis{typed}themark</s>"
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "<unk>", "<pad>")]
    assert [token for token in document.input_ids if token in ids] == [ids[0], ids[1]]  # the template's own
    assert document.labels[-2:].count(ids[1]) == 1


def test_kept_it_is_the_token_and_the_answer_goes_on(tokenizer: Any) -> None:
    document = encode(tokenizer, talk("is it", "it </s> is"), SpecialText.keep)
    assert trained_text(tokenizer, document).replace(" ", "") == "it</s>is</s>"
    assert document.labels.count(tokenizer.eos_token_id) == 2


def test_a_copy_tokenises_a_document_as_if_its_letters_stood_there(tiny_tokenizer: Tokenizers) -> None:
    """Counted by hand: one token a byte, so `</s>` is four."""
    tokenizer = tiny_tokenizer()
    document = encode(tokenizer, talk("a</s>b", "c<|im_end|>d"))
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def ids(text: str) -> list[int]:
        return [tokenizer.backend_tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in text]

    question, answer = [start, *ids("user\na</s>b"), end], [*ids("c<|im_end|>d"), end]
    assert document.input_ids == [*question, *ids("\n"), start, *ids("assistant\n"), *answer, *ids("\n")]
    assert [label for label in document.labels if label != -100] == answer


@pytest.mark.parametrize("train_on", [TrainOn.auto, TrainOn.everything])
def test_the_first_document_is_named_and_all_are_counted(tiny_tokenizer: Tokenizers, train_on: TrainOn) -> None:
    rows = [talk("q", "a"), talk("<s>q", "a", "a:2"), talk("q", "a</s><s>", "a:3")]
    encoder = Encoder(CorpusKind.conversation, train_on, tiny_tokenizer())
    encoder.encode(rows)
    assert encoder.counts.notes == {SPECIAL_AS_TEXT: 2}
    assert encoder.counts.first == {SPECIAL_AS_TEXT: "a:2, <s>"}
    kept = Encoder(CorpusKind.conversation, train_on, tiny_tokenizer(), SpecialText.keep)
    kept.encode(rows)
    assert kept.counts.notes == {SPECIAL_KEPT: 2}
    refusing = Encoder(CorpusKind.conversation, train_on, tiny_tokenizer(), SpecialText.refuse)
    with pytest.raises(DataError, match=r"a:2: it holds the text of the special token '<s>'.*=as_text") as caught:
        refusing.encode(rows)
    assert caught.value.problem_id == "special-token-in-content"


def test_texts_have_their_tokens_written_out(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(eos_token="</s>")
    rows = [{"text": "a<|im_end|>b", "origin": "a:1"}]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    kept, as_text = (
        Encoder(CorpusKind.text, TrainOn.auto, tokenizer, mode) for mode in (SpecialText.auto, SpecialText.as_text)
    )
    assert len(kept.encode(rows)[0].input_ids) == 4  # a, the token, b, EOS
    (document,) = as_text.encode(rows)
    assert end not in document.input_ids
    assert len(document.input_ids) == len("a<|im_end|>b") + 1
    assert (kept.counts.notes, as_text.counts.notes) == ({SPECIAL_KEPT: 1}, {SPECIAL_AS_TEXT: 1})


def test_a_template_that_reads_such_text_gets_to_read_it(tiny_tokenizer: Tokenizers) -> None:
    """Here it takes what stands before `<s>` for reasoning, of which earlier answers are stripped."""
    earlier = "(message.content if loop.last else message.content.split('<s>')[-1]) +"
    template = CHATML.replace("message.content +", earlier)
    assert template != CHATML
    messages = [*turns_of(talk("q", "why<s>a")), *turns_of(talk("</s>go", "so<s>b"))]
    tokenizer = tiny_tokenizer(template=template)
    document = encode(tokenizer, chat_row(messages))
    assert tokenizer.decode(document.input_ids).endswith("</s>go<|im_end|>\n<|im_start|>assistant\nso<s>b<|im_end|>\n")
    assert "why" not in tokenizer.decode(document.input_ids)
    assert trained_text(tokenizer, document) == "so<s>b<|im_end|>"
    assert document.input_ids.count(tokenizer.convert_tokens_to_ids("<s>")) == 1


def test_a_prompt_for_an_answer_is_tokenised_as_in_training(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer()
    row = talk("is </s> a mark", "a")
    prompt = ConversationRenderer(tokenizer).prompt_tokens(Conversation(messages=turns_of(row)[:1]))
    assert encode(tokenizer, row).input_ids[: len(prompt)] == prompt
    assert tokenizer.convert_tokens_to_ids("</s>") not in prompt
