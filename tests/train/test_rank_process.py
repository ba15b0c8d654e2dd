"""How ranks end after a failure and together; with real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tunebook.train.rank_process import AGREED_ENDINGS

# Ends as it is told to, with a thread and a clean-up in the way that would take a minute.
ENDING = """
import sys
from tunebook.train.rank_process import RankEnd
end = RankEnd()
import atexit, threading, time
if sys.argv[2] == "waits":
    threading.Thread(target=time.sleep, args=(60,)).start()
    atexit.register(time.sleep, 60)
atexit.register(print, "cleaned up")
class Part:
    def __init__(self):
        self.print = print
    def __del__(self):
        self.print("taken apart")
part = Part()
print("ending")
end.leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [1, 3])
def test_a_rank_that_failed_waits_for_nothing(code):
    words = [sys.executable, "-c", ENDING, str(code), "waits"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (code, "ending\n")


@pytest.mark.parametrize("code", AGREED_ENDINGS)
def test_agreed_ending_cleans_up_but_skips_interpreter_exit(code):
    for program, last in ((ENDING, ""), (ENDING.replace("end.leave(", "sys.exit("), "taken apart\n")):
        words = [sys.executable, "-c", program, str(code), "at once"]
        ended = subprocess.run(words, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (code, f"ending\ncleaned up\n{last}")


# One of two ranks gathers and ends while gloo's thread may still hold what was gathered: without `RankEnd` the process
# was aborted in 4 of 8 tries ("terminate called without an active exception").
GATHERING = """
import sys
from tunebook.train.rank_process import RankEnd

end = RankEnd()
import torch, torch.distributed as dist
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.barrier()
gathered = torch.empty(8_000_000)
dist.all_gather_into_tensor(gathered, torch.ones(4_000_000))
end.leave(0)
"""


@pytest.mark.nightly
def test_a_collective_whose_thread_is_not_done_aborts_no_rank(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", GATHERING, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
