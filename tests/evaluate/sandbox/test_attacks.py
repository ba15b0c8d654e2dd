"""Programs that attack, each followed by one that is right: the first must fail, the second pass, and nothing stay."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from tunebook.evaluate.sandbox.client import run_programs
from tunebook.evaluate.sandbox.protocol import Program
from tunebook.evaluate.sandbox.walls import FIRST_UIDS, descendants

LIST = runpy.run_path(str(Path(__file__).parent / "attack_list.py"))
ATTACKS = {attack.name: attack for attack in LIST["load_attacks"]()}
pytestmark = pytest.mark.slow


def attack_all(backend, secrets):
    """What became of each attack, and of the right program after it."""
    programs = []
    for name, attack in ATTACKS.items():
        source = attack.source.replace("/secrets", str(secrets))
        programs.append(Program(id=name, source=source, test=LIST["TEST"], time_limit_s=attack.time_limit_s))
        programs.append(Program(id=f"after {name}", source=LIST["RIGHT"], test=LIST["TEST"], time_limit_s=20.0))
    return {outcome.id: outcome for outcome in run_programs(programs, backend)}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """A file of the user's; bubblewrap hides also what every user of the machine may read."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "diary.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module", params=["bubblewrap", "users"])
def outcomes(request, secrets):
    return attack_all(request.getfixturevalue(request.param), secrets)


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_stopped_and_the_next_program_is_judged(name, outcomes):
    assert outcomes[name].status in ATTACKS[name].stopped_as, outcomes[name]
    assert outcomes[f"after {name}"].is_passed, outcomes[f"after {name}"]


def test_there_are_at_least_fifty():
    assert len(ATTACKS) >= 50


def test_nothing_of_them_is_left(outcomes, users, service):
    assert [path for slot in service.slots.iterdir() for path in slot.iterdir()] == []
    shared = [Path(folder) for folder in ("/tmp", "/dev/shm", "/var/tmp") if Path(folder).is_dir()]
    owners = {path.lstat().st_uid for folder in shared for path in folder.iterdir()}
    assert not [owner for owner in owners if owner >= FIRST_UIDS[0]]
    assert {Path(f"/proc/{process}").stat().st_uid for process in descendants(service.process.pid)} == {os.getuid()}


def test_the_handover_folder_holds_only_the_socket(outcomes, users, service):
    names = {str(path.relative_to(service.handover)) for path in service.handover.rglob("*")}
    assert names == {"runner.sock"}
    assert {path.stat().st_uid for path in service.handover.rglob("*")} == {os.getuid()}


def test_what_a_program_prints_does_not_steer_a_terminal(users):
    source = "print('\\x1b]0;owned\\x07')\ndef answer():\n    raise ValueError('\\x1b[2J')\n"
    [outcome] = run_programs([Program(id="x", source=source, test=LIST["TEST"])], users)
    assert outcome.last_lines == ["\\x1b]0;owned\\x07"]
    assert outcome.message.startswith("ValueError: \\x1b[2J (program, line 3)")
