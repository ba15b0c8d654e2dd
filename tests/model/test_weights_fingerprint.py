"""The fingerprint of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.model import weights_fingerprint as module
from tunebook.model.weights_fingerprint import weights_fingerprint

Arrays = dict[str, np.ndarray]
LARGE = 3 * 2**20  # bytes: more than is read whole


@pytest.fixture
def arrays() -> Arrays:
    """A tensor that is read in blocks and one that is read whole."""
    numbers = np.random.default_rng(0)
    return {
        "large": numbers.standard_normal(LARGE // 4).astype(np.float32).reshape(-1, 64),
        "norm": numbers.standard_normal(64).astype(np.float32),
    }


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Arrays], str]:
    """The fingerprint of a folder with these weights in one file."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))

    def make(arrays: Arrays) -> str:
        (tmp_path / "model").mkdir(exist_ok=True)
        save_file(arrays, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        fingerprint = weights_fingerprint(ModelConfig(path=str(tmp_path / "model")))
        assert fingerprint is not None and len(fingerprint) == 64
        return fingerprint

    return make


def test_fingerprint_does_not_depend_on_the_folder(found: Callable[[Arrays], str], arrays: Arrays) -> None:
    assert found(arrays) == found({name: array.copy() for name, array in reversed(arrays.items())})


def test_trained_weights_have_another_fingerprint(found: Callable[[Arrays], str], arrays: Arrays) -> None:
    trained = arrays["large"] + np.float32(1e-3)
    assert found(arrays) != found(arrays | {"large": trained})


@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_number_is_detected(found: Callable[[Arrays], str], arrays: Arrays, place: int) -> None:
    before = found(arrays)
    for name in arrays:
        changed = arrays[name].copy()
        changed.flat[place] += 1
        assert found(arrays | {name: changed}) != before


def test_names_shapes_and_formats_count(found: Callable[[Arrays], str], arrays: Arrays) -> None:
    renamed = {"weight" if name == "norm" else name: array for name, array in arrays.items()}
    folded = arrays | {"norm": arrays["norm"].reshape(8, 8)}
    cast = arrays | {"norm": arrays["norm"].view(np.int32)}
    assert len({found(one) for one in (arrays, renamed, folded, cast)}) == 4


def test_fingerprint_does_not_depend_on_the_division_into_files(
    found: Callable[[Arrays], str], arrays: Arrays, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    places = {}
    for number, (name, array) in enumerate(arrays.items()):
        save_file({name: array}, parts / f"model-{number}.safetensors")
        places[name] = f"model-{number}.safetensors"
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert weights_fingerprint(ModelConfig(path=str(parts))) == found(arrays)


def test_of_a_large_tensor_blocks_from_its_first_byte_to_its_last_are_read() -> None:
    assert list(module._blocks(100, 100 + 2**20)) == [(100, 2**20)]
    blocks = list(module._blocks(100, 100 + 200 * 2**20))
    assert len(blocks) == 100
    assert (blocks[0][0], sum(blocks[-1])) == (100, 100 + 200 * 2**20)
    steps = [later[0] - one[0] for one, later in pairwise(blocks)]
    assert max(steps) - min(steps) <= 1
    assert len(list(module._blocks(0, 2**20 + 1))) == 4


def test_no_fingerprint_for_random_and_hub_weights(tmp_path: Path) -> None:
    assert weights_fingerprint(ModelConfig(name="org/model")) is None
    assert weights_fingerprint(ModelConfig(path=str(tmp_path))) is None
    (tmp_path / "model.safetensors").write_bytes(b"not looked at")
    assert weights_fingerprint(ModelConfig(path=str(tmp_path), weights=Weights.random)) is None


@pytest.mark.parametrize("cut", [-1, 4])
def test_a_file_that_was_cut_off_is_named(
    found: Callable[[Arrays], str], arrays: Arrays, tmp_path: Path, cut: int
) -> None:
    found(arrays)
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(RequestError, match=r"model\.safetensors"):
        weights_fingerprint(ModelConfig(path=str(tmp_path / "model")))
