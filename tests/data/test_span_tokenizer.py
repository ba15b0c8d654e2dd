"""Tokenizing by pieces against the tokenizers library: the same tokens and spans, or an honest `None`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tunebook.data import span_tokenizer as pieces
from tunebook.data.span_tokenizer import SpanTokenizer, piece_tokenizer, tokens_of_span
from tunebook.errors import TunebookError

QWEN, LLAMA = pieces._CUTS
# Everything that the expressions tell apart, and what two engines could see differently.
NASTY = [
    *["a", "B", "word", "\xe9", "日本", "\xdf", "\u017f", "\u212a", "7", "42", "2024"],
    *["\xbd", "\xb2", "\u2167", "\u0663"],
    *[" ", "  ", "\t", "\n", "\r\n", "\n\n", "\x0b", "\x1c", "\x85", "\xa0", "\u2028", "'s", "'S", "'ll", "'Ve", "'"],
    *["_", "__", ".", "...", "?!", "-", "\U0001f600", "\u200d", "e\u0301", "\u0301", "\ufb01", "\xaa", "\u0378"],
    *["<|im_end|>", "<|im_start|>", "<|", "\U0001e030"],
]
CORPUS = ["word words it's 2024 she'll ... go é 日本 the end", "The word, the end.\n\nA new one's 42"] * 3


def make_backend(expression: str = QWEN, **changes: Any) -> Any:
    """A byte-level BPE of a few merges that cuts as `expression` says."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(**changes.pop("model", {})))
    backend.normalizer = changes.pop("normalizer", normalizers.NFC())
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=[AddedToken(name, special=True, **changes) for name in ("<|im_start|>", "<|im_end|>", "<|")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def by_library(backend: Any, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = backend.encode(text, add_special_tokens=False)
    starts, ends = [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets]
    return encoding.ids, [tokens_of_span(starts, ends, span) for span in spans]


@pytest.mark.parametrize("expression", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_any_text_has_the_librarys_tokens_and_spans(expression: str) -> None:
    backend, draw = make_backend(expression), random.Random(0)
    cutter = piece_tokenizer(backend)
    assert cutter is not None
    num_cut = num_spans = 0
    for _ in range(1500):
        text = "".join(draw.choices(NASTY, k=draw.randrange(12)))
        start, end = sorted(draw.choices(range(len(text) + 1), k=2))
        spans = [(start, end)]
        ids, ranges = by_library(backend, text, spans)
        cut = cutter.tokenize(text)
        if cut is None:
            continue
        num_cut += 1
        assert cut.ids == ids, text
        found = cutter.tokenize(text, spans)
        if found is not None and start < end:
            num_spans += 1
            assert (found.ids, found.ranges) == (ids, ranges), (text, spans)
    assert num_cut > 200
    assert num_spans > 50


def test_ordinary_text_is_cut_by_pieces() -> None:
    backend = make_backend()
    cutter = piece_tokenizer(backend)
    assert cutter is not None
    text = "<|im_start|>The word, 2024: it's é and 日本!<|im_end|>\n\U0001f600"
    start = text.index(" word")
    end = text.index("<|im_end|>") + len("<|im_end|>")
    cut = cutter.tokenize(text, [(start, end)])
    assert cut is not None
    assert (cut.ids, cut.ranges) == by_library(backend, text, [(start, end)])
    assert {" word", ",", " ", "2", "<|im_end|>"} <= cutter._known.keys()
    assert cutter.tokenize(text, [(start + 2, end)]) is None


@pytest.mark.parametrize("character", ["\xbd", "e\u0301", "\u0378", "\u017f", "\x1c"], ids=ascii)
def test_what_the_engines_may_see_differently_is_left_to_the_library(character: str) -> None:
    cutter = piece_tokenizer(make_backend())
    assert cutter is not None
    assert cutter.tokenize(f"a {character} b") is None
    assert cutter.tokenize("a b") is not None


def test_forgotten_pieces_are_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_MOST_PIECES", 6)
    backend = make_backend()
    cutter = piece_tokenizer(backend)
    assert cutter is not None
    for text in ("one two three four<|im_end|>", "five six seven", "one<|im_end|> two"):
        cut = cutter.tokenize(text)
        assert cut is not None
        assert cut.ids == backend.encode(text).ids
    assert len(cutter._known) < 10


def test_long_texts_that_come_again_are_one_piece_unless_a_span_begins_or_ends_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "_SHORTEST_REPEATED", 10)
    monkeypatch.setattr(pieces, "_MOST_SEEN", 8)
    backend = make_backend()
    cutter = piece_tokenizer(backend)
    assert cutter is not None
    tools = "system\nThe tools: word, é and 2024"
    for number in range(30):
        text = f"<|im_start|>{tools}<|im_end|>\n<|im_start|>user\nquestion {number} of them<|im_end|>"
        end = len(text) - len("<|im_end|>")
        for spans in ([], [(len("<|im_start|>"), end)], [(text.index(" word"), text.index(","))], [(0, 4), (9, end)]):
            cut = cutter.tokenize(text, spans)
            # The last spans end inside a special token and begin inside a word.
            assert (cut is None) == (spans == [(0, 4), (9, end)])
            assert cut is None or (cut.ids, cut.ranges) == by_library(backend, text, spans)
        assert tools in cutter._known
        assert len(cutter._seen) <= 12


def test_repeated_texts_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_SHORTEST_REPEATED", 5)
    monkeypatch.setattr(pieces, "_MOST_REPEATED_CHARACTERS", 100)
    backend = make_backend()
    cutter = piece_tokenizer(backend)
    assert cutter is not None
    for number in range(40):
        for _ in range(3):
            cut = cutter.tokenize(f"the text number {number}")
            assert cut is not None
            assert cut.ids == backend.encode(f"the text number {number}").ids
    assert sum(piece.startswith("the text") for piece in cutter._known) < 8


@pytest.mark.parametrize(
    "changes",
    [{"lstrip": True}, {"single_word": True}, {"normalized": True}, {"model": {"dropout": 0.1}}],
    ids=["lstrip", "single_word", "normalized", "dropout"],
)
def test_a_tokenizer_that_does_more_is_not_imitated(changes: dict[str, Any]) -> None:
    assert piece_tokenizer(make_backend(**changes)) is None


def test_an_unknown_expression_normaliser_or_trimming_is_not_imitated() -> None:
    from tokenizers import normalizers, processors

    assert piece_tokenizer(make_backend(r"\p{L}+|\s+")) is None
    assert piece_tokenizer(make_backend(normalizer=normalizers.Lowercase())) is None
    assert piece_tokenizer(make_backend(normalizer=None)) is not None
    backend = make_backend()
    for trims in (True, False):
        byte_level = processors.ByteLevel(trim_offsets=trims)
        begins = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
        for processor in (byte_level, processors.Sequence([byte_level, begins])):
            backend.post_processor = processor
            assert (piece_tokenizer(backend) is None) == trims


def test_texts_of_both_kinds_keep_their_order() -> None:
    backend = make_backend()
    texts = ["a word", "½ a word", "the end", "e\u0301", "it's"]
    spans = [[(1, 6)], [(1, 8)], [], [(0, 2)], [(1, 4)]]  # the last begins inside a piece
    expected = [by_library(backend, text, wanted) for text, wanted in zip(texts, spans, strict=True)]
    found = SpanTokenizer(backend).tokenize(texts, spans)
    assert [(one.ids, one.ranges) for one in found] == expected


def test_a_token_over_the_boundary_is_counted() -> None:
    backend = make_backend()
    one = SpanTokenizer(backend).tokenize(["the word"], [[(5, 8)]])[0]
    straddles = backend.encode("the word").offsets[one.ranges[0][0]][0] < 5
    assert straddles
    assert one.num_straddling == 1


class TestTheTokenizerIsAsked:
    TEXTS = ["the word"] * 3

    def test_whether_it_agrees(self) -> None:
        asked: list[int] = []
        backend = make_backend()
        tokeniser = SpanTokenizer(Asked(backend, asked))
        expected = [backend.encode(text).ids for text in self.TEXTS]
        assert [one.ids for one in tokeniser.tokenize(self.TEXTS, [[]] * 3)] == expected
        assert asked == [1], "one of a hundred texts that were cut by pieces"

    def test_and_other_tokens_are_an_error_that_says_how_to_go_on(self) -> None:
        tokeniser = SpanTokenizer(make_backend())
        assert tokeniser._pieces is not None
        tokeniser._pieces._known["the"] = b"\x07\0\0\0"
        with pytest.raises(TunebookError, match=r"'the word'.*TUNEBOOK_TOKENIZE_BY_LIBRARY=1 before the command"):
            tokeniser.tokenize(self.TEXTS, [[]] * 3)

    def test_alone_where_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TUNEBOOK_TOKENIZE_BY_LIBRARY", "1")
        asked: list[int] = []
        SpanTokenizer(Asked(make_backend(), asked)).tokenize(self.TEXTS, [[]] * 3)
        assert asked == [3]


class Asked:
    """A tokenizer that notes how many texts it is given."""

    def __init__(self, backend: Any, asked: list[int]) -> None:
        self._backend, self._asked = backend, asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self._asked.append(len(texts))
        return self._backend.encode_batch(texts, **options)
