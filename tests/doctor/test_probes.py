"""The probes: their answers, and the findings if they hang or crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from tunebook.config.frozen import config_to_yaml
from tunebook.doctor import probes
from tunebook.doctor.probes import read_health, read_torch, run_probe
from tunebook.processes import Answer

from .conftest import resolved

GIB = 2**30


def answer_with(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    monkeypatch.setattr(probes, "ask", lambda *_, **__: Answer(**{"text": "", **facts}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"problem": "no answer within 1 s"}, "no answer within 1 s"),
        ({"problem": "it was killed by signal 11", "errors": "a\nSegmentation fault\n"},
         "it was killed by signal 11: Segmentation fault"),
        ({"text": ""}, "it printed no JSON but ''"),
        ({"text": "{'a': 1}"}, "it printed no JSON but \"{'a': 1}\""),
        ({"text": "[1]"}, "it printed no JSON object but '[1]'"),
    ],
)  # fmt: skip
def test_unreadable_answer_is_a_problem(monkeypatch, facts: dict, problem: str) -> None:
    answer_with(monkeypatch, **facts)
    probe = run_probe("nvml", timeout_s=1)
    assert (probe.facts, probe.problem) == (None, problem)


def test_lines_of_libraries_before_the_answer_are_left_out(monkeypatch) -> None:
    answer_with(monkeypatch, text='a library says hello\n{"gpus": []}\n')
    assert run_probe("nvml", timeout_s=1).facts == {"gpus": []}


def test_one_that_hangs_is_ended() -> None:
    slow = "/usr/lib/python3/dist-packages"
    probe = run_probe("torch_build", timeout_s=0.05, variables={"PYTHONPATH": slow})
    assert probe.problem == "no answer within 0.05 s"


# --- NVML


@pytest.fixture
def nvml_of(monkeypatch: pytest.MonkeyPatch):
    """`nvml_of(card, ...)` makes NVML return these cards. The driver does not support what a card lacks."""

    def install(*cards: dict) -> None:
        def handle(index: int) -> dict:
            if cards[index].get("is_lost"):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return cards[index]

        def asked(key: str):
            def question(card: dict, *_: object) -> object:
                if key not in card:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
                return card[key]

            return question

        answers = {
            "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: len(cards),
            "nvmlDeviceGetHandleByIndex": handle, "nvmlDeviceGetMemoryInfo": asked("memory"),
            "nvmlDeviceGetComputeMode": asked("mode"), "nvmlDeviceGetComputeRunningProcesses": asked("processes"),
            "nvmlDeviceGetPersistenceMode": asked("persistence"), "nvmlDeviceGetMigMode": asked("mig"),
            "nvmlDeviceGetEccMode": asked("ecc"), "nvmlDeviceGetTotalEccErrors": lambda card, kind, since: (
                asked("errors")(card)[since]
            ),
            "nvmlDeviceGetRemappedRows": asked("rows"), "nvmlDeviceGetRetiredPagesPendingStatus": asked("pending"),
            "nvmlDeviceGetCurrPcieLinkWidth": asked("width"), "nvmlDeviceGetMaxPcieLinkWidth": asked("max_width"),
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    return install


def test_everything_that_nvml_tells(nvml_of) -> None:
    process = SimpleNamespace(pid=12806, usedGpuMemory=26 * GIB)
    hidden = SimpleNamespace(pid=7, usedGpuMemory=None)
    nvml_of({
        "memory": SimpleNamespace(used=27 * GIB, total=140 * GIB), "mode": 3, "processes": [process, hidden],
        "persistence": 1, "mig": [0, 0], "ecc": [1, 1], "errors": (2, 5), "rows": (1, 2, 0, 1), "pending": 0,
        "width": 8, "max_width": 16,
    })  # fmt: skip
    (gpu,) = read_health()
    assert gpu == {
        "index": 0, "problem": None, "used_gib": 27.0, "total_gib": 140.0,
        "processes": [{"pid": 12806, "gib": 26.0}, {"pid": 7, "gib": None}], "persistence": True,
        "compute_mode": "exclusive process", "mig": False, "ecc": True, "uncorrected_since_start": 2,
        "uncorrected_ever": 5,
        "remapping": {"correctable": 1, "uncorrectable": 2, "is_pending": False, "has_failed": True},
        "retirement_pending": False, "pcie_width": 8, "pcie_max_width": 16,
    }  # fmt: skip


def test_unknown_facts_are_null_and_a_lost_gpu_hides_no_other(nvml_of) -> None:
    nvml_of({"is_lost": True}, {"persistence": 0})
    lost, other = read_health()
    assert (lost["index"], "lost" in lost["problem"].lower()) == (0, True)
    assert other.pop("persistence") is False
    assert {key: value for key, value in other.items() if value is not None} == {"index": 1}


def test_the_real_one_answers_on_whatever_machine_this_is() -> None:
    probe = run_probe("nvml", timeout_s=60)
    assert probe.problem is None
    assert isinstance(probe.facts["gpus"], list)


# --- torch


class Cuda:
    """A fake torch.cuda with GPUs whose products are computed by the CPU."""

    def __init__(self, torch, *, failing: int | None = None, wrong: int | None = None) -> None:
        self._torch, self._failing, self._wrong = torch, failing, wrong
        self.nccl = SimpleNamespace(version=lambda: (2, 27, 5))

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int):
        if index == self._failing:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
        return SimpleNamespace(name="NVIDIA H200", major=9, minor=0)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 139 * GIB, 140 * GIB


@pytest.fixture
def torch_with(monkeypatch: pytest.MonkeyPatch):
    import torch

    def install(**options: int) -> None:
        monkeypatch.setattr(torch, "cuda", Cuda(torch, **options))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_80 sm_90", raising=False)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch, "device", lambda kind, index=None: "cpu")

    return install


def test_each_gpu_computes(torch_with) -> None:
    torch_with()
    facts = read_torch()
    assert (facts["cuda"], facts["architectures"], facts["nccl"]) == ("13.0", ["sm_80", "sm_90"], "2.27.5")
    assert [(device["index"], device["problem"], device["free_gib"]) for device in facts["devices"]] == [
        (0, None, 139.0), (1, None, 139.0),
    ]  # fmt: skip


def test_a_gpu_that_fails_does_not_hide_the_others(torch_with) -> None:
    torch_with(failing=0)
    first, second = read_torch()["devices"]
    assert (first["problem"], second["problem"]) == ("CUDA error: out of memory", None)


def test_a_wrong_product_is_seen(torch_with, monkeypatch) -> None:
    import torch

    torch_with()
    monkeypatch.setattr(torch, "eye", lambda size, device: torch.ones(size, size))
    assert {device["problem"] for device in read_torch()["devices"]} == {"it computed a wrong product"}


def test_a_cuda_that_cannot_start_says_why(torch_with, monkeypatch) -> None:
    import torch

    def fail() -> None:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized\nmore")

    torch_with()
    monkeypatch.setattr(torch.cuda, "current_device", fail, raising=False)
    facts = read_torch()
    assert facts["cuda_problem"].endswith("Error 802: system not yet initialized")
    assert facts["devices"] == []


def test_the_real_torch() -> None:
    import torch

    probe = run_probe("torch_build", timeout_s=120)
    assert probe.problem is None
    assert (probe.facts["version"], probe.facts["cuda"]) == (torch.__version__, torch.version.cuda)


# --- the tokenizer


def test_the_quickstarts_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(config_to_yaml(resolved("quickstart")))
    probe = run_probe("tokenizer", str(file), timeout_s=120, variables={"HF_HUB_OFFLINE": "1"})
    assert probe.problem is None
    facts = probe.facts
    assert (facts["is_here"], facts["problem"], facts["eos"], facts["bos"]) == (True, None, "<|im_end|>", None)
    assert facts["template"] == {
        "is_there": True, "problem": None, "is_marked": True, "num_answers": 2, "num_found": 2, "leading_bos": 0,
        "leading_bos_if_added": 0,
    }  # fmt: skip


def test_command_does_not_import_what_probes_test() -> None:
    code = (
        "import tunebook.commands.doctor, sys; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
