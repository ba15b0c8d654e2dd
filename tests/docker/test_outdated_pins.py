"""docker/outdated_pins.py with a faked index and a faked resolver; `make lock-check` asks the real ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"

# pip prints what each package's file holds; `--pre` adds the second line of it.
FAKE_PIP = """#!/bin/sh
echo "$*" >> "$FAKE/pip"
name=$5
case "$*" in *--pre) line=2 ;; *) line=1 ;; esac
versions=$(sed -n ${line}p "$FAKE/index/$name" 2> /dev/null)
if [ -z "$versions" ]; then echo "ERROR: No matching distribution found for $name" >&2; exit 1; fi
echo "$name (${versions%%,*})"
echo "Available versions: $versions"
"""
# The resolver refuses what is in $FAKE/refused, by its pin, and prints the file's text.
FAKE_UV = """#!/bin/sh
echo "$*" >> "$FAKE/uv"
for pin in "$FAKE"/refused/*; do
  if grep -rqx "$(basename "$pin").*" docker; then cat "$pin" >&2; exit 1; fi
done
"""
# As uv 0.13 prints them, with its line breaks.
CONFLICT = """\
error: No solution found when resolving dependencies:
  cause: Because hydra-core==1.3.8 depends on omegaconf>=2.2,<2.4 and you
         require hydra-core==1.3.8, we can conclude that you require omegaconf>=2.2,<2.4.
"""
LOCKED = """\
error: No solution found when resolving dependencies for split (markers: sys_platform == 'linux')
  cause: Because you require nvidia-cuda-runtime==13.5.37 and nvidia-cuda-runtime{(platform_machine == 'x86_64' and
         sys_platform == 'linux')}==13.0.96, we can conclude that your requirements are unsatisfiable.
"""
OLD_PYTHON = """\
error: No solution found when resolving dependencies:
  cause: Because the requested Python version (>=3.11) does not satisfy Python>=3.12 and numpy==2.6.0 depends on
         Python>=3.12, we can conclude that numpy==2.6.0 cannot be used.
"""


@pytest.fixture
def outdated_pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported as it is when it runs; nothing of docker/ stays importable."""
    monkeypatch.syspath_prepend(str(DOCKER))
    for name in ("make_locks", "outdated_pins"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import outdated_pins as module

    yield module
    del sys.modules["outdated_pins"], sys.modules["make_locks"]


@pytest.fixture
def fake(outdated_pins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of `.in` files, and fakes of pip and uv."""
    folder = tmp_path / "fake"
    for name in ("fake/index", "fake/refused", "tools/bin", "docker/cpu", "docker/volta"):
        (tmp_path / name).mkdir(parents=True)
    for name, script in (("python", FAKE_PIP), ("uv", FAKE_UV)):
        (tmp_path / "tools" / "bin" / name).write_text(script)
        (tmp_path / "tools" / "bin" / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setattr(outdated_pins.make_locks, "DOCKER", tmp_path / "docker")
    monkeypatch.setattr(outdated_pins.make_locks, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(outdated_pins.make_locks, "prepare_tools", lambda: None)
    return folder


def write_in(fake: Path, name: str, *lines: str) -> None:
    """Write an `.in` file."""
    (fake.parent / "docker" / name).write_text("\n".join(["# why", "", *lines, ""]))


def publish(fake: Path, name: str, stable: str, with_pre: str = "") -> None:
    """Give the index a package."""
    (fake / "index" / name).write_text(f"{stable}\n{with_pre or stable}\n")


def test_the_table_has_what_is_not_the_newest(
    outdated_pins: ModuleType, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_in(fake, "requirements-common.in", "omegaconf==2.3.1  # config", "lm-eval[ifeval]==0.4.13", "rich==15.0.0")
    write_in(fake, "requirements-dev.in", "ruff==0.17.5   # lint", "gone==1.0")
    write_in(fake, "cpu/requirements.in", "-r ../requirements-common.in", "torch==2.13.0")
    write_in(fake, "volta/requirements.in", "torch==2.10.0", "flash-attn-4[cu13]==4.0.0b35")
    publish(fake, "omegaconf", "2.4.0, 2.3.1")
    publish(fake, "lm-eval", "0.4.14, 0.4.13")
    publish(fake, "rich", "15.0.0, 14.0.0")
    publish(fake, "ruff", "0.17.6, 0.17.4")  # the pinned one was taken back
    publish(fake, "torch", "2.13.0+cpu, 2.13.0, 2.10.0")
    publish(fake, "flash-attn-4", "", "4.0.0b36, 4.0.0b35")
    (fake / "refused" / "omegaconf==2.4.0").write_text(CONFLICT)
    assert outdated_pins.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r" {2,}", line) for line in lines[:-2]] == [
        ["package", "pinned", "newest", "allowed by the other pins", "pinned in docker/"],
        ["flash-attn-4", "4.0.0b35", "4.0.0b36", "yes", "volta/requirements.in"],
        ["gone", "1.0", "none on the index", "requirements-dev.in"],
        ["lm-eval", "0.4.13", "0.4.14", "yes", "requirements-common.in"],
        ["omegaconf", "2.3.1", "2.4.0", "no: hydra-core==1.3.8 needs omegaconf>=2.2,<2.4", "requirements-common.in"],
        ["ruff", "0.17.5 (not on the index)", "0.17.6", "yes", "requirements-dev.in"],
        ["torch", "2.10.0", "2.13.0", "yes", "volta/requirements.in"],
    ]
    assert lines[-2:] == [
        "5 of 8 pins are outdated; the other pins allow 4 of the newer versions",
        "to take one: read in its .in file why it is pinned, change the pin, then type make lock",
    ]
    assert {call.split("--python-version=")[1].split()[0] for call in (fake / "pip").read_text().splitlines()} == {
        "3.11"
    }


def test_a_version_is_tried_where_its_file_is_resolved(outdated_pins: ModuleType, fake: Path) -> None:
    for name in ("requirements-common.in", "requirements-dev.in", "requirements-nvcc.in", "volta/requirements.in"):
        write_in(fake, name, "some==1.0  # why")
        assert outdated_pins.try_version(outdated_pins.Pin("some", "1.0", (name,)), "2.0") == ""
        assert "some==1.0" in (fake.parent / "docker" / name).read_text()  # the checkout is as it was
    resolved = [re.findall(r"docker/\S+", call) for call in (fake / "uv").read_text().splitlines()]
    assert resolved == [
        ["docker/cpu/requirements.in"],
        ["docker/requirements-dev.in", "docker/cpu/requirements.lock"],
        ["docker/requirements-nvcc.in", "docker/ampere/requirements.lock"],
        ["docker/volta/requirements.in"],
    ]


def test_the_resolver_sees_the_newer_version_and_all_else_as_it_is(outdated_pins: ModuleType, fake: Path) -> None:
    write_in(fake, "cpu/requirements.in", "some[extra]==1.0  # why", "some-more==1.0", "other==1.0")
    (fake / "refused" / "some\\[extra\\]==2.0").write_text("refused")
    pin = outdated_pins.Pin("some", "1.0", ("cpu/requirements.in",))
    assert outdated_pins.try_version(pin, "2.0") == "put it into the .in file, and make lock says why"
    (fake / "refused" / "some\\[extra\\]==2.0").unlink()
    (fake / "refused" / "some-more==2.0").write_text("refused")
    (fake / "refused" / "other==2.0").write_text("refused")
    assert outdated_pins.try_version(pin, "2.0") == ""


@pytest.mark.parametrize(
    ("name", "output", "reason"),
    [
        ("omegaconf", CONFLICT, "hydra-core==1.3.8 needs omegaconf>=2.2,<2.4"),
        ("nvidia-cuda-runtime", LOCKED, "what it is installed with has 13.0.96"),
        ("numpy", OLD_PYTHON, "it needs Python>=3.12"),
        ("numpy", "something else", "put it into the .in file, and make lock says why"),
    ],
)
def test_the_reason_is_short(outdated_pins: ModuleType, name: str, output: str, reason: str) -> None:
    assert outdated_pins.short_reason(name, output) == reason


def test_pins_that_are_all_the_newest_need_no_table(
    outdated_pins: ModuleType, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_in(fake, "requirements-dev.in", "ruff==0.17.5")
    publish(fake, "ruff", "0.17.5")
    assert outdated_pins.main() == 0
    assert capsys.readouterr().out == "0 of 1 pins are outdated; the other pins allow 0 of the newer versions\n"
    assert not (fake / "uv").exists()


def test_an_index_that_does_not_answer_is_an_error_with_what_to_type(outdated_pins: ModuleType, fake: Path) -> None:
    write_in(fake, "requirements-dev.in", "ruff==0.17.5")
    with pytest.raises(
        SystemExit, match=r"none of the 1 packages, or does not answer.*pip config list.*pip index versions"
    ):
        outdated_pins.main()


def test_every_pin_of_the_project_is_asked_about_once(outdated_pins: ModuleType) -> None:
    pins = outdated_pins.read_pins()
    asked = {(pin.name, source) for pin in pins for source in pin.sources}
    written = {
        (match[1], str(path.relative_to(DOCKER)))
        for path in DOCKER.rglob("*.in")
        for match in re.finditer(r"^([A-Za-z][\w.-]*)", path.read_text(), flags=re.MULTILINE)
    }
    assert asked == written
    included = {
        name
        for name in outdated_pins.INCLUDED_BY
        if f"-r ../{name}" in (DOCKER / outdated_pins.INCLUDED_BY[name]).read_text()
    }
    assert "requirements-gpu.in" in included
