"""Run a peer's program once per variant: one JSON line each, also for failures."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 10  # of those that are not timed
TOKENS_PER_STEP = 32_768  # of each GPU
_ERROR_LINE = re.compile(r"^(?:\[\w+\]:)?\s*(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$")
_GRACE_S = 10


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a peer's program."""

    name: str
    command: list[str]
    line: Mapping[str, Any]  # written into its line of results as it is
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The exit code, or None after a timeout, and the output."""

    exit_code: int | None
    seconds: float
    text: str


def parse(doc: str | None, variants: Iterable[str]) -> argparse.Namespace:
    """The arguments of every peer's script."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(variants), default=[])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=240, help="of one variant")
    parser.add_argument("--site", type=Path, help="a folder of the peer's own packages, before those of PYTHONPATH")
    parser.add_argument("--more", type=shlex.split, default=[], metavar="'WORD ...'",
                        help="further words for every variant, as the peer takes them: --more='--a=1 --b'")  # fmt: skip
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments


def peer_environment(site: Path | None, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a peer: its own packages come first, and the hub is off."""
    places = [str(site.resolve())] if site else []
    places += [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | offline | {"PYTHONPATH": os.pathsep.join(places)} | dict(more)


def versions_of(packages: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Versions of packages in the peer's environment."""
    code = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", code, *packages]
    found: dict[str, str] = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    return found


def run_all(
    attempts: Iterable[Attempt], results: Path, timeout_s: float, measured: Callable[[Attempt, Ended], dict[str, Any]]
) -> None:
    """Run the attempts in turn; their output goes to one file next to the results."""
    for attempt in attempts:
        ended = run(attempt, timeout_s)
        with results.with_suffix(".log.txt").open("a", encoding="utf-8") as log:
            log.write(f"===== {attempt.name}: {' '.join(attempt.command)}\n{ended.text}\n")
        line = {"name": attempt.name, **attempt.line, "exit_code": ended.exit_code, "seconds": round(ended.seconds, 1)}
        line |= measured(attempt, ended)
        if ended.exit_code != 0:
            line["error"] = last_error(ended, timeout_s)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def run(attempt: Attempt, timeout_s: float) -> Ended:
    """Run until the end or the timeout, then end all its processes."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            attempt.command, stdout=output, stderr=subprocess.STDOUT, env=attempt.environment, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end_group(process)
        output.seek(0)
        return Ended(exit_code, time.monotonic() - started, output.read())


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End all processes: ranks outlive a killed launcher and would hold GPU memory."""
    for ask in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ask)
        except ProcessLookupError:
            return
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def last_error(ended: Ended, timeout_s: float) -> str:
    """The last line of an exception, or the last line."""
    if ended.exit_code is None:
        return f"its {timeout_s:g} s were up"
    lines = [line.strip() for line in ended.text.splitlines() if line.strip()]
    # torchrun repeats, after the ranks' own words, that they failed.
    named = [found[1] for line in lines if (found := _ERROR_LINE.match(line)) and "ChildFailedError" not in line]
    return (named or lines or ["it printed nothing"])[-1][:400]


def medians(speeds: list[float], warm_up_steps: int = WARM_UP_STEPS) -> dict[str, Any]:
    """The median speed after the warm-up."""
    timed = speeds[warm_up_steps:]
    if not timed:
        return {"timed_steps": 0}
    speed = statistics.median(timed)
    return {"timed_steps": len(timed), "tokens_per_second_per_gpu": round(speed, 1)}
