"""Evidence files: their paths, and reading and writing them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunebook.config.book import recipe_file
from tunebook.errors import DataError, RequestError
from tunebook.evidence.schema import Evidence
from tunebook.files import atomic_write_text, read_json, sha256_text

_NUMBERS = re.compile(r"\[\s*-?\d[^\[\]\"{}]*\]")  # a curve has hundreds of numbers: one line keeps diffs readable


def evidence_folder(recipe: str, recipes_dirs: list[Path]) -> Path:
    """The folder of a recipe's evidence. Raises: RequestError for an unknown recipe."""
    return recipe_file(recipe, recipes_dirs).parent / recipe / "evidence"


def evidence_files(recipe: str, recipes_dirs: list[Path]) -> list[Path]:
    """All of a recipe's evidence, by name."""
    return sorted(evidence_folder(recipe, recipes_dirs).glob("*.json"))


def read_evidence(file: Path) -> Evidence:
    """Read one file. Raises: DataError if it is missing, of another form or format, or was edited."""
    if not file.is_file():
        raise DataError(f"{file} does not exist; tunebook list shows what is recorded", problem_id="evidence-broken")
    content, why = read_json(file), None
    try:
        evidence = Evidence.model_validate(content)
        if evidence.content_sha256 != content_hash(content):
            why = "it was changed after it was written: its hash does not match its content"
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
    if why is not None:
        raise DataError(
            f"{file}: {why}; restore the file from git, or remove it and record two runs again with: "
            "tunebook verify RUN RUN --record --label NAME",
            problem_id="evidence-broken",
        )
    return evidence


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write new evidence into the folder, with its hash. Raises: RequestError if its file exists."""
    hardware = evidence.hardware
    file = folder / f"{hardware.generation}-{hardware.gpus}-{evidence.label}.json"
    if file.exists():
        raise RequestError(
            f"{file} exists; remove it if this replaces it, or choose another --label", problem_id="evidence-exists"
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = evidence.model_dump(mode="json")
    content["content_sha256"] = content_hash(content)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write_text(file, _NUMBERS.sub(_on_one_line, text) + "\n")
    return file


def _on_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")


def content_hash(content: dict[str, Any]) -> str:
    """The SHA-256 of everything but the hash itself."""
    rest = {key: value for key, value in content.items() if key != "content_sha256"}
    return sha256_text(json.dumps(rest, sort_keys=True, ensure_ascii=False, allow_nan=False))
