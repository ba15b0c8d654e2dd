"""Uploads: refused before anything is written where they cannot work; the hub is asked by its own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import RequestError, TunebookError


class FakeHub:
    """What is called of huggingface_hub.HfApi."""

    calls: list[tuple[str, Any]]
    error: Exception | None

    def whoami(self) -> None:
        self.calls.append(("whoami", None))
        if isinstance(self.error, ConnectionError):
            raise self.error

    def create_repo(self, name: str, **options: Any) -> str:
        self.calls.append(("create", (name, options)))
        return f"https://hub/{name}"

    def upload_folder(self, *, folder_path: str, repo_id: str, commit_message: str) -> None:
        self.calls.append(("upload", (repo_id, commit_message, sorted(p.name for p in Path(folder_path).iterdir()))))
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    for name in ("huggingface_hub.HfApi", "tunebook.checkpoint.export.run.HfApi"):
        monkeypatch.setattr(name, FakeHub)
    monkeypatch.setattr(FakeHub, "calls", [], raising=False)
    monkeypatch.setattr(FakeHub, "error", None, raising=False)
    return FakeHub


def test_a_whole_folder_is_one_commit_in_a_private_repository(
    layouts: Any, run: Path, export: Any, hub: type[FakeHub]
) -> None:
    layouts.write_checkpoint(run, "whole")
    exported = export(run, push_to="me/tiny")
    assert exported.address == "https://hub/me/tiny"
    files = sorted(path.name for path in exported.folder.iterdir())
    assert hub.calls == [
        ("whoami", None),
        ("create", ("me/tiny", {"private": True, "exist_ok": True})),
        ("upload", ("me/tiny", "tiny, checkpoints/checkpoint-3 of tiny/run", files)),
    ]
    assert "model.safetensors" in files and "README.md" in files
    layouts.forget_recipe(run)
    export(run, push_to="me/tiny", to=run / "other")
    assert hub.calls[-1][1][1] == "checkpoints/checkpoint-3 of tiny/run"


def test_without_a_network_nothing_is_written(layouts: Any, run: Path, export: Any, hub: type[FakeHub]) -> None:
    hub.error = ConnectionError("Name or service not known")
    layouts.write_checkpoint(run, "whole")
    with pytest.raises(RequestError) as raised:
        export(run, push_to="me/tiny")
    assert raised.value.problem_id == "upload-not-possible"
    assert not (run / "exports").exists()


def test_an_upload_that_breaks_off_keeps_the_folder(layouts: Any, run: Path, export: Any, hub: type[FakeHub]) -> None:
    hub.error = OSError("quota exceeded")
    layouts.write_checkpoint(run, "whole")
    place = run / "exports" / "checkpoint-3"
    with pytest.raises(
        TunebookError, match=f"complete in {place}.*quota exceeded.*hf upload me/tiny {place}"
    ) as raised:
        export(run, push_to="me/tiny")
    assert (raised.value.exit_code, raised.value.problem_id) == (1, "upload-failed")
    assert (place / "model.safetensors").is_file()
