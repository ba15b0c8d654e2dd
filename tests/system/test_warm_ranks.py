"""The way in which other tests start ranks quickly (`warm/ranks.py`): they begin, fail and are killed as torchrun's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.conftest import Ended, Running

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PROGRAM = """
import os, sys, time
from pathlib import Path

print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], Path.cwd(), os.environ["MARK"], flush=True)
Path(f"process-{os.environ['RANK']}.part").write_text(str(os.getpid()))
Path(f"process-{os.environ['RANK']}.part").rename(f"process-{os.environ['RANK']}")
if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    raise ValueError("a fault of rank 1")
if sys.argv[1] == "stay":
    time.sleep(1000)
"""

pytestmark = pytest.mark.usefixtures("starts_warm_ranks")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """torchrun with two ranks that say who they are."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return [*TORCHRUN, str(tmp_path / "program.py")]


def test_they_end_with_what_torchrun_would(
    words: list[str], run: Callable[..., Ended], warm_ranks: dict[str, str], tmp_path: Path
) -> None:
    for how, code in (("end", 0), ("fail", 1), ("end", 0)):
        ended = run([*words, how], cwd=tmp_path, MARK="a mark", **warm_ranks)
        assert ended.exit_code == code, ended.output
        assert ("ValueError: a fault of rank 1" in ended.output) == (how == "fail")
        said = sorted(line for line in ended.output.splitlines() if line.startswith("rank "))
        assert said == [f"rank {rank} of 2 {tmp_path} a mark" for rank in (0, 1)]


def test_they_end_with_the_command_that_asked_for_them(
    words: list[str],
    start: Callable[..., Running],
    run: Callable[..., Ended],
    warm_ranks: dict[str, str],
    tmp_path: Path,
) -> None:
    files = [tmp_path / f"process-{rank}" for rank in (0, 1)]
    killed = start([*words, "stay"], cwd=tmp_path, MARK="", **warm_ranks)
    killed.wait_for(lambda: all(file.exists() for file in files))
    processes = [int(file.read_text()) for file in files]
    assert all(Path(f"/proc/{process}").exists() for process in processes)
    killed.kill()
    assert run([*words, "end"], cwd=tmp_path, MARK="", **warm_ranks).exit_code == 0  # after they are gone
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
