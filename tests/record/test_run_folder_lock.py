"""One run at a time in a folder, and a lock that is free once its holders are gone."""

import subprocess
import sys

from tunebook.record.run_folder import LOCK_FILE, is_worked_in, working_in


def test_a_rank_that_outlives_its_launcher_keeps_the_lock(tmp_path):
    with working_in(tmp_path) as lock:
        rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    assert is_worked_in(tmp_path)
    rank.communicate(b"\n")
    assert not is_worked_in(tmp_path)


HOLDS = """
import sys
from pathlib import Path
from tunebook.errors import RequestError
from tunebook.record.run_folder import working_in

sys.stdin.readline()
try:
    with working_in(Path(sys.argv[1])):
        print("at work", flush=True)
        sys.stdin.read()
except RequestError as error:
    print(error.problem_id, flush=True)
"""


def test_of_runs_that_start_in_one_folder_at_once_one_is_let_in(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], **pipes) for _ in range(2)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.stdout.readline().strip() for process in processes]
    assert sorted(lines) == ["at work", "run-is-running"]
    for process in processes:
        process.kill()  # leaves its lock file behind, which holds nobody up
        process.communicate()
    assert (tmp_path / LOCK_FILE).exists()
    assert not is_worked_in(tmp_path)
    with working_in(tmp_path):
        assert is_worked_in(tmp_path)
