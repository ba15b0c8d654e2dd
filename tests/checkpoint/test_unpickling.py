"""Loading runs no code that somebody has put into a checkpoint's pickles, whatever reads them and however it asks."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_sharded
from torch.distributed.checkpoint import save as save_sharded
from transformers.trainer_pt_utils import safe_globals

from tunebook.checkpoint.unpickling import load_list, restricted_unpickling
from tunebook.errors import DataError

no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder in which code of a pickle would leave a file."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "ran").exists()


class Runs:
    """Runs a program when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


EVIL = {
    "os.system": Runs(os.system, "touch ran"),
    "subprocess": Runs(subprocess.check_call, ["touch", "ran"]),
    "eval": Runs(eval, "open('ran', 'w')"),
    "a method": Runs(Path.touch, Path("ran")),
    "exec": Runs(exec, "open('ran', 'w')"),
    "getattr": Runs(getattr, Runs, "__init__"),
    "getattr of an instance": Runs(getattr, 1, "bit_length"),
}


def zipped(content: Any, protocol: int = 2) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, pickle_protocol=protocol)
    return stream.getvalue()


def in_old_format(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


FORMATS: dict[str, Callable[[Any], bytes]] = {
    "torch": zipped,
    "torch, another protocol": lambda content: zipped(content, protocol=4),
    "torch before 1.6": in_old_format,
    "plain pickle": pickle.dumps,
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("attack", EVIL)
def test_torch_runs_nothing_though_it_was_asked_to(tmp_path: Path, form: str, attack: str) -> None:
    """As DeepSpeed asks: weights_only=False."""
    file = tmp_path / "mp_rank_00_model_states.pt"
    file.write_bytes(FORMATS[form]({"module": {"weight": torch.ones(2)}, "evil": EVIL[attack]}))
    with restricted_unpickling(), pytest.raises(DataError) as caught:
        torch.load(file, map_location="cpu", weights_only=False)
    assert (caught.value.exit_code, caught.value.problem_id) == (4, "checkpoint-unsafe")
    assert caught.value.message.startswith(f"{file} ")
    assert "nothing of it was run" in caught.value.message
    assert "training.resume=never" in caught.value.message


def test_without_it_the_same_file_would_run(tmp_path: Path) -> None:
    """What the tests above would not see if the file were harmless."""
    (tmp_path / "evil.pt").write_bytes(zipped(EVIL["os.system"]))
    torch.load(tmp_path / "evil.pt", weights_only=False)
    (tmp_path / "ran").unlink()


def test_deepspeeds_own_loader_gets_its_states_and_runs_nothing(tmp_path: Path) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    states = {
        "loss_scaler": LossScaler(scale=1.0),
        "dynamic_loss_scaler": DynamicLossScaler(2**16, 2.0, 1000, 1, 1),
        "zero_stage": ZeroStageEnum(2),
        "as_python_3_11_2_writes_it": Runs(getattr, ZeroStageEnum, "gradients"),
        "param_slice_mappings": [{"weight": fragment_address(numel=4, start=2)}],
        "fp32": torch.arange(4.0),
    }
    (tmp_path / "good.pt").write_bytes(zipped(states))
    (tmp_path / "evil.pt").write_bytes(zipped(states | {"evil": EVIL["os.system"]}))
    engine = TorchCheckpointEngine()
    with restricted_unpickling():
        found = engine.load(str(tmp_path / "good.pt"), map_location="cpu")
        with pytest.raises(DataError, match=r"evil\.pt holds something"):
            engine.load(str(tmp_path / "evil.pt"), map_location="cpu")
    assert (found["zero_stage"], found["loss_scaler"].cur_scale) == (ZeroStageEnum(2), 1.0)
    assert found["as_python_3_11_2_writes_it"] is ZeroStageEnum.gradients
    assert found["dynamic_loss_scaler"].cur_scale == 2**16
    assert found["param_slice_mappings"] == states["param_slice_mappings"]
    assert torch.equal(found["fp32"], states["fp32"])


def test_the_trainers_random_numbers_are_loaded_as_before(tmp_path: Path) -> None:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, tmp_path / "rng_state.pth")
    with restricted_unpickling(), safe_globals():
        found = torch.load(tmp_path / "rng_state.pth", weights_only=True)
    assert found["python"] == states["python"]
    assert (found["numpy"][1] == states["numpy"][1]).all()
    assert torch.equal(found["cpu"], states["cpu"])


SHARDED = {"weight": torch.arange(6.0), "lr": 0.5, "betas": (0.9, 0.99), "name": "adamw", "nothing": None}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of torch.distributed.checkpoint, with values beside the tensor as an optimizer has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save_sharded(dict(SHARDED), storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def loaded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(SHARDED, "not loaded") | {"weight": torch.zeros(6)}
    load_sharded(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return found


@no_group
def test_a_sharded_checkpoint_is_loaded_and_another_saved_meanwhile(sharded: Path) -> None:
    with restricted_unpickling():
        found = loaded(sharded)
        save_sharded(found, storage_writer=FileSystemWriter(sharded.with_name("again")), no_dist=True)
    assert torch.equal(found.pop("weight"), SHARDED["weight"])
    assert found == {name: value for name, value in SHARDED.items() if name != "weight"}
    assert (sharded.with_name("again") / ".metadata").is_file()


@no_group
@pytest.mark.parametrize("attack", EVIL)
def test_its_list_runs_nothing(sharded: Path, attack: str) -> None:
    (sharded / ".metadata").write_bytes(pickle.dumps(EVIL[attack]))
    with (
        pytest.raises(DataError, match=r"\.metadata holds .*nothing of it was run") as caught,
        restricted_unpickling(),
    ):
        loaded(sharded)
    assert caught.value.problem_id == "checkpoint-unsafe"


def test_a_format_in_a_list_is_read_as_python_3_11_2_writes_it() -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert load_list(io.BytesIO(pickle.dumps(Runs(getattr, _MEM_FORMAT_ENCODING, member.name)))) is member


@no_group
def test_nor_does_a_value_beside_the_tensors(sharded: Path, tmp_path: Path) -> None:
    """Values are in the shards' files, each saved by torch.save; the list says where and how long they are."""
    evil = {**SHARDED, "name": EVIL["os.system"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save_sharded(evil, storage_writer=FileSystemWriter(tmp_path / "evil"), no_dist=True)
    with (
        pytest.raises(DataError, match=r"a \.distcp file holds something"),
        restricted_unpickling(),
    ):
        loaded(tmp_path / "evil")


def test_afterwards_all_is_as_it_was() -> None:
    from torch.distributed.checkpoint import filesystem

    before = torch.load, filesystem.pickle, torch.serialization.get_safe_globals()
    with pytest.raises(ZeroDivisionError), restricted_unpickling():
        raise ZeroDivisionError
    assert (torch.load, filesystem.pickle, torch.serialization.get_safe_globals()) == before
