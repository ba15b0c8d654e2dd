"""ZeRO's partitions (DeepSpeed 0.19) as whole fp32 tensors, put together one by one from the mapped files of all ranks.

`deepspeed.utils.zero_to_fp32` does the same, but joins all partitions of stages 1 and 2 in memory and unpickles without
limits; the layouts are its. The files are loaded with `weights_only`: besides tensors they name four classes, of which
nothing is needed here, and stand-ins take their place, so DeepSpeed need not be installed.

Stages 1 and 2: each group of parameters is one flat vector, cut into as many pieces as ranks. Stage 3: each parameter
is cut into equal pieces, the last one padded, and every rank's pieces follow each other, cut again into subgroups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.checkpoint.export.formats import damaged
from tunebook.model.weight_files import Shapes

if TYPE_CHECKING:
    import torch

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")


class _Ignored:
    """In place of what a file holds besides tensors and numbers."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a parameter lies: `start` and `length` count elements of each rank's (stage 3) or of the joined vector."""

    group: int
    start: int
    length: int


class PartitionedWeights:
    """The parameters of a ZeRO checkpoint in their master precision."""

    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        import torch

        self._folder = folder
        self._files = _rank_files(folder)
        model_file = _model_files(folder)[0]
        model = _load(model_file)
        states = [_load(file)["optimizer_state_dict"] for file in self._files]
        try:
            self._stage = int(states[0]["zero_stage"])
            _require_all_ranks(states[0]["partition_count"], self._files, folder)
            groups: list[dict[str, Any]] = model["param_shapes"]
            lengths = [[piece.numel() for piece in self._pieces(state)] for state in states]
            self._places = _places(groups, lengths, states[0], self._stage)
            self.shapes: Shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
            self._tied = {name: other for name, other in model["shared_params"].items() if other in self.shapes}
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise damaged(model_file, error) from error
        self.shapes |= {name: self.shapes[other] for name, other in self._tied.items()}
        self.dtypes: dict[str, torch.dtype] = dict.fromkeys(self.shapes, torch.float32)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the parameters, one at a time."""
        ranks = [self._pieces(_load(file)["optimizer_state_dict"]) for file in self._files]
        for name in names:
            place = self._places[self._tied.get(name, name)]
            pieces = _stage_3(ranks, place) if self._stage == 3 else _stage_1_or_2(ranks, place)
            yield name, _joined(pieces)[: math.prod(self.shapes[name])].view(self.shapes[name])

    def _pieces(self, state: dict[str, Any]) -> list[torch.Tensor]:
        """What one rank holds, in order."""
        found: list[torch.Tensor] = state["fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"]
        return found


def _places(
    groups: list[dict[str, Any]], lengths: list[list[int]], state: dict[str, Any], stage: int
) -> dict[str, _Place]:
    """Each parameter's place. Raises: ValueError where the partitions are not as long as the parameters need."""
    if stage == 3:
        return _places_in_shares(groups, lengths)
    return _places_in_groups(groups, lengths, state.get("param_alignment_paddings"))


def _places_in_shares(groups: list[dict[str, Any]], lengths: list[list[int]]) -> dict[str, _Place]:
    num_ranks, start = len(lengths), 0
    places = {}
    for name, shape in (item for group in groups for item in group.items()):
        length = math.ceil(math.prod(shape) / num_ranks)
        places[name] = _Place(group=0, start=start, length=length)
        start += length
    for rank, held in enumerate(lengths):
        if sum(held) != start:
            raise ValueError(f"rank {rank} holds {sum(held):,} numbers of the parameters, which are {start:,} per rank")
    return places


def _places_in_groups(
    groups: list[dict[str, Any]], lengths: list[list[int]], paddings: list[list[int]] | None
) -> dict[str, _Place]:
    places = {}
    for number, group in enumerate(groups):
        start = 0
        between = paddings[number] if paddings is not None else [0] * len(group)
        for (name, shape), padding in zip(group.items(), between, strict=True):
            places[name] = _Place(group=number, start=start, length=math.prod(shape))
            start += math.prod(shape) + padding
        held, aligned = sum(rank[number] for rank in lengths), 2 * len(lengths)
        # The end is padded to a multiple of twice the ranks; by how much exactly, only the optimizer knew.
        if math.ceil(start / aligned) != math.ceil(held / aligned):
            raise ValueError(f"group {number} holds {held:,} numbers of parameters that have {start:,}")
    return places


def _stage_1_or_2(ranks: list[list[torch.Tensor]], place: _Place) -> Iterator[torch.Tensor]:
    yield from _cut([rank[place.group] for rank in ranks], place)


def _stage_3(ranks: list[list[torch.Tensor]], place: _Place) -> Iterator[torch.Tensor]:
    for subgroups in ranks:
        yield from _cut(subgroups, place)


def _cut(pieces: list[torch.Tensor], place: _Place) -> Iterator[torch.Tensor]:
    """What of pieces that follow each other lies between a start and an end."""
    ends = list(accumulate(piece.numel() for piece in pieces))
    for piece, end in zip(pieces, ends, strict=True):
        begin = end - piece.numel()
        first, last = max(place.start, begin), min(place.start + place.length, end)
        if first < last:
            yield piece[first - begin : last - begin]


def _joined(pieces: Iterator[torch.Tensor]) -> torch.Tensor:
    import torch

    found = list(pieces)
    return found[0] if len(found) == 1 else torch.cat([*found, torch.empty(0)])


def _rank_files(folder: Path) -> list[Path]:
    found = {int(match[1]): file for file in folder.iterdir() if (match := _RANK.search(file.name))}
    if not found:
        raise damaged(folder, "no rank's *_optim_states.pt is there")
    return [found[rank] for rank in sorted(found)]


def _model_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not found:
        raise damaged(folder, "no *_model_states.pt is there")
    return found


def _require_all_ranks(count: int | list[int], files: list[Path], folder: Path) -> None:
    ranks = max(count) if isinstance(count, list) else count
    if ranks != len(files):
        raise damaged(folder, f"{ranks} ranks wrote it and the files of {len(files)} are there")


def _load(file: Path) -> dict[str, Any]:
    """A file with its tensors mapped. Raises: RequestError for one that is damaged or names any other class."""
    import torch

    known: list[Any] = [
        (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
        (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
        (_Ignored, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
        (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    ]
    try:
        with torch.serialization.safe_globals(known):
            content: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch, zip and pickle each have their own
        raise damaged(file, error) from error
    return content
