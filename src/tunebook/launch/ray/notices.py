"""Ray's notice that a machine of the run is to be taken away, asked for beside the ranks' work.

Ray knows of it when a node is drained: by its autoscaler or a cloud's operator for a spot machine, or by `ray start
--block` itself when it gets SIGTERM, as in a pod that Kubernetes deletes. Ray Train tells its workers every few seconds
(`RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tunebook.launch.node import Notice

_ASK_EVERY_S = 1.0


class NoticeWatch(threading.Thread):
    """Asks Ray Train in a thread of its own until there is a notice, and hands that on.

    `ray.train.get_preemption_info` waits for the same call of every worker: in the thread that follows the rank, one
    rank that hangs would keep all the others from hearing the launcher.
    """

    def __init__(self, ask: Callable[[], Any], hand_on: Callable[[Notice], None]) -> None:
        super().__init__(name="notices", daemon=True)  # it may wait for a worker that is gone
        self.has_come = False
        self._ask, self._hand_on = ask, hand_on

    def run(self) -> None:
        """Ask until told."""
        try:
            while (info := self._ask()) is None:
                time.sleep(_ASK_EVERY_S)
        except Exception:  # Ray's: it ends this worker, or lost another, of which the launcher hears
            return
        self.has_come = True
        self._hand_on(notice_of(info, time.time()))


def notice_of(info: Any, now: float) -> Notice:
    """Ray Train's PreemptionInfo, whose deadline is in milliseconds since 1970, at `now`, in seconds since then."""
    gone_in_s = None if info.deadline_ms is None else max(0.0, info.deadline_ms / 1000 - now)
    return Notice(ranks=tuple(info.preempted_ranks), gone_in_s=gone_in_s)
