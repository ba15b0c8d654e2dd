"""Random weights of a model, drawn on all cores: the same ones from a seed, whatever the number of cores.

One stream of random numbers takes 30 s for 3B weights, and is torch's only way on a CPU. Here every piece of a tensor
has a stream of its own. Which tensor gets which distribution stays the model's own `_init_weights`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from numpy.random import SeedSequence
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE = 2**20  # elements; a constant, since it decides which stream a weight comes from


def draw_weights(model: PreTrainedModel, seed: int, num_threads: int | None = None) -> None:
    """Initialize a model whose weights are fp32 on the CPU and not written yet, by its own rules, in place.

    `num_threads`: all cores of this process if None. Distributions other than the normal one come from torch's
    generator, which is seeded here, too. Of a tied pair the head's draw is what stays, a padding token's row as well,
    which the library would leave at zero.
    """
    torch.manual_seed(seed)
    with ThreadPoolExecutor(num_threads or len(os.sched_getaffinity(0))) as pool, _NormalsInPieces(seed, pool):
        model.initialize_weights()  # type: ignore[no-untyped-call]
    model.tie_weights()


class _NormalsInPieces(TorchFunctionMode):
    """While it is entered, `torch.nn.init.normal_` and `Tensor.normal_` fill fp32 tensors of the CPU piece by piece."""

    def __init__(self, seed: int, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._pool = pool
        self._streams = (SeedSequence(seed, spawn_key=(number,)) for number in itertools.count())

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.nn.init.normal_, torch.Tensor.normal_):
            return self._normal(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _normal(
        self, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        room = tensor.detach()
        if generator is not None or tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            room.normal_(mean, std, generator=generator)
            return tensor
        pieces = torch.split(room.view(-1), _PIECE)
        list(self._pool.map(_fill, pieces, self._streams, itertools.repeat(mean), itertools.repeat(std)))
        return tensor


def _fill(piece: torch.Tensor, stream: SeedSequence, mean: float, std: float) -> None:
    generator = torch.Generator().manual_seed(int(stream.generate_state(1)[0]))  # torch takes 32 bits of a seed
    piece.normal_(mean, std, generator=generator)
