"""The whole command, on this machine and on machines with parts that do not answer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands import doctor as command
from tunebook.commands.doctor import doctor_command
from tunebook.doctor import storage
from tunebook.doctor.gpus import PciGpu
from tunebook.doctor.probes import Probe
from tunebook.explain import all_ids
from tunebook.hardware.detect import Machine
from tunebook.processes import Answer

from ..doctor.conftest import TOPOLOGIES, h200, health, machine_with, measured

TORCH = {
    "version": "2.13.0", "cuda": "13.0", "architectures": ["sm_90"], "nccl": "2.27.5", "cuda_problem": None,
    "devices": [{"index": index, "problem": None, "free_gib": 139.0} for index in range(4)],
}  # fmt: skip
CPU_TORCH = TORCH | {"version": "2.13.0+cpu", "cuda": None, "architectures": [], "nccl": None, "devices": []}
TOKENIZER = {
    "is_here": True, "problem": None, "folder": "/a", "eos": "<|im_end|>", "pad": None, "bos": None,
    "template": {"is_there": True, "problem": None, "is_marked": True, "num_answers": 2, "num_found": 2,
                 "leading_bos": 0, "leading_bos_if_added": 0},
}  # fmt: skip

NOT_LOADED = (
    "it ended with exit code 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
    "sure that the latest NVIDIA driver is installed and running."
)


class Host:
    """The answers of a machine with four healthy H200."""

    def __init__(self) -> None:
        self.machine: Machine | None = machine_with(*(h200(index) for index in range(4)))
        self.nvml = Probe(facts={"gpus": [health(index) for index in range(4)]})
        self.torch = Probe(facts=TORCH)
        self.topology = Answer(text=(TOPOLOGIES / "h100x8.txt").read_text())
        self.bandwidth = measured(360.0)
        self.listing = Answer(text="", problem="there is no nvidia-smi")
        self.on_bus: list[PciGpu] = []
        self.asked: list[str] = []

    def probe(self, name: str, **_: Any) -> Probe:
        return {"nvml": self.nvml, "torch_build": self.torch}[name]

    def detect(self, no_gpu_because: str | None = None) -> Machine:
        if no_gpu_because is not None:
            return Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0, notes=[no_gpu_because])
        assert self.machine is not None, "NVML must not be asked in this process where it did not answer"
        return self.machine

    def measure(self, num_ranks: int, backend: str) -> Any:
        self.asked.append(f"{num_ranks} {backend}")
        return self.bandwidth


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(command, "run_probe", host.probe)
    monkeypatch.setattr(command, "detect_machine", host.detect)
    monkeypatch.setattr(command, "ask_nvidia_smi", lambda *_: host.listing)
    monkeypatch.setattr(command, "gpus_on_bus", lambda: host.on_bus)
    monkeypatch.setattr(command, "ask_topology", lambda: host.topology)
    monkeypatch.setattr(command, "measure_bandwidth", host.measure)
    monkeypatch.setattr(command, "probe_tokenizer", lambda config: Probe(facts=TOKENIZER))
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**40))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("tunebook.train.requirements.installed_version", lambda name: "2.13.0")
    return host


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    """`as_json("quickstart", "training.seed=1")`: the exit code and what was printed."""

    def run(recipe: str | None = None, *overrides: str, **options: Any) -> tuple[int, dict[str, Any]]:
        console = Console(file=io.StringIO(), force_terminal=True)
        code = doctor_command(recipe, list(overrides), [], console, as_json=True, **options)
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert set(said) == {"findings", "topology", "bandwidth"}
        for finding in said["findings"]:
            assert set(finding) == {"id", "kind", "level", "what", "fix", "data"}
            assert finding["id"] in all_ids()
        assert code == (2 if any(finding["level"] == "error" for finding in said["findings"]) else 0)
        return code, said

    return run


def levels(said: dict[str, Any]) -> dict[str, str]:
    return {finding["id"]: finding["level"] for finding in said["findings"]}


def test_four_gpus_without_fault(host: Host, as_json: Any) -> None:
    code, said = as_json("qwen3b_zero2", "model.liger_kernel=false")
    assert code == 0, said
    assert host.asked == ["4 nccl"]
    assert said["topology"]["matrix"]["GPU0"]["GPU3"] == "NV18"
    assert said["bandwidth"]["measurements"][0]["bus_gb_per_s"] == 360.0
    advice = next(finding for finding in said["findings"] if finding["id"] == "sharding-advice")
    assert (advice["level"], advice["data"]["advised"], advice["data"]["num_gpus"]) == ("ok", "zero2", 4)
    assert [finding["kind"] for finding in said["findings"]] == sorted(
        (finding["kind"] for finding in said["findings"]),
        key=["gpus", "software", "links", "system", "storage", "recipe", "tokenizer"].index,
    )


def test_a_recipe_that_gathers_over_slow_links_is_told_so(host: Host, as_json: Any) -> None:
    host.bandwidth = measured(12.0)
    code, said = as_json("qwen3b_zero2", "model.liger_kernel=false", "parallelism=zero3")
    assert levels(said)["sharding-advice"] == "warning"
    assert levels(said)["bandwidth"] == "warning"  # for NVLinks that is slow
    assert code == 0


def test_without_a_recipe_the_machine_alone_is_looked_at(host: Host, as_json: Any) -> None:
    _, said = as_json()
    assert {"recipe", "tokenizer", "sharding-advice"} & set(levels(said)) == set()
    assert {"gpus-found", "bandwidth", "topology", "shm-size", "disk-space"} <= set(levels(said))


def test_measuring_can_be_left_out(host: Host, as_json: Any) -> None:
    _, said = as_json(is_measured=False)
    assert (host.asked, said["bandwidth"], "bandwidth" in levels(said)) == ([], None, False)


def test_gpus_that_are_full_are_not_measured(host: Host, as_json: Any) -> None:
    devices = [{"index": index, "problem": None, "free_gib": 0.5} for index in range(4)]
    host.torch = Probe(facts=TORCH | {"devices": devices})
    _, said = as_json()
    assert (host.asked, levels(said)["bandwidth"]) == ([], "warning")


def test_cpu_ranks_are_measured_only_when_asked(host: Host, as_json: Any) -> None:
    host.machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0, notes=["no driver"])
    host.torch = Probe(facts=CPU_TORCH)
    assert as_json()[1]["bandwidth"] is None
    host.bandwidth = measured(0.5, backend="gloo", num_ranks=2)
    _, said = as_json(cpu_ranks=2)
    assert host.asked == ["2 gloo"]
    assert said["bandwidth"]["backend"] == "gloo"


def test_an_nvml_that_hangs_is_not_asked_again(host: Host, as_json: Any) -> None:
    host.nvml, host.machine = Probe(facts=None, problem="no answer within 40 s"), None
    host.torch = Probe(facts=None, problem="no answer within 120 s")
    code, said = as_json("quickstart")
    assert code == 2
    assert levels(said)["driver-silent"] == "error"
    assert levels(said)["torch-import"] == "error"


def test_an_nvidia_smi_that_says_nothing_useful(host: Host, as_json: Any) -> None:
    host.topology = Answer(text="", problem="no answer within 40 s")
    _, said = as_json()
    assert (said["topology"], levels(said)["topology"]) == (None, "warning")
    assert levels(said)["bandwidth"] == "ok"  # measured all the same


def test_nvidia_smi_is_used_without_nvml(host: Host, as_json: Any) -> None:
    host.machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0, notes=["nvidia-ml-py is missing"])
    host.torch = Probe(facts=CPU_TORCH)
    host.listing = Answer(text="GPU 0: NVIDIA H200 (UUID: GPU-1)")
    code, said = as_json()
    assert (code, levels(said)["nvidia-smi"]) == (2, "error")


def test_a_gpu_on_the_bus_whose_driver_does_not_answer(host: Host, as_json: Any) -> None:
    host.machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0, notes=["no NVIDIA driver answers"])
    host.torch = Probe(facts=CPU_TORCH)
    host.listing = Answer(text="", problem=NOT_LOADED)
    code, said = as_json()
    assert (code, levels(said)["gpus-found"]) == (0, "ok")
    host.on_bus = [PciGpu(address="0000:3b:00.0", driver=None)]
    code, said = as_json()
    assert (code, levels(said)["driver-silent"]) == (2, "error")
    assert "gpus-found" not in levels(said)


def test_invalid_configuration_is_one_of_the_findings(host: Host, as_json: Any) -> None:
    code, said = as_json("qwen3b_zeor2")
    assert code == 2
    assert levels(said)["unknown-recipe"] == "error"
    assert levels(said)["gpus-found"] == "ok"


def test_without_a_recipe_or_a_model_the_machine_alone_is_looked_at(host: Host, as_json: Any, tmp_path: Path) -> None:
    code, said = as_json(None, f"outputs={tmp_path}/disk2", "hardware.num_nodes=2")
    assert code == 0
    assert not {finding["kind"] for finding in said["findings"]} & {"recipe", "tokenizer"}
    (space,) = [
        finding for finding in said["findings"] if finding["id"] == "disk-space" and str(tmp_path) in finding["what"]
    ]
    assert f"{tmp_path}/disk2" in space["data"]["folders"]
    code, said = as_json(None, f"outptus={tmp_path}")
    assert (code, levels(said)["unknown-key"]) == (2, "error")
    code, said = as_json(None, "model.name=some-organization/some-model")
    assert (code, levels(said)["batch-one-way"]) == (2, "error")


def test_a_broken_rule_is_a_finding(host: Host, as_json: Any) -> None:
    code, said = as_json("quickstart", "precision=fp16", "hardware=cpu")
    assert code == 2
    broken = [finding for finding in said["findings"] if finding["kind"] == "recipe" and finding["level"] == "error"]
    assert broken and all(finding["fix"] for finding in broken)


def test_invalid_batch_is_one_of_the_findings(host: Host, as_json: Any) -> None:
    words = ("model.liger_kernel=false", "packing=padded", "training.global_samples=7")
    code, said = as_json("qwen3b_zero2", *words)
    assert code == 2
    assert levels(said)["batch-not-divisible"] == "error"
    assert levels(said)["tokenizer"] == "ok"


def test_machines_that_were_not_looked_at_are_named(host: Host, as_json: Any) -> None:
    _, said = as_json("llama2_70b_fsdp")
    (other,) = [finding for finding in said["findings"] if finding["id"] == "other-machines"]
    assert "launcher=slurm starts the ranks on other machines" in other["what"]


def test_table_is_printed_without_json(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert doctor_command(None, [], [], console) == 0
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.startswith("gpus\nok       4 x NVIDIA H200 (140.4 GiB, compute capability 9.0)")
    assert "how the GPUs are connected" in text
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_the_real_thing_on_this_machine(as_json: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = as_json("quickstart", "hardware=cpu")
    assert code == 0, [finding for finding in said["findings"] if finding["level"] != "ok"]
    assert levels(said)["tokenizer-template"] == "ok"
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind
