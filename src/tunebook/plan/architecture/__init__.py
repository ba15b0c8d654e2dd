"""The facts of an architecture that no formula of ours knows: transformers builds it, on PyTorch's meta device.

    measure    runs in a process of its own, since it imports torch: counts the parameters, says what it found as JSON
    targets    what PEFT puts adapters on, by name
    saved      what autograd keeps of a pass, seen on tensors that have a shape and no memory
    offloading what of that TRL's activation offloading leaves on the device
    (here)     starts that process and remembers its answer under the config.json's hash

Takes 5 to 180 seconds the first time, by architecture and cores, and no weights, no GPU and no network.
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
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tunebook
from tunebook.config.model_facts import MeasuredLayers, ModelFacts
from tunebook.errors import RequestError
from tunebook.files import cache_root, remember
from tunebook.processes import stopping_with_parent

# Raised when the answer to the same config.json changes: what was remembered is then measured again.
_FORM = 7
_COUNTED = (
    "num_layers", "parameters", "linear_inputs", "adapter_parameters", "linear_parameters", "active_parameters",
    "largest_parameter", "unreached_parameters",
)  # fmt: skip
# Without anything new: on a slow or busy machine it takes as long as it takes. All that is asked for is found, or
# nothing, since the hash of a run holds it, and two machines must find the same.
_MOST_SILENT_S = 300.0
_PACKAGES = ("torch", "transformers", "peft")


def measured_facts(config_file: Path, *, trust_remote_code: bool = False) -> ModelFacts | None:
    """The facts of the model that a folder's config.json describes; None where torch or transformers is not installed.

    Raises: RequestError where transformers has no such causal language model, or cannot build it.
    """
    versions = {package: _version(package) for package in _PACKAGES}
    if versions["torch"] is None or versions["transformers"] is None:
        return None
    key = hashlib.sha256(config_file.read_bytes() + json.dumps([_FORM, versions], sort_keys=True).encode()).hexdigest()
    remembered = cache_root() / "architectures" / f"{key}.json"
    facts = _read(remembered)
    if facts is None:
        _say_once(f"looking at the layers of {config_file}, once: this takes 5 to 180 s, longer where others compute")
        answer = _ask(config_file, trust_remote_code)
        if "error" in answer:
            raise _refusal(config_file, answer, trust_remote_code)
        facts = _facts(answer)
        remember(remembered, json.dumps(answer))
    return facts


@cache
def _say_once(text: str) -> None:
    """To people who wait at a terminal, and not among what programs read: JSON, or a log."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(file: Path) -> ModelFacts | None:
    """What was remembered; None where there is nothing, or a file that something damaged."""
    try:
        return _facts(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _facts(answer: dict[str, Any]) -> ModelFacts:
    """The answer as facts. Raises: ValueError, TypeError or KeyError where it is not one."""
    measured = answer["measured"]
    layers = MeasuredLayers(
        **{name: int(measured[name]) for name in _COUNTED},
        attention=[str(name) for name in measured["attention"]],
        adapters=_numbers(measured["adapters"], 2),
        expert_adapters=_numbers(measured["expert_adapters"], 2),
        saved=_numbers(measured["saved"], 6),
        saved_without_autocast=_numbers(measured["saved_without_autocast"], 6),
        saved_beside_experts=_numbers(measured["saved_beside_experts"], 6),
    )
    kinds = {"architecture": str, "dtype": str, "tie_word_embeddings": bool}
    names = [field.name for field in fields(ModelFacts) if field.name not in ("measured", "unreached")]
    unreached = [str(name) for name in measured["unreached"]]
    return ModelFacts(
        **{name: kinds.get(name, int)(answer[name]) for name in names}, unreached=unreached, measured=layers
    )


def _numbers(found: dict[str, Any], length: int) -> dict[str, list[int]]:
    """Raises: ValueError where there are not as many of each name."""
    by_name = {str(name): [int(number) for number in numbers] for name, numbers in found.items()}
    if any(len(numbers) != length for numbers in by_name.values()):
        raise ValueError(f"not {length} numbers")
    return by_name


def _ask(config_file: Path, trust_remote_code: bool) -> dict[str, Any]:
    """What the process answers. One that gives none, or takes too long, is an error in words."""
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
        command += ["--trust-remote-code"] if trust_remote_code else []
        said = _run(command, environment, progress_file(answer))
        if said is None:
            return {"error": "cut-off", "reason": f"nothing new was found for {_MOST_SILENT_S:.0f} s"}
        try:
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            reason = said.splitlines()[-1]
            is_cut_off = any(word in reason for word in ("BrokenProcessPool", "MemoryError"))
            return {"error": "cut-off" if is_cut_off else "cannot-build", "reason": reason}
    return found


def progress_file(answer: Path) -> Path:
    """Where the process that is to write an answer puts a byte for each part that it has found."""
    return answer.with_suffix(".found")


def _num_found(progress: Path) -> int:
    return progress.stat().st_size if progress.exists() else 0


def _run(command: list[str], environment: dict[str, str], progress: Path) -> str | None:
    """What it says on stderr, or how it ended; None where it came no further. Its workers end with it, in any case.

    It ends with this process too, which may be killed: it would look on for minutes at what nobody reads.
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
            said = _said_at_the_end(process, progress)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return None if said is None else said.strip() or f"the process ended with {process.returncode}"


def _said_at_the_end(process: subprocess.Popen[str], progress: Path) -> str | None:
    found = -1
    while (now := _num_found(progress)) != found:
        found = now
        with contextlib.suppress(subprocess.TimeoutExpired):
            said: str = process.communicate(timeout=_MOST_SILENT_S)[1]
            return said
    return None


def _refusal(config_file: Path, answer: dict[str, Any], trust_remote_code: bool) -> RequestError:
    reason = str(answer.get("reason", "")).strip().splitlines() or ["no reason is given"]
    if answer["error"] == "unknown-architecture":
        meant = f" (did you mean '{answer['meant']}'?)" if "meant" in answer else ""
        code = "" if trust_remote_code else ", or set model.trust_remote_code=true where the model brings its own code"
        return RequestError(
            f"{config_file}: transformers {_version('transformers')} has no causal language model of this "
            f"architecture: {reason[0]}; correct model_type in the file{meant}, or use a newer transformers{code}",
            problem_id="unknown-architecture",
        )
    if answer["error"] == "not-causal":
        return RequestError(
            f"{config_file}: {reason[0]} is {answer.get('kind', 'another kind of model')}, which is not trained here; "
            "name a causal language model, one that only continues a text",
            problem_id="model-not-causal",
        )
    if answer["error"] == "code-absent":
        own = ", or set model.trust_remote_code=false: transformers has a model of this kind itself"
        return RequestError(
            f"{config_file}: auto_map names code of the model's own that is not in this folder: {reason[0]}; copy it "
            f"there, or download the whole model{own if answer.get('is_known') else ''}",
            problem_id="model-config",
        )
    if answer["error"] == "cut-off":
        return RequestError(
            f"{config_file}: its layers could not be looked at ({reason[0]}); try again with 2 GiB of memory free, or "
            "state model.facts",
            problem_id="model-config",
        )
    return RequestError(
        f"{config_file}: no model can be built with these sizes ({reason[0]}); correct the file, or download or copy "
        "the model again",
        problem_id="model-config",
    )
