"""Facts of a model whose layers are not in the book: transformers builds it on PyTorch's meta device.

    measure    runs in its own process, since it imports torch: counts parameters, writes JSON; `--book` traces
               the book's models
    targets    the layers that PEFT adapts, by name
    layers     the kinds of layers, and models with a few of them
    packing    whether packed documents stay apart, on a small model with values
    saved      activations that autograd saves in a pass, on tensors with a shape and no memory
    compiled   what compiled layers save, by torch's way of splitting their operations between the passes
    kernels    stand-ins for GPU kernels, and CUDA's autocast
    (here)     starts that process and caches its answer under the config.json's hash

The first trace takes 5 to 15 seconds on two cores, depending on architecture and run. It needs no weights, no GPU and
no network.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import tunebook
from tunebook.config.model_facts import MeasuredLayers, ModelFacts, facts_from_json, shipped_answers
from tunebook.errors import RequestError, RulesError
from tunebook.facts.architectures import COMPILED_ARCHITECTURES
from tunebook.files import cache_root, remember, sha256_file
from tunebook.processes import stopping_with_parent
from tunebook.train.packages import installed_version

# Increase when the answer to the same config.json changes, so that cached answers are not reused.
_FORM = 14
# Timeout in seconds without progress. Total time is unlimited: tracing is slow on a busy machine.
_MAX_SILENCE_S = 300.0
STATED_FACTS = "stated_facts"  # key for stated sizes instead of a config.json
_PACKAGES = ("torch", "transformers", "peft")


# The ways to train, as "format/method": a number format of the weights and products (fp32, autocast, bf16, or cast:
# bf16 without autocast), and full fine-tuning, adapters or adapters with dropout.
ALL_WAYS = tuple(map("/".join, product(("fp32", "autocast", "bf16", "cast"), ("full", "adapter", "dropout"))))
_TRACED = "traced"  # key of a cached answer: the ways that it has


def trace_file(
    config_file: Path,
    *,
    trust_remote_code: bool = False,
    ways: Sequence[str] = ALL_WAYS,
    compiles: bool | None = True,
) -> ModelFacts | None:
    """The facts of the model that a config.json describes; None if torch or transformers is not installed.

    `ways`: those of `ALL_WAYS` that are traced; fewer take a fraction of the time, and others are added to the cached
    answer when they are asked for. `compiles`: whether compiled layers are traced, which is most of the work; None: if
    `auto` compiles those of the architecture. Raises: RequestError if transformers has no such causal language model,
    or cannot build it.
    """
    if (shipped := _shipped(config_file)) is not None:
        return shipped
    versions = {package: installed_version(package) for package in _PACKAGES}
    if versions["torch"] is None or versions["transformers"] is None:
        return None
    made_with = json.dumps([_FORM, versions, sorted(COMPILED_ARCHITECTURES)], sort_keys=True)
    key = hashlib.sha256(config_file.read_bytes() + made_with.encode()).hexdigest()
    file = cache_root() / "architectures" / f"{key}.json"
    known = _read(file)
    missing = [way for way in ways if known is None or not _traced(way, compiles, known) <= {*known[_TRACED]}]
    if not missing:
        assert known is not None
        return facts_from_json(known)
    _say_once(f"tracing the layers of {config_file}, once: this takes 5 to 15 s, longer on a busy machine")
    answer = _ask(config_file, trust_remote_code, missing, compiles)
    if "error" in answer:
        raise _refusal(config_file, answer, trust_remote_code)
    answer[_TRACED] = sorted({name for way in missing for name in _traced(way, compiles, answer)})
    if known is not None:
        answer[_TRACED] = sorted({*known[_TRACED], *answer[_TRACED]})
        for name in ("saved", "saved_without_autocast", "saved_beside_experts"):
            answer["measured"][name] = known["measured"].get(name, {}) | answer["measured"][name]
    remember(file, json.dumps(answer))
    return facts_from_json(answer)


def _traced(way: str, compiles: bool | None, answer: dict[str, Any]) -> set[str]:
    """What is traced of a way: layers that are not compiled, with and without dropout alike, and compiled ones."""
    if compiles is None:
        compiles = answer["architecture"] in COMPILED_ARCHITECTURES
    return {way.replace("dropout", "adapter"), *([f"{way}/compiled"] if compiles else [])}


def trace_stated(facts: ModelFacts, **tracing: Any) -> MeasuredLayers | None:
    """Trace the layers of an architecture with stated sizes that are not in the book; None if tracing fails."""
    sizes = asdict(facts)
    del sizes["measured"]
    with tempfile.TemporaryDirectory(prefix="tunebook-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({STATED_FACTS: sizes}), encoding="utf-8")
        try:
            traced = trace_file(file, **tracing)
        except RulesError:
            raise
        except RequestError:  # a rule or the loader reports it in the user's terms
            return None
    return None if traced is None else traced.measured


def _shipped(config_file: Path) -> ModelFacts | None:
    """The facts of a model whose config.json is in the book; None if it is another model."""
    own = [answer for answer in shipped_answers() if "config_sha256" in answer]
    found = sha256_file(config_file) if own else ""
    answer = next((answer for answer in own if answer["config_sha256"] == found), None)
    if answer is None:
        return None
    return facts_from_json(answer | {"measured": answer["measured"] | {"is_of_the_book": True}})


@cache
def _say_once(text: str) -> None:
    """Print to a terminal only, to keep JSON output and logs clean."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _read(file: Path) -> dict[str, Any] | None:
    """Read a cached answer; None if there is none or the file is damaged."""
    try:
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        facts_from_json(answer)
        return answer if isinstance(answer[_TRACED], list) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _ask(config_file: Path, trust_remote_code: bool, ways: Sequence[str], compiles: bool | None) -> dict[str, Any]:
    """Run the measuring process and return its answer; a crash or timeout becomes an error entry."""
    paths = [str(Path(tunebook.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with tempfile.TemporaryDirectory(prefix="tunebook-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-P", "-m", "tunebook.plan.architecture.measure", str(config_file), str(answer)]
        command += ["--ways", ",".join(ways), *["--trust-remote-code"] * trust_remote_code]
        command += [] if compiles is None else ["--compiled" if compiles else "--no-compiled"]
        said = _run(command, environment, progress_file(answer))
        if said is None:
            return {"error": "cut-off", "reason": f"nothing new was found for {_MAX_SILENCE_S:.0f} s"}
        try:
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            reason = said.splitlines()[-1]
            is_cut_off = any(word in reason for word in ("BrokenProcessPool", "MemoryError"))
            return {"error": "cut-off" if is_cut_off else "cannot-build", "reason": reason}
    return found


def progress_file(answer: Path) -> Path:
    """The file to which the measuring process appends one byte for each finished part."""
    return answer.with_suffix(".found")


def _num_found(progress: Path) -> int:
    return progress.stat().st_size if progress.exists() else 0


def _run(command: list[str], environment: dict[str, str], progress: Path) -> str | None:
    """Run the command and return its stderr or exit status; None if it makes no more progress.

    The process group is killed in any case, including its workers. The process also ends if this one is killed:
    otherwise it would continue for minutes with an answer that nobody reads.
    """
    nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        stopping_with_parent(command),
        env=environment,
        stdout=nowhere,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said = _exit_text(process, progress)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return None if said is None else said.strip() or f"the process ended with {process.returncode}"


def _exit_text(process: subprocess.Popen[str], progress: Path) -> str | None:
    found = -1
    while (now := _num_found(progress)) != found:
        found = now
        with contextlib.suppress(subprocess.TimeoutExpired):
            said: str = process.communicate(timeout=_MAX_SILENCE_S)[1]
            return said
    return None


def _refusal(config_file: Path, answer: dict[str, Any], trust_remote_code: bool) -> RequestError:
    reason = str(answer.get("reason", "")).strip().splitlines() or ["no reason is given"]
    if answer["error"] == "unknown-architecture":
        meant = f" (did you mean '{answer['meant']}'?)" if "meant" in answer else ""
        code = "" if trust_remote_code else ", or set model.trust_remote_code=true where the model brings its own code"
        return RequestError(
            f"{config_file}: transformers {installed_version('transformers')} has no causal language model of this "
            f"architecture: {reason[0]}; correct model_type in the file{meant}, or use a newer transformers{code}",
            problem_id="unknown-architecture",
        )
    if answer["error"] == "not-causal":
        return RequestError(
            f"{config_file}: {reason[0]} is {answer.get('kind', 'another kind of model')}, which is not trained here; "
            "name a causal language model, one that only continues a text",
            problem_id="model-not-causal",
        )
    text = (
        f"no model can be built with these sizes ({reason[0]}); correct the file, or download or copy the model again"
    )
    if answer["error"] == "code-absent":
        own = ", or set model.trust_remote_code=false: transformers has a model of this kind itself"
        text = (
            f"auto_map names code of the model's own that is not in this folder: {reason[0]}; copy it there, or "
            f"download the whole model{own if answer.get('is_known') else ''}"
        )
    elif answer["error"] == "cut-off":
        text = (
            f"its layers could not be traced ({reason[0]}); try again with 2 GiB of memory free, or state model.facts"
        )
    return RequestError(f"{config_file}: {text}", problem_id="model-config")
