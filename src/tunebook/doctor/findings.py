"""What a look at something results in: ok, or a warning or error with what to type against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tunebook.errors import Problem, TunebookError


class Level(Enum):
    """How bad it is; an error means that a run fails or is wrong here."""

    ok = "ok"
    warning = "warning"
    error = "error"


class Kind(Enum):
    """What was looked at, in the order in which it is shown."""

    gpus = "gpus"
    software = "software"
    links = "links"
    system = "system"
    storage = "storage"
    recipe = "recipe"
    tokenizer = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. `id` is what `tunebook explain` takes; `data` holds the numbers, with units."""

    id: str
    kind: Kind
    what: str
    level: Level = Level.ok
    fix: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.level is Level.ok) == (self.fix is None), (
            f"{self.id}: a fix belongs to what is wrong, and only to that"
        )

    def to_json(self) -> dict[str, Any]:
        """The finding as `doctor --json` prints it."""
        return {
            "id": self.id,
            "kind": self.kind.value,
            "level": self.level.value,
            "what": self.what,
            "fix": self.fix,
            "data": self.data,
        }


def finding_of(problem: Problem, kind: Kind) -> Finding:
    """A rule's problem as a finding."""
    level = Level.error if problem.is_error else Level.warning
    return Finding(
        id=problem.id,
        kind=kind,
        level=level,
        what=f"{problem.key}: {problem.message}",
        fix=problem.fix,
        data={"key": problem.key},
    )


def finding_of_error(error: TunebookError, kind: Kind, *, otherwise: str) -> Finding:
    """What another part of Tunebook raised; its message has the fix in it. `otherwise` is the id of one without."""
    id = error.problem_id or otherwise
    return Finding(id=id, kind=kind, level=Level.error, what=error.message, fix=f"tunebook explain {id}")


def exit_code_of(findings: list[Finding]) -> int:
    """0 where nothing is an error, else 2: the request cannot be served here as it is."""
    return 2 if any(finding.level is Level.error for finding in findings) else 0


def listed(numbers: list[int]) -> str:
    """Numbers for people: `0-3, 6`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def size_text(num_bytes: int) -> str:
    """Bytes for people: 64 KiB, 256 MiB, 1 GiB."""
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**exponent:
            return f"{num_bytes / 2**exponent:.4g} {unit}"
    return f"{num_bytes} bytes"
