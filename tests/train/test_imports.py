"""While libraries are imported no garbage is collected, and afterwards it is as before."""

from __future__ import annotations

import gc

import pytest

from tunebook.train.imports import importing_libraries


@pytest.fixture(autouse=True)
def nothing_stays_frozen():
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("is_collecting", [True, False])
def test_collecting_stops_and_goes_on(is_collecting: bool) -> None:
    (gc.enable if is_collecting else gc.disable)()
    with importing_libraries():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled() is is_collecting
    assert gc.get_freeze_count() > len(made)


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ImportError), importing_libraries():
        raise ImportError
    assert gc.isenabled()
