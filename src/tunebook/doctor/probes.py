"""Probes: checks that may hang, crash or take seconds. Each runs in its own process and prints one JSON object.

`run_probe` starts `python -m tunebook.doctor.probes NAME [ARGUMENT]` with a time limit.

- `nvml`: `{"gpus": [...]}`, the health of every GPU by NVML. Values that a GPU or driver does not support are null.
  Without NVML or a driver the list is empty; `hardware.detect` reports the reason.
- `torch_build`: what torch was built for, and whether each GPU computes correctly.
- `tokenizer RUN_YAML`: the recipe's tokenizer and chat template, `{"is_here", "problem": {id, message} | null, "bos":
  ..., "template": ...}`. It runs with HF_HUB_OFFLINE=1, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import TunebookError, first_line
from tunebook.processes import ask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.config.schema import RunConfig

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}  # nvmlComputeMode_t
_VOLATILE, _AGGREGATE, _UNCORRECTED = 0, 1, 1  # nvmlEccCounterType_t, nvmlMemoryErrorType_t
_GIB = 2**30
_SIZE = 256
_ABSENT = ("hub-out-of-reach", "hub-cannot-load")  # a missing folder is an error
_TALK = [
    ("user", "Which is larger, 2 or 3?"),
    ("assistant", "3 is larger."),
    ("user", "And 5 or 4?"),
    ("assistant", "5."),
]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The answer of a probe, or why there is none."""

    facts: dict[str, Any] | None
    problem: str | None = None


def run_probe(name: str, *arguments: str, timeout_s: float, variables: Mapping[str, str] | None = None) -> Probe:
    """Run a probe and parse its last line; `variables` are set in its environment. Never raises."""
    command = [sys.executable, "-m", __name__, name, *arguments]
    answer = ask(command, timeout_s=timeout_s, environment=os.environ | dict(variables or {}))
    if answer.problem is not None:
        return Probe(facts=None, problem=answer.failure)
    lines = answer.text.strip().splitlines()  # libraries print their own lines first
    try:
        facts = json.loads(lines[-1] if lines else "")
    except ValueError:
        return Probe(facts=None, problem=f"it printed no JSON but {answer.text.strip()[-80:]!r}")
    if not isinstance(facts, dict):
        return Probe(facts=None, problem=f"it printed no JSON object but {lines[-1][:80]!r}")
    return Probe(facts=facts)


def read_health() -> list[dict[str, Any]]:
    """Return NVML's data on each GPU, in PCI bus order; a GPU that does not answer has `problem`."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "problem": str(error)}

    def asked(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    mode = asked(lambda: nvml.nvmlDeviceGetComputeMode(handle))
    return {
        "index": index,
        "problem": None,
        "used_gib": round(memory.used / _GIB, 2) if memory else None,
        "total_gib": round(memory.total / _GIB, 2) if memory else None,
        "processes": asked(lambda: _processes(nvml, handle)),
        "persistence": asked(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))),
        "compute_mode": _COMPUTE_MODES.get(mode, str(mode)) if mode is not None else None,
        "mig": asked(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
        "ecc": asked(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        "uncorrected_since_start": asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)),
        "uncorrected_ever": asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _AGGREGATE)),
        "remapping": asked(lambda: _remapping(nvml, handle)),
        "retirement_pending": asked(lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))),
        "pcie_width": asked(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_max_width": asked(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _processes(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """List the processes that compute on a GPU. Inside a container, processes of others are not visible."""
    return [
        {
            "pid": process.pid,
            "gib": None if process.usedGpuMemory is None else round(process.usedGpuMemory / _GIB, 2),
        }
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ]


def _remapping(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return counts of memory rows that were replaced by spare ones (Ampere and newer)."""
    correctable, uncorrectable, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "correctable": correctable,
        "uncorrectable": uncorrectable,
        "is_pending": bool(is_pending),
        "has_failed": bool(has_failed),
    }


def read_torch() -> dict[str, Any]:
    """Return torch's version, CUDA, architectures, NCCL, and an entry per visible GPU; `cuda_problem` if none works."""
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "architectures": _architectures(torch),
        "nccl": _nccl(torch),
        "cuda_problem": None,
        "devices": [],
    }
    if torch.version.cuda is None:
        return facts
    try:
        torch.cuda.current_device()  # raises with the reason, unlike is_available()
        facts["devices"] = [_compute(torch, index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        facts["cuda_problem"] = first_line(error)
    return facts


def _architectures(torch: Any) -> list[str]:
    """Return the architecture flags of torch's build, which `get_arch_list` hides without a GPU."""
    ask = getattr(torch._C, "_cuda_getArchFlags", None)  # not in CPU builds
    flags = ask() if ask is not None else None
    return flags.split() if flags else []


def _nccl(torch: Any) -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _compute(torch: Any, index: int) -> dict[str, Any]:
    """Check a product of integers small enough to be exact in every format, so that only one answer is right."""
    device = torch.device("cuda", index)
    facts: dict[str, Any] = {"index": index, "problem": None}
    try:
        start = time.perf_counter()
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        rows = torch.arange(_SIZE, dtype=torch.float32, device=device) % 5
        product = rows.repeat(_SIZE, 1) @ torch.eye(_SIZE, device=device)
        expected = (torch.arange(_SIZE, dtype=torch.float32) % 5).repeat(_SIZE, 1)
        if not torch.equal(product.cpu(), expected):
            facts["problem"] = "it computed a wrong product"
        facts |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "free_gib": round(free / _GIB, 2),
            "total_gib": round(total / _GIB, 2),
            "seconds": round(time.perf_counter() - start, 2),
        }
    except RuntimeError as error:  # torch's AcceleratorError and OutOfMemoryError are subclasses
        facts["problem"] = first_line(error)
    return facts


def read_tokenizer(config: RunConfig) -> dict[str, Any]:
    """Check the tokenizer for problems that a training would find only after it has started."""
    from tunebook.model.tokenizer import load_tokenizer, needs_padding

    facts: dict[str, Any] = {"is_here": True, "problem": None, "template": None}
    try:
        tokenizer = load_tokenizer(config.model, is_padded=needs_padding(config))
    except TunebookError as error:
        facts["is_here"] = error.problem_id not in _ABSENT
        return facts | {"problem": _problem(error)}
    facts |= {
        "folder": tokenizer.name_or_path,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
        "bos": tokenizer.bos_token,
    }
    facts |= {"template": _try_template(tokenizer)}
    return facts


def _try_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Render a two-question conversation; report whether the template marks the answers, and its first tokens."""
    from tunebook.data.conversation import Conversation
    from tunebook.data.template import ConversationRenderer

    facts: dict[str, Any] = {"is_there": bool(tokenizer.chat_template), "problem": None}
    if not tokenizer.chat_template:
        return facts
    talk = [{"role": role, "content": text, "train": role == "assistant"} for role, text in _TALK]
    try:
        renderer = ConversationRenderer(tokenizer)
        facts["is_marked"] = renderer.is_marked
        rendered = renderer.render(Conversation.plain(talk), "a conversation of two questions")
    except TunebookError as error:
        return facts | {"problem": _problem(error)}
    return facts | {
        "num_answers": 2,
        "num_found": len(rendered.spans),
        "leading_bos": _leading_bos(tokenizer, rendered.text, add_special_tokens=False),
        "leading_bos_if_added": _leading_bos(tokenizer, rendered.text, add_special_tokens=True),
    }


def _leading_bos(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> int:
    """Count the BOS tokens at the start of the text."""
    if tokenizer.bos_token_id is None:
        return 0
    ids = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    count = 0
    for token in ids:
        if token != tokenizer.bos_token_id:
            break
        count += 1
    return count


def _problem(error: TunebookError) -> dict[str, Any]:
    return {"id": error.problem_id, "message": error.message}


def main(name: str, *arguments: str) -> None:
    """Print the answer of one probe."""
    if name == "nvml":
        answer: dict[str, Any] = {"gpus": read_health()}
    elif name == "torch_build":
        answer = read_torch()
    else:
        from tunebook.config.frozen import load_config

        answer = read_tokenizer(load_config(Path(arguments[0])))
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
