"""Fixtures that several packages of tests use, and an environment without settings of this machine.

The environment is set on import of this file: torch, transformers and datasets read it when they are imported.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tunebook.config.schema import RunConfig

ROOT = Path(__file__).resolve().parent.parent

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",  # a test that asks the hub by mistake fails at once
        "HF_HOME": str(ROOT / ".cache" / "tests" / "huggingface"),  # and finds no downloads of this machine
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork
        "COLUMNS": "120",  # messages wrap at the same place in every terminal
        # A folder of this checkout: DeepSpeed compiles its operators again when torch or the compiler's command change.
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "tests" / "torch_extensions"),
    }
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited from a shell that runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and processes inherit that
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads are slower for tiny tensors
for name in [name for name in os.environ if name.startswith("TUNEBOOK_") or name in {"FORCE_COLOR", "CLICOLOR_FORCE"}]:
    del os.environ[name]
# What was measured on this machine (`tunebook plan --measure`) would change what a test plans.
os.environ["TUNEBOOK_CACHE"] = str(ROOT / ".cache" / "tests" / "tunebook")


def find_chromium() -> str | None:
    """The path of Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def config_of(recipe: str, *overrides: str) -> RunConfig:
    """A recipe as it is resolved on a machine without a GPU."""
    from tunebook.config.compose import compose
    from tunebook.hardware.detect import Machine
    from tunebook.plan.auto.resolve import resolve_auto

    machine = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
    return resolve_auto(compose(recipe, list(overrides)).config, machine).config


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What a condition returns as soon as that is true."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)
    return found


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `browser` test if there is no browser; in CI it fails instead."""
    if item.get_closest_marker("browser") and not find_chromium():
        message = "no Chromium on this machine: apt install chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def pytest_runtest_logfinish() -> None:
    """Keep all objects out of later collections of garbage, as a rank does, once there was one of all objects.

    Each training in this process collects all garbage. With the objects of torch, transformers, trl and deepspeed, a
    million, that takes 0.2 to 0.4 s, which was more than a third of the time of the tests of trainings.
    """
    if gc.get_stats()[2]["collections"] > _num_collections[0]:
        gc.collect()
        gc.freeze()
        _num_collections[0] = gc.get_stats()[2]["collections"]


_num_collections = [0]


@pytest.fixture
def one_gloo_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank, which is enough to wrap a model."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail a test that leaves process-wide state of torch or accelerate changed; otherwise a later test would fail."""
    before = _left_behind()
    yield
    left = _left_behind() - before
    assert not left, f"this test leaves process-wide state for later tests: {', '.join(sorted(left))}"


def _left_behind() -> set[str]:
    """Process-wide state that differs from that of a new process. Imports nothing."""
    found = {f"the variable {name}" for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))}
    for module, name, value in (("torch._dynamo", "optimize_ddp", True), ("torch.compiler", "dynamic_sources", "")):
        settings = sys.modules.get(f"{module}.config")
        if settings is not None and getattr(settings, name, None) != value:
            found.add(f"{module}.config.{name}")
    torch = sys.modules.get("torch")
    if torch is None:
        return found
    if torch.distributed.is_initialized():
        found.add("a process group")
    if torch.get_default_dtype() is not torch.float32 or torch.get_default_device().type != "cpu":
        found.add("a default of torch's tensors")
    return found


@pytest.fixture
def own_compiler() -> Iterator[None]:
    """Discard compiled code and restore torch's compiler settings after the test; a run sets them for its process."""
    from torch import _dynamo

    from tunebook.facts.compiling import keeping_compiler_settings

    with keeping_compiler_settings():
        yield
    _dynamo.reset()


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """Import a file that is in no package, such as a recipe's script."""

    def load(file: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The quickstart's tokenizer."""
    from tunebook.config.schema import ModelConfig
    from tunebook.model.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(path="book:recipes/quickstart/model"))


@pytest.fixture(scope="session")
def small_qwen2() -> Callable[..., PreTrainedModel]:
    """Make a Qwen2 of a few thousand weights, always the same: `small_qwen2(num_hidden_layers=3)`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    usual = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip

    def make(**sizes: int | None) -> PreTrainedModel:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **(usual | sizes)))
        return model

    return make


@pytest.fixture(scope="session")
def relative_difference() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """The norm of the difference of two tensors, relative to the norm of the second.

    Two passes need not agree in every bit: the order of sums depends on the layout of tensors and on the kernels that a
    machine chooses. The difference is a few roundings in the number format.
    """

    def of(found: torch.Tensor, expected: torch.Tensor) -> float:
        difference = (found.double() - expected.double()).norm() / expected.double().norm()
        return float(difference.detach())

    return of


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Make runs repeat bit for bit: one thread, so that sums have one order, and deterministic algorithms.

    Kernels then get tensors of the same shapes and alignment (64 bytes, which MKL and oneDNN need to repeat results).
    """
    import torch

    threads, was_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """Make a small complete checkpoint and return its path: `make_checkpoint(run, step, files={...}, identity=...)`."""
    from tunebook.checkpoint.record import CheckpointRecord, FileEntry, Identity
    from tunebook.files import atomic_write_json, sha256_file

    usual = Identity(
        strategy="single",
        peft="full",
        world_size=1,
        model={"name": "m", "revision": None, "config_sha256": None, "weights": "pretrained"},
        config_sha256="0" * 64,
        settings={},
        data_sha256="0" * 64,
        tokenizer_sha256=None,
        chat_template_sha256=None,
    )

    def make(run: Path, step: int, files: Mapping[str, bytes] | None = None, identity: Identity = usual) -> Path:
        checkpoint = run / "checkpoints" / f"checkpoint-{step}"
        contents = {"trainer_state.json": b"{}", "optimizer.pt": b"state"} if files is None else files
        for name, content in contents.items():
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).write_bytes(content)
        entries = {name: FileEntry(size=len(c), sha256=sha256_file(checkpoint / name)) for name, c in contents.items()}
        record = CheckpointRecord(step=step, saved="", seconds=0, versions={}, identity=identity, files=entries)
        atomic_write_json(checkpoint / "complete.json", asdict(record))
        return checkpoint

    return make


@pytest.fixture
def saves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background saves complete before training continues, as on a fast disk."""
    from tunebook.checkpoint import save

    class AtOnce(save.Background):
        def __init__(self, work: Callable[[], None]) -> None:
            super().__init__(work)
            self.join()

    monkeypatch.setattr(save, "Background", AtOnce)


@pytest.fixture
def saves_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background saves make no progress until the trainer waits for them, as on a slow disk."""
    from tunebook.checkpoint import save

    class WhenWaitedFor(save.Background):
        def __init__(self, work: Callable[[], None]) -> None:
            self.is_wanted = threading.Event()

            def held() -> None:
                self.is_wanted.wait()
                work()

            super().__init__(held)

        def wait(self) -> BaseException | None:
            self.is_wanted.set()
            return super().wait()

    monkeypatch.setattr(save, "Background", WhenWaitedFor)


@dataclass(frozen=True)
class SmallDisk:
    """A file system of a few MiB, mounted on a folder."""

    folder: Path

    @property
    def free_bytes(self) -> int:
        """Free space."""
        return shutil.disk_usage(self.folder).free

    def fill(self, leave_bytes: int) -> Path:
        """Write a file that leaves `leave_bytes` free, rounded to pages, and return it."""
        filler = self.folder / "filler"
        with filler.open("wb") as stream:
            stream.write(bytes(max(0, self.free_bytes - leave_bytes)))
        return filler

    def set_read_only(self, is_read_only: bool) -> None:
        """Forbid writes, also by root, or allow them again."""
        options = f"remount,{'ro' if is_read_only else 'rw'}"
        subprocess.run(["mount", "-o", options, str(self.folder)], check=True, capture_output=True)


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], SmallDisk]]:
    """Mount a small file system: `small_disk(folder, num_bytes)`. Skips the test if mounting is not allowed."""
    mounted: list[SmallDisk] = []

    def make(folder: Path, num_bytes: int) -> SmallDisk:
        if os.geteuid() != 0:
            pytest.skip("only root can mount a small file system")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "small", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"root may not mount file systems here: {done.stderr.strip()}")
        mounted.append(SmallDisk(folder))
        return mounted[-1]

    yield make
    for disk in mounted:
        subprocess.run(["umount", str(disk.folder)], check=True)


@pytest.fixture(scope="session")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Open a page in the browser, with more options, and return its DOM after its scripts have run."""

    chromium = find_chromium()
    assert chromium, "mark the test `browser`, which skips it without a browser"

    def dom_of(page: Path, *options: str) -> str:
        quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync")  # fmt: skip
        profile = f"--user-data-dir={tmp_path_factory.mktemp('browser')}"
        command = [chromium, *quiet, profile, "--dump-dom", *options, page.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout

    return dom_of
