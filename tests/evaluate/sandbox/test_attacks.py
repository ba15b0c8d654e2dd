"""Programs that attack, each followed by a right one in the same sandbox: the first is contained, the second passes."""

from __future__ import annotations

import json
import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

LIST = runpy.run_path(str(Path(__file__).parent / "attack_list.py"))
ATTACKS = {attack.name: attack for attack in LIST["load_attacks"]()}
assert len(ATTACKS) > 40
pytestmark = pytest.mark.slow


def verdicts(sandbox, *sources):
    """What `run.py` writes about programs, each with its time limit."""
    lines = [
        json.dumps({"source": source, "test": LIST["TEST"], "time_limit_s": limit_s}) for source, limit_s in sources
    ]
    answer = sandbox.ask(("\n".join(lines) + "\n").encode(), 200.0)
    return [json.loads(line) for line in answer.splitlines()]


@pytest.fixture(scope="module")
def outcomes(bubblewrap, tmp_path_factory):
    """The verdicts on each attack and on the right program after it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "diary.txt").write_text("secret")

    def run(attack):
        source = attack.source.replace("/secrets", str(folder))
        return verdicts(bubblewrap, (source, attack.time_limit_s), (LIST["RIGHT"], 30.0))

    with ThreadPoolExecutor(bubblewrap.num_programs) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        return dict(zip(ATTACKS, pool.map(run, ATTACKS.values()), strict=True))


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_contained_and_the_next_program_finds_nothing_of_it(name, outcomes):
    attack, right = outcomes[name]
    assert attack["status"] in ATTACKS[name].stopped_as, attack
    assert right["status"] == "passed", right


MESSES = {
    "files, links and closed folders": """
        os.makedirs("a/b")
        for name in ("a/b/file", "odd \\n *", "-rf"):
            open(name, "w").close()
        os.symlink("/etc", "a/link"); os.symlink("/etc", "link"); os.symlink("/nowhere", "broken")
        os.mkfifo("pipe"); os.chmod("a/b", 0); os.chmod("a", 0); os.chmod(".", 0)
    """,
    "deeper than a path may be": """
        for _ in range(30):
            os.mkdir("x" * 200); os.chdir("x" * 200)
    """,
    "more names than a command may have": """
        for number in range(8_700):
            open(f"{number}-{'x' * 240}", "w").close()
    """,
}


@pytest.mark.parametrize("name", MESSES)
def test_what_a_program_leaves_is_removed(name, bubblewrap):
    lines = os.linesep.join(line[4:] for line in MESSES[name].splitlines())
    source = f"import os\ndef answer():{lines}\n    return 42"
    first, second = verdicts(bubblewrap, (source, 30.0), (LIST["RIGHT"], 30.0))
    assert (first["status"], second["status"]) == ("passed", "passed"), (first, second)


def test_memory_of_a_program_whose_main_thread_has_ended_is_counted(bubblewrap):
    source = """
import ctypes, os, threading, time
def keep():
    kept = bytearray(300 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    time.sleep(600)
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=keep).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(600)
"""
    [verdict] = verdicts(bubblewrap, (source, 30.0))
    assert verdict["status"] == "memory"
