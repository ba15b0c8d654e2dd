"""A tiny run, and checkpoints of it in every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.export.run import Exported, export_run

from . import layouts as _layouts


@pytest.fixture(scope="session")
def layouts() -> Any:
    """Runs and checkpoints as each strategy lays them out."""
    return _layouts


@pytest.fixture(scope="session")
def base(layouts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in bf16 of 50,000 weights."""
    folder: Path = layouts.write_base(tmp_path_factory.mktemp("base") / "tiny", layouts.TINY, "bfloat16")
    return folder


@pytest.fixture
def run(layouts: Any, base: Path, tmp_path: Path) -> Path:
    """A finished run that trained a whole model; without weights yet."""
    folder: Path = layouts.write_run(tmp_path / "outputs" / "tiny" / "run", base)
    return folder


@pytest.fixture
def lora_run(layouts: Any, base: Path, tmp_path: Path) -> Path:
    """A finished run that trained an adapter; without weights yet."""
    folder: Path = layouts.write_run(tmp_path / "outputs" / "tiny" / "lora", base, peft="lora")
    return folder


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Exported]:
    """Export a run: `export(run, merge=True)`."""

    def do(run: Path, **options: Any) -> Exported:
        return export_run(str(run), tmp_path / "outputs", lambda line: None, **options)

    return do
