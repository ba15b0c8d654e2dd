"""The table of GPU generations."""

import pytest

from tunebook.config.choices import Attention, Generation
from tunebook.facts.generations import GENERATIONS, can_run, generation_of, image_for_driver

GPUS = [name for name in GENERATIONS if name is not Generation.cpu]


@pytest.mark.parametrize(
    ("capability", "generation"),
    [
        ((8, 9), Generation.ada),
        ((8, 7), Generation.ampere),
        ((13, 0), Generation.blackwell),
        ((6, 1), Generation.volta),
    ],
)
def test_unknown_capability_is_the_nearest_older_one(capability, generation):
    assert generation_of(capability) is generation


@pytest.mark.parametrize(
    ("attention", "oldest"),
    [
        (Attention.flash_attention_2, Generation.ampere),
        (Attention.flash_attention_3, Generation.ampere),
        (Attention.flash_attention_4, Generation.hopper),
    ],
)
def test_flash_attention_starts_at_a_generation(attention, oldest):
    first = GPUS.index(oldest)
    assert [can_run(attention, generation) for generation in GPUS] == [n >= first for n in range(len(GPUS))]
    assert not can_run(attention, Generation.cpu)


@pytest.mark.parametrize(
    ("generation", "driver", "image", "torch"),
    [
        (Generation.ampere, "580.65.06", "ampere", "2.13.0"),
        (Generation.ampere, "535.104.05", "volta", "2.10.0"),
        (Generation.hopper, "570.12.01", "volta", "2.10.0"),
        (Generation.volta, "525.60.13", "volta", "2.10.0"),
        (Generation.hopper, None, "hopper", "2.13.0"),
    ],
)
def test_the_driver_decides_the_image(generation, driver, image, torch):
    pins = image_for_driver(generation, driver)
    assert pins is not None
    assert (pins.name, pins.torch) == (image, torch)
    assert image_for_driver(generation, "470.82.01") is None  # older than those of every image
