"""ZeRO's partitions (DeepSpeed 0.19) as whole fp32 tensors, each assembled from the mapped files of all ranks.

The layouts are those of `deepspeed.utils.zero_to_fp32`. Its lazy mode is lazy for stage 3 only: for stages 1 and 2 it
joins the partitions of all ranks in memory, which takes the size of the fp32 weights, and it unpickles without limits.
Here files are loaded with `weights_only`. In addition to tensors they name four classes. Stand-ins replace them, so
that DeepSpeed need not be installed.

Stages 1 and 2: each group of parameters is one flat vector, cut into one piece for each rank. Stage 3: each parameter
is cut into one equal piece for each rank, the last one padded; a rank's pieces follow each other, cut into subgroups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from tunebook.checkpoint.export.source import damaged
from tunebook.checkpoint.export.stored_weights import Mapped, StoredTensor, Weights
from tunebook.checkpoint.unpickling import enum_member

Ranks = list[list["torch.Tensor"]]  # of each rank, its groups or subgroups
# Where a parameter lies: its group (stages 1 and 2), and elements of the joined vector or of each rank's (stage 3).
Place = tuple[int, int, int]  # group, start, length

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")


class _Stage(IntEnum):
    """Stand-in for DeepSpeed's stages, with its names: Python 3.11.2 writes a member by its name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class _Ignored:
    """Stand-in for the other objects in a file, which are neither tensors nor numbers."""


def partitioned_weights(folder: Path) -> Weights:
    """The parameters of a ZeRO checkpoint in their master precision. Raises: RequestError for damaged files."""
    files = _files(folder, "*_optim_states.pt")
    files = sorted(files, key=lambda file: int(match[1]) if (match := _RANK.search(file.name)) else -1)
    model_file = _files(folder, "*mp_rank_00_model_states.pt")[0]
    model = _load(model_file)
    try:
        state = _load(files[0])["optimizer_state_dict"]
        stage = int(state["zero_stage"])
        _require_all_ranks(state["partition_count"], files, folder)
        mapped = Mapped(partial(_load_ranks, files, stage))
        groups: list[dict[str, Any]] = model["param_shapes"]
        lengths = [[piece.numel() for piece in rank] for rank in mapped.for_reading(0)]
        if stage == 3:
            places = _places_in_shares(groups, lengths)
        else:
            places = _places_in_groups(groups, lengths, state.get("param_alignment_paddings"))
        shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        owners = {name: name for name in shapes}
        owners |= {name: other for name, other in model["shared_params"].items() if other in shapes}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damaged(model_file, error) from error
    mapped.close()
    return {
        name: StoredTensor(
            shape=shapes[owner],
            dtype=torch.float32,
            load=partial(_assemble, mapped, places[owner], shapes[owner], is_stage_3=stage == 3),
            files=mapped,
        )
        for name, owner in owners.items()
    }


def _assemble(mapped: Mapped[Ranks], place: Place, shape: tuple[int, ...], *, is_stage_3: bool) -> torch.Tensor:

    group, start, length = place
    count = math.prod(shape)
    ranks = mapped.for_reading(count * 4)
    vectors = ranks if is_stage_3 else [[rank[group] for rank in ranks]]
    pieces = [piece for vector in vectors for piece in _cut(vector, start, length)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat([*pieces, torch.empty(0)])
    return whole[:count].view(shape)


def _cut(pieces: list[torch.Tensor], start: int, length: int) -> Iterator[torch.Tensor]:
    """The elements from a start on, of a vector that is cut into pieces."""
    ends = accumulate(piece.numel() for piece in pieces)
    for piece, end in zip(pieces, ends, strict=True):
        begin = end - piece.numel()
        first, last = max(start, begin), min(start + length, end)
        if first < last:
            yield piece[first - begin : last - begin]


def _places_in_shares(groups: list[dict[str, Any]], lengths: list[list[int]]) -> dict[str, Place]:
    """Stage 3. Raises: ValueError if a rank's partition is not as long as the parameters need."""
    start = 0
    places = {}
    for name, shape in (item for group in groups for item in group.items()):
        length = math.ceil(math.prod(shape) / len(lengths))
        places[name] = (0, start, length)
        start += length
    for rank, held in enumerate(lengths):
        if sum(held) != start:
            raise ValueError(f"rank {rank} holds {sum(held):,} numbers of the parameters, which are {start:,} per rank")
    return places


def _places_in_groups(
    groups: list[dict[str, Any]], lengths: list[list[int]], paddings: list[list[int]] | None
) -> dict[str, Place]:
    """Stages 1 and 2. Raises: ValueError if a group's partitions are not as long as its parameters need."""
    places = {}
    for number, group in enumerate(groups):
        start = 0
        between = paddings[number] if paddings is not None else [0] * len(group)
        for (name, shape), padding in zip(group.items(), between, strict=True):
            places[name] = (number, start, math.prod(shape))
            start += math.prod(shape) + padding
        held, aligned = sum(rank[number] for rank in lengths), 2 * len(lengths)
        # The end is padded to a multiple of twice the ranks; by how much exactly, only the optimizer knew.
        if math.ceil(start / aligned) != math.ceil(held / aligned):
            raise ValueError(f"group {number} holds {held:,} numbers of parameters that have {start:,}")
    return places


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if not found:
        raise damaged(folder, f"there is no {pattern}")
    return found


def _require_all_ranks(count: int | list[int], files: list[Path], folder: Path) -> None:
    ranks = max(count) if isinstance(count, list) else count
    if ranks != len(files):
        raise damaged(folder, f"{ranks} ranks wrote it and the files of {len(files)} are there")


def _load_ranks(files: list[Path], stage: int) -> Ranks:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return [_load(file)["optimizer_state_dict"][key] for file in files]


def _load(file: Path) -> dict[str, Any]:
    """A file with its tensors mapped. Raises: RequestError for a damaged file, or one that names any other class."""
    known: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
        (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
        (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
        (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
        (enum_member, "builtins.getattr"),
    ]
    try:
        with torch.serialization.safe_globals(known):
            content: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zip and pickle each have their own errors
        raise damaged(file, error) from error
    return content
