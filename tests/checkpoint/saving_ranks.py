"""Two ranks over gloo that save in the background, for `test_saving_ranks.py`; each writes down what it has seen.

    python tests/checkpoint/saving_ranks.py FOLDER

Both are forked from this process, which has imported torch.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tunebook.checkpoint import save
from tunebook.checkpoint.collectives import background_group
from tunebook.checkpoint.record import FileEntry, Identity
from tunebook.checkpoint.save import CheckpointSaver

PATIENCE_S = 60
FILES = ("a", "b", "c", "d")


class Rank:
    """One of the two, which holds its thread at the first file until it is let go on, or lets it fail there."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.folder = folder
        self.may_go_on = threading.Event()
        self.has_sealed = threading.Event()
        self.sealed: list[str] = []
        self.failure: OSError | None = None
        self._seal = save._seal
        save._seal = self.seal
        identity = Identity(
            strategy="ddp", peft="full", world_size=2, model={}, config_sha256="", settings={}, data_sha256="",
            tokenizer_sha256=None, chat_template_sha256=None,
        )  # fmt: skip
        group = background_group(PATIENCE_S)
        assert group is not None
        self.saver = CheckpointSaver(folder, identity, keep=2, in_background=True, group=group)

    def seal(self, file: Path) -> FileEntry:
        """In place of the saver's."""
        assert self.may_go_on.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.sealed.append(file.name)
        entry = self._seal(file)
        if len(self.sealed) == len(FILES) // 2:
            self.has_sealed.set()
        return entry

    def save(self, step: int, *, is_held: bool = True) -> None:
        """What the trainer does: each rank writes two files."""
        self.saver.begin(step)
        self.sealed = []
        if is_held:
            self.may_go_on.clear()
        else:
            self.may_go_on.set()
        folder = self.saver.unfinished / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        for name in FILES[2 * self.rank : 2 * self.rank + 2]:
            (folder / name).write_text(name * 10)
        self.saver.finish(step, None)

    def folders(self) -> list[str]:
        """What is in the folder of checkpoints, while neither rank does anything."""
        torch.distributed.barrier()
        found = sorted(path.name for path in self.saver.folder.iterdir())
        torch.distributed.barrier()
        return found

    def in_the_air(self) -> dict[str, Any]:
        """Train while the save has not ended, then settle it.

        The first rank's thread has sealed its files and told so, or is about to; the second's has not begun.
        """
        self.save(2, is_held=self.rank == 1)
        assert self.rank == 1 or self.has_sealed.wait(PATIENCE_S)
        mine = torch.tensor([self.rank + 1.0])
        torch.distributed.all_reduce(mine)
        found = {"is_busy": self.saver.is_busy, "sum": mine.item(), "before": self.folders()}
        self.may_go_on.set()
        self.saver.settle()
        return found | {"after": self.folders(), "sealed": self.sealed, "is_busy_after": self.saver.is_busy}

    def failing(self, rank: int) -> dict[str, Any]:
        """One rank cannot flush a file."""
        self.failure = OSError(errno.ENOSPC, f"full on rank {rank}") if self.rank == rank else None
        self.save(4)
        self.may_go_on.set()
        try:
            self.saver.settle()
        except OSError as error:
            return {"errno": error.errno, "text": error.strerror, "complete": self.folders()}
        finally:
            self.failure = None
        return {}

    def again(self) -> dict[str, Any]:
        """Two more saves, the second of which waits for the first."""
        self.save(6)
        self.may_go_on.set()
        self.save(8)
        between = self.folders()
        self.may_go_on.set()
        self.saver.settle()
        return {"between": between, "complete": self.folders()}

    def leaving(self) -> dict[str, Any]:
        """One rank alone is left by an error while a save is in the air."""
        wait = save.Background.wait

        def let_go_on(background: save.Background) -> BaseException | None:
            self.may_go_on.set()
            return wait(background)

        save.Background.wait = let_go_on  # type: ignore[method-assign]
        try:
            with self.saver.settled():
                self.save(10)
                if self.rank == 1:
                    raise ZeroDivisionError
                assert self.saver._thread is not None
                assert self.saver._thread.wait() is None
                raise InterruptedError  # as where the other rank no longer answers
        except (ZeroDivisionError, InterruptedError) as error:
            return {"error": type(error).__name__, "complete": self.folders()}


def work(folder: Path, rank: int) -> None:
    """Everything one rank does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    one = Rank(folder, rank)
    seen = {"in_the_air": one.in_the_air(), "failing_1": one.failing(1), "failing_0": one.failing(0)}
    seen |= {"again": one.again(), "leaving": one.leaving()}
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


def main() -> int:
    """Both ranks, to their ends."""
    folder = Path(sys.argv[1])
    ranks = []
    for rank in range(2):
        process = os.fork()
        if not process:
            code = 1
            try:
                work(folder, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ranks.append(process)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
