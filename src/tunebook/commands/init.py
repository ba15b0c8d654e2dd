"""`tunebook init`: write a recipe file. What was typed is checked, and the recipe composed, before the file is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console

from tunebook.config.book import (
    find_recipes,
    is_in_book,
    recipe_file,
    resolve_path,
    users_folders,
)
from tunebook.config.compose import compose
from tunebook.config.override_text import command_words, quoted, shell_command
from tunebook.config.recipe_files import group_choices, refuse_unreadable_name
from tunebook.data.files import SUFFIXES, find_files
from tunebook.errors import RequestError, TunebookError, did_you_mean
from tunebook.files import atomic_write_text
from tunebook.terminal import print_text

DEFAULT_FOLDER = Path("my_recipes")  # not recipes/: in a checkout that is the book, whose tests ask for a card
GLOBAL_SAMPLES = 64  # documents per optimizer step; the size that docs/data.md trains with
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ON_THE_HUB = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
_WILDCARDS = "*?["


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer to one config group: its choice, and the keys that the choice needs."""

    typed: str
    group: str
    choice: str
    keys: dict[str, str] = field(default_factory=dict)

    def overrides(self) -> list[str]:
        """The same on the command line."""
        return [
            f"{self.group}={self.choice}",
            *(f"{self.group}.{key}={quoted(value)}" for key, value in self.keys.items()),
        ]


def init_command(
    name: str,
    recipes_dirs: list[Path],
    console: Console,
    *,
    model: str | None = None,
    data: str | None = None,
    parallelism: str | None = None,
    base: str | None = None,
    overwrite: bool = False,
    is_terminal: bool = False,
) -> Path:
    """Write the recipe `name`, see `folders`, and print the commands to continue with; returns the file.

    With `is_terminal` a missing model and data set are asked for. Raises: RequestError for a name that is taken or no
    name, for what is missing without a terminal, for a model, data set, strategy or base that there is not, and for
    settings that do not compose; DataError for files that hold no documents.
    """
    folder, known_dirs = folders(recipes_dirs)
    file = folder.expanduser() / f"{name}.yaml"
    _check_name(name, file, known_dirs, overwrite=overwrite)
    if base is not None:
        _check_base(base, name, known_dirs)
    decisions = _decide(model, data, parallelism, console, base=base, is_terminal=is_terminal)
    overrides = [word for decision in decisions for word in decision.overrides()]
    compose(base, overrides, known_dirs)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, recipe_text(name, decisions, base))
    print_text(f"written: {file}\nNext:\n{next_commands(name, folder)}", console)
    return file


def folders(named: list[Path]) -> tuple[Path, list[Path]]:
    """The folder that a new recipe is written to, and the folders of recipes that are there already.

    The first is the first of `named` (--recipes-dir), else the first of TUNEBOOK_RECIPES, else `my_recipes`.
    """
    folder = next(iter(users_folders(named)), DEFAULT_FOLDER)
    return folder, [*([folder] if folder.expanduser().is_dir() else []), *named[1:]]


def decide_model(text: str) -> Decision:
    """The model that a text names: one of the book, a folder, or one of the hub. Raises: RequestError."""
    known = [choice for choice in group_choices("model") if choice != "hub"]
    if text in known:
        return Decision(typed=text, group="model", choice=text)
    folder = resolve_path(text)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RequestError(
                f"--model {text}: {folder} holds no config.json, so it is no model; type the folder that holds it",
                problem_id="init-model",
            )
        return Decision(typed=text, group="model", choice="hub", keys={"path": text})
    if _ON_THE_HUB.fullmatch(text):
        return Decision(typed=text, group="model", choice="hub", keys={"name": text})
    raise RequestError(
        f"--model {text}: there is no such model or folder.{did_you_mean(text, known)} Type ORGANIZATION/NAME for a "
        f"model of the hub, a folder with a config.json, or one of: {', '.join(known)}",
        problem_id="init-model",
    )


def decide_data(text: str) -> Decision:
    """The data set that a text names: one of the book, files, or one of the hub. Raises: RequestError, DataError."""
    # A mixture has parts, which are written into the file by hand.
    known = [choice for choice in group_choices("dataset") if choice not in ("hub", "jsonl", "mixture")]
    if text in known:
        return Decision(typed=text, group="dataset", choice=text)
    is_file = is_in_book(text) or text.lower().endswith(SUFFIXES) or any(letter in text for letter in _WILDCARDS)
    if is_file or resolve_path(text).exists():
        find_files(text, "--data")
        return Decision(typed=text, group="dataset", choice="jsonl", keys={"path": text})
    if _ON_THE_HUB.fullmatch(text):
        return Decision(typed=text, group="dataset", choice="hub", keys={"name": text})
    raise RequestError(
        f"--data {text}: there is no such data set or file.{did_you_mean(text, known)} Type a file that ends in "
        f"{', '.join(SUFFIXES)}, a glob such as 'chats/*.jsonl', ORGANIZATION/NAME for a data set of the hub, or one "
        f"of: {', '.join(known)}",
        problem_id="init-data",
    )


def decide_parallelism(text: str) -> Decision:
    """A file of hydra_configs/parallelism. Raises: RequestError."""
    known = group_choices("parallelism")
    if text not in known:
        raise RequestError(
            f"--parallelism {text}: there is no such strategy.{did_you_mean(text, known)} Type one of: "
            f"{', '.join(known)}",
            problem_id="init-parallelism",
        )
    return Decision(typed=text, group="parallelism", choice=text)


def recipe_text(name: str, decisions: list[Decision], base: str | None) -> str:
    """The recipe as YAML. Without a base it states the batch, which has no default."""
    parts = {decision.group: decision for decision in decisions}
    lines = [
        "# @package _global_",
        f"# Written by `tunebook init {name}`. What is not here keeps its default; `tunebook plan` shows it.",
        "defaults:",
        *([f"  - {base}"] if base is not None else []),
        *(f"  - override /{decision.group}: {decision.choice}" for decision in decisions),
        "  - _self_",
        "",
        f"title: {_scalar(_title(parts, base))}",
    ]
    for group, decision in parts.items():
        if decision.keys:
            lines += [f"{group}:", *(f"  {key}: {_scalar(value)}" for key, value in decision.keys.items())]
            path = decision.keys.get("path", "/")
            if not is_in_book(path) and not Path(path).expanduser().is_absolute():
                lines[-1] += "  # starts in the folder where a command is typed"
    if base is None:
        lines += ["training:", f"  global_samples: {GLOBAL_SAMPLES}  # documents per optimizer step over all GPUs"]
    return "\n".join(lines) + "\n"


def next_commands(name: str, folder: Path) -> str:
    """The commands to type after a recipe was written into `folder`, one per line."""
    data, plan, train = (command_words(command, name, [], [folder]) for command in ("data", "plan", "train"))
    return "\n".join(f"  {shell_command(words)}" for words in (data, plan, [*train, "--dry-run"], train))


def _check_name(name: str, file: Path, recipes_dirs: list[Path], *, overwrite: bool) -> None:
    if not _NAME.fullmatch(name) or name.endswith((".yaml", ".yml")):
        raise RequestError(
            f"'{name}' is no name of a recipe: type letters a-z, digits, _ - and dots, without a folder and without "
            f".yaml, such as {_as_name(name)}; --recipes-dir names the folder",
            problem_id="recipe-name-form",
        )
    refuse_unreadable_name(name, file)
    taken = find_recipes(recipes_dirs).get(name)
    if taken is not None and taken.resolve() != file.resolve():
        raise RequestError(
            f"there is a recipe '{name}' already: {taken}; type another name, or build on it: "
            f"tunebook init my_{name} --base {name}",
            problem_id="recipe-name-taken",
        )
    if file.exists() and not overwrite:
        raise RequestError(
            f"{file} exists already; type another name, or --overwrite to replace it", problem_id="recipe-exists"
        )


def _check_base(base: str, name: str, recipes_dirs: list[Path]) -> None:
    if base == name:
        raise RequestError(
            f"--base {base} is the recipe that is being written; type the name of another one",
            problem_id="recipe-circle",
        )
    recipe_file(base, recipes_dirs)


def _as_name(text: str) -> str:
    stem = text.rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stem).lstrip("-.") or "mine"


def _decide(
    model: str | None,
    data: str | None,
    parallelism: str | None,
    console: Console,
    *,
    base: str | None,
    is_terminal: bool,
) -> list[Decision]:
    """What was typed, checked, and what was not, asked for: in the order model, data set, parallelism."""
    missing = [flag for flag, text in (("--model", model), ("--data", data)) if text is None and base is None]
    if missing and not is_terminal:
        raise _incomplete(missing)
    models = ", ".join(choice for choice in group_choices("model") if choice != "hub")
    hub = "ORGANIZATION/NAME of the hub"
    questions: list[tuple[str | None, Callable[[str], Decision], str, str | None]] = [
        (model, decide_model, f"Model: {hub}, a folder, or one of {models}", None),
        (data, decide_data, f"Data: a file or a glob, {hub}, or one of the book's data sets", None),
        (parallelism, decide_parallelism, "Parallelism (auto: the fastest that fits; Enter takes it)", "auto"),
    ]
    return [
        decide(text) if text is not None else _ask(question, decide, console, default)
        for text, decide, question, default in questions
        if text is not None or missing
    ]


def _ask(question: str, check: Callable[[str], Decision], console: Console, default: str | None = None) -> Decision:
    """Ask until the answer can be used. Raises: RequestError at the end of the input."""
    while True:
        print_text(question, console)
        try:
            answer = console.input("> ").strip() or default
        except EOFError:
            raise _incomplete(["--model", "--data"]) from None
        if answer is None:
            continue
        try:
            return check(answer)
        except TunebookError as error:
            print_text(error.message, console, style="red")


def _incomplete(missing: list[str]) -> RequestError:
    values = {"--model": "--model ORGANIZATION/NAME", "--data": "--data 'chats/*.jsonl'"}
    return RequestError(
        f"a recipe without a base needs {' and '.join(missing)}; type {' '.join(values[flag] for flag in missing)}, or "
        "--base RECIPE to build on another. On a terminal they are asked for",
        problem_id="init-incomplete",
    )


def _title(parts: dict[str, Decision], base: str | None) -> str:
    if base is None:
        return f"{parts['model'].typed} on {parts['dataset'].typed}"
    changes = [f"{group} {decision.typed}" for group, decision in parts.items()]
    return f"{base} with {', '.join(changes)}" if changes else f"{base}, changed"


def _scalar(text: str) -> str:
    """A text as YAML writes it in one line, with quotes where it needs them."""
    return yaml.safe_dump(text, width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
