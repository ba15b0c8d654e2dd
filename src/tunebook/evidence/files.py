"""Evidence files: their paths, and reading and writing them with every check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunebook.config.book import recipe_file
from tunebook.errors import DataError, RequestError
from tunebook.evidence.schema import FORMAT, Evidence
from tunebook.files import atomic_write_text, read_json, sha256_text

_LABEL = re.compile(r"[a-z0-9][a-z0-9_.]*")
_NUMBERS = re.compile(r"\[\s*-?\d[^\[\]\"{}]*\]")  # a curve has hundreds of numbers: one line keeps diffs readable


def evidence_folder(recipe: str, recipes_dirs: list[Path]) -> Path:
    """The folder of a recipe's evidence. Raises: RequestError for an unknown recipe."""
    return recipe_file(recipe, recipes_dirs).parent / recipe / "evidence"


def evidence_files(recipe: str, recipes_dirs: list[Path]) -> list[Path]:
    """All of a recipe's evidence, by name."""
    return sorted(evidence_folder(recipe, recipes_dirs).glob("*.json"))


def check_label(label: str) -> str:
    """Return the label if it can be part of a file name. Raises: RequestError."""
    if not _LABEL.fullmatch(label):
        raise RequestError(
            f"--label {label}: a label is small letters, digits, dots and underscores, such as bf16 or random_weights",
            problem_id="evidence-label",
        )
    return label


def read_evidence(file: Path) -> Evidence:
    """Read one file. Raises: DataError if it is missing, invalid, of a newer format, or was edited."""
    if not file.is_file():
        raise DataError(f"{file} does not exist; tunebook list shows what is recorded", problem_id="evidence-broken")
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise _broken(file, "it has no format, so it is not evidence")
    if content["format"] > FORMAT:
        raise DataError(
            f"{file} has format {content['format']} and this Tunebook reads up to {FORMAT}; read it with the version "
            "that wrote it, or a later one",
            problem_id="evidence-broken",
        )
    try:
        evidence = Evidence.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise _broken(file, f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}") from error
    if evidence.content_sha256 != content_hash(content):
        raise _broken(file, "it was changed after it was written: its hash does not match its content")
    return evidence


def _broken(file: Path, why: str) -> DataError:
    return DataError(
        f"{file}: {why}; restore the file from git, or remove it and record two runs again with: "
        "tunebook verify RUN RUN --record --label NAME",
        problem_id="evidence-broken",
    )


def write_evidence(content: dict[str, Any], folder: Path) -> Path:
    """Write new evidence into the folder. Raises: RequestError if its file exists."""
    hardware = content["hardware"]
    file = folder / f"{hardware['generation']}-{hardware['gpus']}-{content['label']}.json"
    if file.exists():
        raise RequestError(
            f"{file} exists; remove it if this replaces it, or choose another --label", problem_id="evidence-exists"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sealed = content | {"content_sha256": content_hash(content)}
    Evidence.model_validate(sealed)
    text = json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write_text(file, _NUMBERS.sub(_on_one_line, text) + "\n")
    return file


def _on_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")


def content_hash(content: dict[str, Any]) -> str:
    """The SHA-256 of everything but the hash itself."""
    rest = {key: value for key, value in content.items() if key != "content_sha256"}
    return sha256_text(json.dumps(rest, sort_keys=True, ensure_ascii=False, allow_nan=False))
