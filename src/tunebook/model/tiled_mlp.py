"""Compute the MLPs of a model in tiles of a row's tokens.

The inner numbers of an MLP are several times as wide as its input: of a long row they are most of what a layer needs
when it is recomputed. An MLP computes each token alone, so a tile at a time gives the same result. Each tile goes
through torch's checkpointing: its inner numbers are dropped, and computed again when the backward pass comes to it.

Not Liger's tiled MLP (0.8.5): its backward pass runs autograd's own backward for every tile, so the gradient of a
weight arrives once for each tile. DDP, ZeRO and FSDP would send it to the other ranks when the first tile is done.
Here autograd adds up the tiles before any hook of a parameter is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tunebook.errors import RequestError
from tunebook.model.blocks import text_blocks
from tunebook.model.parameters import MLP_INPUT_LAYERS, MLP_OUTPUT_LAYERS


def tile_mlps(model: nn.Module, tile_tokens: int) -> int:
    """Make the MLP of every transformer block compute this many tokens at a time; returns the number of MLPs.

    Raises: RequestError if a block has none, such as one that sends tokens to experts.
    """
    blocks = text_blocks(model)
    by_block = {name: list(mlps_of(block)) for name, block in blocks.items()}
    if without := [name for name, mlps in by_block.items() if not mlps] or ([] if blocks else [type(model).__name__]):
        raise RequestError(
            f"activation.mlp_tile_tokens={tile_tokens}: {without[0]} has no MLP that computes each token alone; "
            "try activation.mlp_tile_tokens=null",
            problem_id="mlp-not-tiled",
        )
    every_mlp = [mlp for mlps in by_block.values() for mlp in mlps]
    for mlp in every_mlp:
        mlp.forward = _InTiles(mlp.forward, tile_tokens)
    return len(every_mlp)


def mlps_of(block: nn.Module) -> Iterator[Any]:
    """The parts of a block that are an MLP: a linear layer to the inner numbers, and one back.

    Not those that also take the sum between the layers, as Bloom's.
    """
    for part in block.children():
        names = {name for name, _ in part.named_children()}
        parameters = signature(type(part).forward).parameters.values()
        required = [parameter for parameter in parameters if parameter.default is parameter.empty]
        if names & MLP_INPUT_LAYERS and names & MLP_OUTPUT_LAYERS and len(required) == 2:
            yield part


class _InTiles:
    """The forward pass of an MLP over one tile after the other."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], tile_tokens: int) -> None:
        self._forward, self._tile_tokens = forward, tile_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, T, H) of any batch; the result has the same shape."""
        tokens = hidden.flatten(0, -2)[None]
        if tokens.shape[1] <= self._tile_tokens:
            return self._forward(hidden)
        split = torch.split(tokens, self._tile_tokens, dim=1)
        tiles = [checkpoint(self._forward, tile, use_reentrant=False) for tile in split]
        return torch.cat(tiles, dim=1).view_as(hidden)
