"""Training progress for people: a rich bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

# Without a terminal a line is printed at most this often, in seconds, and for the first and last step.
_LINE_EVERY_S = 10.0


class TrainingProgress:
    """Step, loss, tokens per second over all GPUs, time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._started = time.perf_counter()
        self._first_step = 0
        self._total = 0

    def start(self, step: int, total: int) -> None:
        """Begin at `step` (not 0 in a resumed run) of `total`."""
        self._first_step, self._total, self._started = step, total, time.perf_counter()
        if not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._bar.start()
        self._task = self._bar.add_task("training", total=total, completed=step, loss="-", speed="-")

    def advance(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A logged step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_second:,.0f}")
            return
        now = time.perf_counter()
        if step in (self._first_step + 1, self._total) or now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            done = step - self._first_step
            left = (now - self._started) / max(1, done) * (self._total - step)
            self.console.print(
                f"step {step}/{self._total}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {left:,.0f} s left",
                highlight=False,
            )

    def validated(self, step: int, loss: float) -> None:
        """A validation loss."""
        self.console.print(f"step {step}  validation loss {loss:.4f}", highlight=False)

    def stop(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
