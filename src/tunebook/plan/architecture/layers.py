"""The kinds of a model's decoder layers, and configs of models with some of the layers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn
from transformers.integrations import moe
from transformers.utils.logging import get_verbosity, set_verbosity

_SHARING = "num_kv_shared_layers"  # config key: the number of layers that share keys and values with earlier ones
_WITHOUT_EXPERTS = "mlp_only_layers"  # config key: a list of places of layers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, and use a product of experts that can be computed anywhere, also without memory."""
    verbosity = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            mock.patch.object(moe, "_can_use_grouped_mm", lambda *_: False),
        ):
            yield
    finally:
        set_verbosity(verbosity)


def text_decoder(model: Any) -> Any:
    """The part of a causal language model that processes text, without any image tower."""
    has_towers = model.config.get_text_config(decoder=True) is not model.config
    return model.get_decoder() if has_towers else model.base_model


def decoder_layers(decoder: Any, expected: int) -> nn.ModuleList:
    """The list of decoder layers: the first with the length in the config, else the one with most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    exact = [each for each in lists if len(each) == expected]
    return exact[0] if exact else max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))


def kinds_of(config: Any, layers: nn.ModuleList) -> list[tuple[Any, ...]]:
    """The kind of each layer: its values in the config's lists, whether it shares keys and values, and its shapes."""
    text = config.get_text_config(decoder=True)
    lists = _lists(text).values()
    stated = [(repr([values[place] for values in lists]), shares) for place, shares in enumerate(_sharing(text))]
    shapes = (tuple(tuple(parameter.shape) for parameter in layer.parameters()) for layer in layers)
    return list(itertools.zip_longest(stated[: len(layers)], shapes))


def shortened(config: Any, places: list[int]) -> Any:
    """The config of a model with these layers."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    for name, values in _lists(text).items():
        setattr(text, name, [values[place] for place in places])
    if without := getattr(text, _WITHOUT_EXPERTS, None):
        setattr(text, _WITHOUT_EXPERTS, [index for index, place in enumerate(places) if place in without])
    if _SHARING in vars(text):
        setattr(text, _SHARING, sum(shares for place, shares in enumerate(_sharing(text)) if place in places))
    own = text.to_dict().get("per_layer_config") or {}  # sizes of some layers, by place
    text.num_hidden_layers = len(places)
    if own:
        of = {int(place): sizes for place, sizes in own.items()}
        text.per_layer_config = {index: of[place] for index, place in enumerate(places) if place in of}
    return shorter


def _lists(text: Any) -> dict[str, list[Any]]:
    """The lists in a config that say something about each layer, such as `layer_types` or `no_rope_layers`."""
    number = text.num_hidden_layers
    stated = sorted(vars(text).items())
    return {name: value for name, value in stated if isinstance(value, list) and len(value) == number}


def _sharing(text: Any) -> list[bool]:
    """Whether each layer takes the keys and values of an earlier one, as the last ones of some models do."""
    number = text.num_hidden_layers
    return [place >= number - (getattr(text, _SHARING, None) or 0) for place in range(number)]
