"""Show the pins of the `.in` files next to the newest version on pip's package index; `make lock-check` runs this.

It changes nothing. The index is the one that pip is configured for. The newest version is the newest stable one for the
oldest supported Python, or the newest pre-release if the package has no stable one. The resolver of make_locks.py tries
each newer version in place of the pin, so the table says whether the other pins allow it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import make_locks

NUM_QUERIES_AT_ONCE = 4  # each is a process of pip, which waits for the network most of the time
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,-]+\])?==([^\s;#]+)", re.MULTILINE)
# What to resolve for a pin in a file that only other `.in` files name.
INCLUDED_BY = {"requirements-common.in": "cpu/requirements.in", "requirements-gpu.in": "ampere/requirements.in"}


class Pin(NamedTuple):
    """A package at one version, and the `.in` files that pin it, relative to docker/."""

    name: str
    version: str
    sources: tuple[str, ...]


class Answer(NamedTuple):
    """What the index has for a pin, and why the other pins refuse it; `refusal` is empty if they do not."""

    newest: str
    has_pinned_version: bool
    refusal: str = ""


def read_pins() -> list[Pin]:
    """All pins of the `.in` files, by name; a version in several files is one pin."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(make_locks.DOCKER.rglob("requirements*.in")):
        for name, version in PIN.findall(path.read_text()):
            found.setdefault((name, version), []).append(str(path.relative_to(make_locks.DOCKER)))
    return [Pin(*key, tuple(found[key])) for key in sorted(found, key=lambda key: (key[0].lower(), key[1]))]


def ask_index(name: str) -> list[str]:
    """The versions on pip's index, newest first: stable ones, or pre-releases if there are no others."""
    command = [str(make_locks.TOOLS / "bin" / "python"), "-m", "pip", "index", "versions", name]
    for options in ([], ["--pre"]):
        words = [*command, f"--python-version={make_locks.OLDEST_PYTHON}", *options]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if match := re.search(r"^Available versions: (.+)$", done.stdout, flags=re.MULTILINE):
            return list(dict.fromkeys(version.split("+")[0] for version in match[1].split(", ")))
    return []


def short_reason(name: str, resolver_output: str) -> str:
    """The resolver's reason against a version of `name`, in a few words."""
    text = " ".join(resolver_output.split())
    if match := re.search(
        rf"(\S+) depends on ({re.escape(name)}[^\w.\s-]\S*?)(?=[,\s]*(?:and|we|$)\b)", text, re.IGNORECASE
    ):
        return f"{match[1]} needs {match[2]}"
    escaped = re.escape(name)
    if match := re.search(rf"you require {escaped}==\S+ and (?:you require )?{escaped}(?:{{.*?}})?==(\S+?),", text):
        return f"what it is installed with has {match[1]}"
    if match := re.search(r"does not satisfy (Python[^\s,)]+)", text):
        return f"it needs {match[1]}"
    return "put it into the .in file, and make lock says why"


def try_version(pin: Pin, version: str) -> str:
    """Resolve with another version in place of a pin; the reason why that fails, or an empty string."""
    source = INCLUDED_BY.get(pin.sources[0], pin.sources[0])
    with tempfile.TemporaryDirectory() as folder:
        docker = Path(folder) / "docker"
        for path in make_locks.DOCKER.rglob("requirements*"):
            copy = docker / path.relative_to(make_locks.DOCKER)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
        changed = docker / pin.sources[0]
        pattern = rf"^({re.escape(pin.name)}(?:\[.*?\])?==){re.escape(pin.version)}(?=[\s;#]|$)"
        changed.write_text(re.sub(pattern, rf"\g<1>{version}", changed.read_text(), flags=re.MULTILINE))
        command = [
            str(make_locks.TOOLS / "bin" / "uv"), "pip", "compile", "--quiet", "--universal", "--fork-strategy=fewest",
            f"--python-version={make_locks.OLDEST_PYTHON}", f"docker/{source}", "--output-file=resolved.lock",
        ]  # fmt: skip
        if "/" not in source:  # tools are installed next to what a run needs, and the compiler next to torch
            lock = "ampere" if source == "requirements-nvcc.in" else "cpu"
            command.append(f"--constraint=docker/{lock}/requirements.lock")
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else short_reason(pin.name, done.stderr)


def look_up(pin: Pin) -> Answer | None:
    """The index's answer for a pin; None if it knows no version of the package."""
    published = ask_index(pin.name)
    if not published:
        return None
    is_newest = published[0] == pin.version
    return Answer(published[0], pin.version in published, "" if is_newest else try_version(pin, published[0]))


def table(answers: dict[Pin, Answer | None]) -> list[str]:
    """One line for each pin that is not the newest version, in columns."""
    rows = [("package", "pinned", "newest", "allowed by the other pins", "pinned in docker/")]
    for pin, answer in answers.items():
        if answer is None:
            rows.append((pin.name, pin.version, "none on the index", "", " ".join(pin.sources)))
        elif answer.newest != pin.version:
            pinned = pin.version if answer.has_pinned_version else f"{pin.version} (not on the index)"
            allowed = f"no: {answer.refusal}" if answer.refusal else "yes"
            rows.append((pin.name, pinned, answer.newest, allowed, " ".join(pin.sources)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def main() -> int:
    """Ask for every pin and print those that are not the newest. Raises: SystemExit if the index has no package."""
    make_locks.prepare_tools()
    pins = read_pins()
    print(f"asking pip's index for {len(pins)} pins, and trying what is newer ...", file=sys.stderr)
    with ThreadPoolExecutor(NUM_QUERIES_AT_ONCE) as pool:
        answers = dict(zip(pins, pool.map(look_up, pins), strict=True))
    known = [answer for answer in answers.values() if answer is not None]
    if not known:
        raise SystemExit(
            f"the package index has none of the {len(pins)} packages, or does not answer. See which one pip asks: pip "
            "config list. See its answer: pip index versions torch"
        )
    outdated = [answer for pin, answer in answers.items() if answer is not None and answer.newest != pin.version]
    if len(known) - len(outdated) < len(pins):
        print("\n".join(table(answers)))
    allowed = sum(not answer.refusal for answer in outdated)
    print(f"{len(outdated)} of {len(pins)} pins are outdated; the other pins allow {allowed} of the newer versions")
    if allowed:
        print("to take one: read in its .in file why it is pinned, change the pin, then type make lock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
