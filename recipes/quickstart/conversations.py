"""What the quickstart model is taught: short instructions over known words and numbers, one right answer each.

`make_data.py` writes what this module builds. Training and held-out conversations are distinguished by their operands
alone: a hash of the *set* of words or numbers in a turn says which side the turn belongs to, whatever the task, the
order, the phrasing or the system prompt. So no held-out turn is a reworded or reordered training turn.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Words = tuple[str, ...]
Turn = dict[str, str]


def split_words(text: str) -> Words:
    """The words of a text, so that the pools below stay readable."""
    return tuple(text.split())


NOUNS = split_words(
    "apple bird boat book bread cat chair cloud door fish flag frog hat horse key lamp leaf lemon moon rain ring river "
    "rope tree"
)
NUMBERS = split_words(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
OPPOSITE_PAIRS = split_words(
    "hot/cold big/small fast/slow old/new wet/dry high/low hard/soft early/late full/empty rich/poor near/far "
    "loud/quiet"
)
OPPOSITES = {
    word: other
    for left, right in (pair.split("/") for pair in OPPOSITE_PAIRS)
    for word, other in ((left, right), (right, left))
}

# One set of operands in eight is held out.
HELDOUT_ONE_IN = 8


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing to do with `num_operands` different members of `pool`; `solve` gives the words of the answer."""

    pool: Words
    num_operands: int
    phrasings: Words
    solve: Callable[[Words], Words]


@dataclass(frozen=True, kw_only=True)
class Style:
    """What a system prompt asks of every answer in its conversation."""

    prompts: Words
    join: Callable[[Words], str]


@dataclass(frozen=True, kw_only=True)
class FollowUp:
    """A second request that names no operands: it acts on the answer before it."""

    phrasings: Words
    solve: Callable[[Words], Words]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One conversation, as pairs of role and text, and the task it counts for."""

    task: str
    conversations: tuple[tuple[str, str], ...]

    def turns(self) -> list[Turn]:
        """The conversation in ShareGPT form."""
        return [{"from": role, "value": value} for role, value in self.conversations]


def join_plainly(words: Words) -> str:
    """An answer where no system prompt asks for anything else."""
    return " ".join(words)


OPERATIONS = {
    "reverse": Operation(
        pool=NOUNS,
        num_operands=3,
        phrasings=(
            "Reverse the order: {words}",
            "Write these words backwards: {words}",
            "Turn this list around: {words}",
        ),
        solve=lambda words: words[::-1],
    ),
    "rotate": Operation(
        pool=NOUNS,
        num_operands=3,
        phrasings=(
            "Move the first word to the end: {words}",
            "Put the first word last: {words}",
            "Rotate this list by a word: {words}",
        ),
        solve=lambda words: (*words[1:], words[0]),
    ),
    "opposites": Operation(
        pool=tuple(OPPOSITES),
        num_operands=2,
        phrasings=(
            "What are the opposites of {0} and {1}?",
            "Give the opposite of each word: {words}",
            "Say the contrary: {words}",
        ),
        solve=lambda words: tuple(OPPOSITES[word] for word in words),
    ),
    "largest": Operation(
        pool=NUMBERS,
        num_operands=3,
        phrasings=(
            "Which number is the largest: {words}",
            "Tell me the greatest of {0}, {1} and {2}.",
            "Pick the biggest number: {words}",
        ),
        solve=lambda numbers: (max(numbers, key=NUMBERS.index),),
    ),
}

STYLES = {
    "capitals": Style(
        prompts=("Answer in capital letters.", "Always write in capitals."),
        join=lambda words: " ".join(words).upper(),
    ),
    "commas": Style(
        prompts=("Put commas between words.", "Separate words by commas."),
        join=lambda words: ", ".join(words),
    ),
}

FOLLOW_UPS = {
    "first": FollowUp(
        phrasings=("Now only the first of them.", "Which word comes first now?"),
        solve=lambda words: words[:1],
    ),
    "last": FollowUp(
        phrasings=("Now only the last of them.", "Which word comes last now?"),
        solve=lambda words: words[-1:],
    ),
    "capitals": FollowUp(
        phrasings=("Say that again in capitals.", "Now the same in capital letters."),
        solve=lambda words: tuple(word.upper() for word in words),
    ),
}

AGAIN_PHRASINGS: Words = ("Now do the same with: {words}", "And with these: {words}")

# The share of each task in the training data, and so how much practice it gets. Every task is held out equally.
TASK_WEIGHTS = {
    "reverse": 2,
    "rotate": 2,
    "opposites": 1,
    "largest": 2,
    "capitals": 3,
    "commas": 3,
    "follow_up": 6,
    "again": 3,
}
# The operations that a style, a follow-up or a repetition applies to: those whose answer is a list of words.
LIST_OPERATIONS = ("reverse", "rotate", "opposites")


def is_heldout(operands: Sequence[str]) -> bool:
    """Whether this set of operands belongs to the held-out side; order does not matter."""
    digest = hashlib.sha256(" ".join(sorted(operands)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0


def draw_operands(rng: random.Random, operation: Operation, *, heldout: bool) -> Words:
    """Different members of the operation's pool, in random order, from the wanted side of the split."""
    while True:
        operands = tuple(rng.sample(operation.pool, operation.num_operands))
        names_both_sides = any(OPPOSITES.get(word) in operands for word in operands)
        if is_heldout(operands) == heldout and not names_both_sides:
            return operands


def ask(phrasing: str, operands: Words) -> str:
    """The request: a phrasing with its operands filled in."""
    return phrasing.format(*operands, words=" ".join(operands))


def build_item(rng: random.Random, task: str, *, heldout: bool) -> Item:
    """One random conversation of a task, from one side of the split."""
    name = task if task in OPERATIONS else rng.choice(LIST_OPERATIONS)
    operation = OPERATIONS[name]
    style = STYLES.get(task)
    join = style.join if style else join_plainly
    operands = draw_operands(rng, operation, heldout=heldout)
    answer = operation.solve(operands)
    turns = [("system", rng.choice(style.prompts))] if style else []
    turns += [("human", ask(rng.choice(operation.phrasings), operands)), ("gpt", join(answer))]
    if task == "follow_up":
        follow_up = FOLLOW_UPS[rng.choice(list(FOLLOW_UPS))]
        turns += [("human", rng.choice(follow_up.phrasings)), ("gpt", join(follow_up.solve(answer)))]
    # A system prompt must hold for the whole conversation, so some styled ones go on for a second turn.
    if task == "again" or (style and rng.random() < 0.2):
        operands = draw_operands(rng, operation, heldout=heldout)
        turns += [("human", ask(rng.choice(AGAIN_PHRASINGS), operands)), ("gpt", join(operation.solve(operands)))]
    return Item(task=task, conversations=tuple(turns))


def build_train_items(num_items: int, seed: int) -> list[Item]:
    """The training conversations, tasks mixed by `TASK_WEIGHTS`; a few may occur twice."""
    rng = random.Random(f"train {seed}")
    tasks = rng.choices(list(TASK_WEIGHTS), weights=list(TASK_WEIGHTS.values()), k=num_items)
    return [build_item(rng, task, heldout=False) for task in tasks]


def build_heldout_items(num_items_per_task: int, seed: int) -> list[Item]:
    """The held-out conversations: as many for every task, on operands never trained on, all prompts different."""
    return [item for task in TASK_WEIGHTS for item in draw_different_items(task, num_items_per_task, seed)]


def draw_different_items(task: str, num_items: int, seed: int) -> list[Item]:
    """Held-out conversations of one task, no prompt twice. Raises: ValueError if its pool is too small for that."""
    rng = random.Random(f"heldout {task} {seed}")
    by_prompt: dict[tuple[tuple[str, str], ...], Item] = {}
    for _ in range(100 * num_items):
        item = build_item(rng, task, heldout=True)
        by_prompt.setdefault(item.conversations[:-1], item)
        if len(by_prompt) == num_items:
            return list(by_prompt.values())
    raise ValueError(f"{task}: {len(by_prompt)} different held-out prompts, {num_items} wanted; enlarge its pool")
