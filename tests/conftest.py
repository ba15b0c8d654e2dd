"""What every test shares: an environment that no machine's settings reach, and the browser.

The environment is set while this file is imported, because torch, transformers and datasets read it when they are
imported themselves.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",  # a test that reaches for the hub by mistake fails at once, everywhere
        "HF_HOME": str(ROOT / ".cache" / "tests" / "huggingface"),  # and finds nothing that this machine downloaded
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the forks of data set workers
        "COLUMNS": "120",  # messages wrap alike in every terminal
        # DeepSpeed's operators are compiled again where torch or the compiler's command are other ones: in a folder
        # that checkouts share, by each in turn.
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "tests" / "torch_extensions"),
    }
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as inherited from a shell that put the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would every process that a test starts
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: more threads only get in each other's way
for name in [name for name in os.environ if name.startswith("TUNEBOOK_") or name in {"FORCE_COLOR", "CLICOLOR_FORCE"}]:
    del os.environ[name]


def find_chromium() -> str | None:
    """The path of Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `browser` test if there is no browser, except in CI."""
    if item.get_closest_marker("browser") and not find_chromium():
        message = "no Chromium on this machine: apt install chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture
def one_gloo_rank(tmp_path: Path) -> Iterator[None]:
    """A process group with one rank, which is enough to wrap a model."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Fails a test that leaves changes in the global state of torch and accelerate, instead of a later test."""
    before = _left_behind()
    yield
    left = _left_behind() - before
    assert not left, f"this test leaves behind, for all that run after it: {', '.join(sorted(left))}"


def _left_behind() -> set[str]:
    """The changes of global state that have made other tests fail. Imports nothing."""
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


@pytest.fixture(scope="session", autouse=True)
def composes_the_same_words_once() -> Iterator[None]:
    """Hydra takes 0.2 s for a run, which was most of what tests of plans took, and half of them ask for the same.

    Only of the book as it is in the checkout; each test is given a copy. What is refused is composed each time.
    """
    from tunebook.config import compose as module

    compose, composed = module._compose, dict[tuple[str | None, ...], bytes]()

    def once(recipe: str | None, overrides: list[str], recipes_dirs: list[Path]) -> module.Composition:
        if recipes_dirs or {"TUNEBOOK_HOME", "TUNEBOOK_RECIPES"} & os.environ.keys() or module.book_root() != ROOT:
            return compose(recipe, overrides, recipes_dirs)
        words = (recipe, *overrides)
        if words not in composed:
            composed[words] = pickle.dumps(compose(recipe, overrides, recipes_dirs))
        copy: module.Composition = pickle.loads(composed[words])
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_compose", once)
        yield


@pytest.fixture
def own_compiler() -> Iterator[None]:
    """What was compiled, and how torch compiles, ends with the test; a run sets it for its process.

    By torch's own way to change it: pytest's `monkeypatch` would take the setting away altogether.
    """
    from torch import _dynamo, compiler
    from torch._functorch import config as functorch

    defaults = {
        "ban_recompute_materialized_backward": True,
        "ban_recompute_used_far_apart": True,
        "ban_recompute_long_fusible_chains": True,
    }
    with (
        _dynamo.config.patch(optimize_ddp=True),
        compiler.config.patch(dynamic_sources=""),
        functorch.patch(defaults),
    ):
        yield
    _dynamo.reset()


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return ROOT


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
    """How far a tensor is from another one, by their norms, as a share of the other one's.

    Two passes through a library's kernels need not agree in every bit: sums are taken in another order where tensors
    lie otherwise or another machine's kernels are chosen. What then differs is a few roundings in the number format.
    """

    def of(found: torch.Tensor, expected: torch.Tensor) -> float:
        difference = (found.double() - expected.double()).norm() / expected.double().norm()
        return float(difference.detach())

    return of


@pytest.fixture
def same_bits() -> Iterator[None]:
    """A run computes the same bits each time: one thread, whose sums have one order, and deterministic algorithms.

    The same kernel is then given tensors of the same shapes, which torch's allocator aligns alike (to 64 bytes, as MKL
    and oneDNN need to repeat themselves).
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
    """Make a small complete checkpoint: `make_checkpoint(run, step, files={...}, identity=...)`; returns its path."""
    from tunebook.checkpoint.record import CheckpointRecord, FileEntry, Identity
    from tunebook.files import atomic_write_json, sha256_file

    anybody = Identity(
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

    def make(run: Path, step: int, files: Mapping[str, bytes] | None = None, identity: Identity = anybody) -> Path:
        checkpoint = run / "checkpoints" / f"checkpoint-{step}"
        contents = {"trainer_state.json": b"{}", "optimizer.pt": b"state"} if files is None else files
        for name, content in contents.items():
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).write_bytes(content)
        entries = {name: FileEntry(size=len(c), sha256=sha256_file(checkpoint / name)) for name, c in contents.items()}
        record = CheckpointRecord(step=step, saved="", seconds=0, versions={}, identity=identity, files=entries)
        atomic_write_json(checkpoint / "complete.json", record.to_json())
        return checkpoint

    return make


@pytest.fixture
def saves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background saves end before training continues, as on a fast disk."""
    from tunebook.checkpoint import save

    class AtOnce(save.Background):
        def start(self, work: Callable[[], None]) -> None:
            super().start(work)
            assert self._thread is not None
            self._thread.join()

    monkeypatch.setattr(save, "Background", AtOnce)


@pytest.fixture
def saves_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background saves make no progress until they are waited for, as on a slow disk."""
    from tunebook.checkpoint import save

    class WhenWaitedFor(save.Background):
        def start(self, work: Callable[[], None]) -> None:
            self.may_go_on = threading.Event()

            def held() -> None:
                self.may_go_on.wait()
                work()

            super().start(held)

        def wait(self) -> BaseException | None:
            if self._thread is not None:
                self.may_go_on.set()
            return super().wait()

    monkeypatch.setattr(save, "Background", WhenWaitedFor)


@dataclass(frozen=True)
class SmallDisk:
    """A file system of a few MiB, mounted on a folder."""

    folder: Path

    @property
    def free_bytes(self) -> int:
        """The free bytes."""
        return shutil.disk_usage(self.folder).free

    def fill(self, leave_bytes: int) -> Path:
        """Write a file that leaves this many bytes free, in whole pages; returns the file."""
        filler = self.folder / "filler"
        with filler.open("wb") as stream:
            stream.write(bytes(max(0, self.free_bytes - leave_bytes)))
        return filler

    def set_read_only(self, is_read_only: bool) -> None:
        """Make the file system read-only, also for root, or writable again."""
        options = f"remount,{'ro' if is_read_only else 'rw'}"
        subprocess.run(["mount", "-o", options, str(self.folder)], check=True, capture_output=True)


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], SmallDisk]]:
    """Mount a file system: `small_disk(folder, num_bytes)`. Skips the test if that is not allowed."""
    mounted: list[SmallDisk] = []

    def make(folder: Path, num_bytes: int) -> SmallDisk:
        if os.geteuid() != 0:
            pytest.skip("only root can mount a small file system")
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "small", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this machine's root may not mount: {done.stderr.strip()}")
        mounted.append(SmallDisk(folder))
        return mounted[-1]

    yield make
    for disk in mounted:
        subprocess.run(["umount", str(disk.folder)], check=True)


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser, for tests marked `browser`."""
    found = find_chromium()
    assert found, "mark the test `browser`: then it is skipped where there is none"
    return Path(found)


@pytest.fixture(scope="session")
def open_page(chromium: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Open a page, with more of the browser's options; returns its DOM after the page's scripts have run."""

    def dom_of(page: Path, *options: str) -> str:
        quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync")  # fmt: skip
        profile = f"--user-data-dir={tmp_path_factory.mktemp('browser')}"
        command = [str(chromium), *quiet, profile, "--dump-dom", *options, page.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout

    return dom_of
