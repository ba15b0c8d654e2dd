"""The kinds of a model's decoder layers, and configs of models with some of the layers."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

_SHARING = "num_kv_shared_layers"  # the key of configs for layers that share keys and values
_MAX_LAYERS = 12  # most layers that are traced
# The keys of configs that list the places of layers of a kind. Llama 4's and Zamba2's follow from others when a config
# is made, and are not made again.
_PLACES = ("attn_layer_indices", "hybrid_layer_ids", "local_layer_ids", "mlp_only_layers", "moe_layers")


def text_decoder(model: Any) -> Any:
    """The part of a causal language model that processes text, without any image tower."""
    has_towers = model.config.get_text_config(decoder=True) is not model.config
    return model.get_decoder() if has_towers else model.base_model


def decoder_layers(decoder: Any, expected: int) -> nn.ModuleList:
    """The list of decoder layers: the first with the length in the config, else the one with most parameters."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    exact = [each for each in lists if len(each) == expected]
    return exact[0] if exact else max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))


def _lists(text: Any) -> dict[str, list[Any]]:
    """The lists in a config that say something about each layer, such as `layer_types` or `no_rope_layers`."""
    number = text.num_hidden_layers
    stated = sorted(vars(text).items())
    return {name: value for name, value in stated if isinstance(value, list) and len(value) == number}


def kinds_of(config: Any, layers: nn.ModuleList) -> list[tuple[Any, ...]]:
    """The kind of each layer: what the config's lists say about it, and what its place decides, such as its shapes."""
    text = config.get_text_config(decoder=True)
    lists = _lists(text)
    stated = zip(*lists.values(), strict=True)
    derived = () if "layer_types" in lists else getattr(text, "layer_types", None) or ()  # of Mamba, by the place
    shapes = (tuple(tuple(p.shape) for p in layer.parameters()) for layer in layers)
    found = itertools.islice(itertools.zip_longest(stated, derived, shapes), len(layers))
    return [(repr(values), (name, shape)) for values, name, shape in found]


def places_to_trace(
    kinds: list[tuple[Any, ...]], kinds_when_shortened: Callable[[list[int]], list[Any] | None]
) -> list[int]:
    """The layers to trace: each kind twice, so that one of them is not the first.

    If a model with these layers only would have others, since a layer's place decides its kind, the first layers are
    taken as they are, at most `_MAX_LAYERS`. `kinds_when_shortened` is asked if that may be so.
    """
    twice = [[place for place, other in enumerate(kinds) if other == kind][:2] for kind in dict.fromkeys(kinds)]
    places = [places[0] for places in twice] + [places[1] for places in twice if len(places) > 1]
    if len({by_place for _, by_place in kinds}) == 1:
        return places[:_MAX_LAYERS]
    places.sort()
    if len(places) <= _MAX_LAYERS and kinds_when_shortened(places) == [kinds[each] for each in places]:
        return places
    return list(range(min(max(2, *(places[-1] + 1 for places in twice)), len(kinds), _MAX_LAYERS)))


def traced_places(config: Any, kinds: list[tuple[Any, ...]], options: dict[str, Any]) -> list[int]:
    """`places_to_trace` of a model."""
    loader: Any = AutoModelForCausalLM

    def when_shortened(places: list[int]) -> list[Any] | None:
        try:
            shorter = shortened(config, places)
            with warnings.catch_warnings(action="ignore"), torch.device("meta"):
                model = loader.from_config(copy.deepcopy(shorter), **options)
            return kinds_of(shorter, decoder_layers(text_decoder(model), len(places)))
        except Exception:  # of any type: architectures check their sizes in various ways, or not at all
            return None

    return places_to_trace(kinds, when_shortened)


def shortened(config: Any, places: list[int]) -> Any:
    """The config of a model with these layers."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    for name, values in _lists(text).items():
        setattr(text, name, [values[place] for place in places])
    for name in _PLACES:
        if of_kind := getattr(text, name, None):
            setattr(text, name, [index for index, place in enumerate(places) if place in of_kind])
    if _SHARING in vars(text):
        setattr(text, _SHARING, sum(shares for place, shares in enumerate(_sharing(text)) if place in places))
    own = text.to_dict().get("per_layer_config") or {}  # sizes of some layers, by place
    text.num_hidden_layers = len(places)
    if own:
        of = {int(place): sizes for place, sizes in own.items()}
        text.per_layer_config = {index: of[place] for index, place in enumerate(places) if place in of}
    return shorter


def _sharing(text: Any) -> list[bool]:
    """Whether each layer takes the keys and values of an earlier one, as the last ones of some models do."""
    number = text.num_hidden_layers
    return [place >= number - (getattr(text, _SHARING, None) or 0) for place in range(number)]


def stated_kinds(text: Any) -> list[tuple[Any, ...]]:
    """What a config says about each layer; empty if it says nothing."""
    lists = _lists(text).values()
    return [*zip(*(map(repr, each) for each in lists), _sharing(text), strict=True)] if lists else []
