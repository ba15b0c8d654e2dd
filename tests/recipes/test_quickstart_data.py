"""The quickstart's shipped data and model folder: reproducible, split as claimed, and with right answers.

Operands and answers are read back from the text of the files and solved again here, so that a mistake in the generator
cannot hide itself.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import baseline  # noqa: E402
import conversations  # noqa: E402
import make_data  # noqa: E402
import model_files  # noqa: E402

Conversation = dict[str, Any]
OPERANDS = {*conversations.NOUNS, *conversations.NUMBERS, *conversations.OPPOSITES}
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
TASKS = {"reverse", "rotate", "opposites", "largest", "capitals", "commas", "follow_up", "again"}


@pytest.fixture(scope="module")
def train() -> list[Conversation]:
    """The shipped training conversations."""
    return baseline.read_conversations(QUICKSTART / "data" / "train.jsonl")


@pytest.fixture(scope="module")
def heldout() -> list[Conversation]:
    """The shipped held-out conversations."""
    return baseline.read_conversations(QUICKSTART / "data" / "heldout.jsonl")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The shipped tokenizer with its chat template, as training and evaluation load it."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(QUICKSTART / "model")


def to_messages(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]


def find_operands(text: str) -> tuple[str, ...]:
    return tuple(word for word in re.findall(r"\w+", text) if word in OPERANDS)


def requests_of(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Every human turn with the answer to it."""
    turns = [turn for turn in conversation["conversations"] if turn["from"] != "system"]
    for human, gpt in zip(turns[::2], turns[1::2], strict=True):
        assert (human["from"], gpt["from"]) == ("human", "gpt")
        yield human["value"], gpt["value"]


def solve(request: str, previous: tuple[str, list[str]]) -> tuple[str, list[str]]:
    """The kind of a request and the words of its answer, from the text alone and what came before it."""
    operands, (kind, answer) = list(find_operands(request)), previous
    if re.search("the same with:|with these:", request):
        return solve(f"{kind} {' '.join(operands)}", previous)
    if re.search("Reverse|backwards|around", request):
        return "Reverse", operands[::-1]
    if re.search("Move|Put|Rotate", request):
        return "Rotate", operands[1:] + operands[:1]
    if re.search("opposite|contrary", request):
        return "opposite", [conversations.OPPOSITES[word] for word in operands]
    if re.search("largest|greatest|biggest", request):
        return "largest", [max(operands, key=conversations.NUMBERS.index)]
    if re.search("capital", request):
        return kind, [word.upper() for word in answer]
    return kind, [answer[0 if "first" in request else -1]]


def render_answer(words: list[str], system: str) -> str:
    text = (", " if "comma" in system else " ").join(words)
    return text.upper() if "capital" in system else text


def test_files_are_regenerated_byte_for_byte(tmp_path: Path) -> None:
    paths = make_data.write_all(tmp_path)
    assert len(paths) == 7
    for path in paths:
        assert (tmp_path / path).read_bytes() == (QUICKSTART / path).read_bytes(), path


def test_check_reports_changed_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_data, "NUM_TRAIN_ITEMS", 500)
    make_data.write_all(tmp_path)
    monkeypatch.setattr(make_data, "FOLDER", tmp_path)
    assert make_data.main(["--check"]) == 0
    (tmp_path / "data" / "heldout.jsonl").write_text("{}\n")
    (tmp_path / "model" / "config.json").unlink()
    assert len(make_data.find_differences(tmp_path)) == 2
    assert make_data.main(["--check"]) == 1


def test_files_are_sharegpt_of_every_kind(train: list[Conversation], heldout: list[Conversation]) -> None:
    assert all(line.keys() == {"conversations"} for line in train)
    assert all(line.keys() == {"conversations", "task"} for line in heldout)
    assert {line["task"] for line in heldout} == TASKS
    assert 200 <= len(heldout) <= 300
    for lines in (train, heldout):
        share_with_system = sum(line["conversations"][0]["from"] == "system" for line in lines) / len(lines)
        share_multi_turn = sum(len(list(requests_of(line))) > 1 for line in lines) / len(lines)
        assert 0.1 < share_with_system < 0.5 and 0.1 < share_multi_turn < 0.5
    assert (QUICKSTART / "data" / "train.jsonl").stat().st_size < 3 * 2**20


def test_every_answer_is_right(train: list[Conversation], heldout: list[Conversation]) -> None:
    for line in train + heldout:
        first = line["conversations"][0]
        system = first["value"] if first["from"] == "system" else ""
        state: tuple[str, list[str]] = ("", [])
        for request, answer in requests_of(line):
            state = solve(request, state)
            assert answer == render_answer(state[1], system), line


def test_no_prompt_is_shared(train: list[Conversation], heldout: list[Conversation], tokenizer: Any) -> None:
    def prompts(line: Conversation) -> Iterator[str]:
        turns = line["conversations"]
        for end in range(1, len(turns) + 1):
            if turns[end - 1]["from"] == "human":
                yield json.dumps(turns[:end])

    trained = {prompt for line in train for prompt in prompts(line)}
    asked = [prompt for line in heldout for prompt in prompts(line)]
    assert not trained & set(asked)
    # Equal text is equal turns: the template is one-to-one, so comparing the turns compares the rendered prompts too.
    rendered = {tokenizer.apply_chat_template(to_messages(json.loads(prompt)), tokenize=False) for prompt in set(asked)}
    assert len(rendered) == len(set(asked))
    assert len({prompt for line in heldout for prompt in [*prompts(line)][-1:]}) == len(heldout)


def test_no_operand_combination_is_shared(train: list[Conversation], heldout: list[Conversation]) -> None:
    def combinations(lines: list[Conversation]) -> set[frozenset[str]]:
        return {frozenset(find_operands(request)) for line in lines for request, _ in requests_of(line)} - {frozenset()}

    # As sets and over all tasks at once: stricter than tuples within each task.
    trained, asked = combinations(train), combinations(heldout)
    assert len(trained) > 2000 and len(asked) > 100
    assert not trained & asked


def test_lookup_baseline_stays_below_half(train: list[Conversation], heldout: list[Conversation]) -> None:
    scores = baseline.score_lookup(train, heldout)
    assert scores.keys() == {"overall", *TASKS}
    assert scores["overall"] < 0.5


def test_model_has_one_to_five_million_parameters() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(QUICKSTART / "model")
    assert config.architectures == ["Qwen2ForCausalLM"] and config.dtype == torch.float32
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert 1_000_000 <= model.num_parameters() <= 5_000_000
    assert not list((QUICKSTART / "model").glob("*.safetensors"))


def test_template_round_trip_and_trained_span(tokenizer: Any, heldout: list[Conversation]) -> None:
    for line in heldout:
        messages = to_messages(line["conversations"])
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert tokenizer.decode(encoded["input_ids"]) == text
        assert text.startswith(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
        trained = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
        answers = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
        assert tokenizer.decode(trained) == "".join(answers)


def test_tokenizer_knows_every_word_as_one_token(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == (model_files.EOS_TOKEN, model_files.PAD_TOKEN)
    assert len(tokenizer) <= model_files.VOCABULARY_SIZE
    for word in OPERANDS - set(conversations.NUMBERS):
        for spelling in (word, f" {word}", word.upper(), f" {word.upper()}"):
            assert len(tokenizer.encode(spelling)) == 1, spelling
