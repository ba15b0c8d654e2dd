"""Judge one program: start it and its test apart from each other, watch both, and say what became of them."""

from __future__ import annotations

import marshal
import sys
import time
from pathlib import Path

from tunebook.evaluate.sandbox import processes
from tunebook.evaluate.sandbox.jobs import Outcome, Program
from tunebook.evaluate.sandbox.limits import Limits, has_filters
from tunebook.evaluate.sandbox.processes import Seat
from tunebook.evaluate.sandbox.seccomp import program_filter
from tunebook.evaluate.sandbox.trial import Trial
from tunebook.evaluate.sandbox.verdict import Seen
from tunebook.evaluate.sandbox.walls import Wall

FOLDER = Path(__file__).parent
SOLUTION = ("values", "channel", "solution")
CHECKER = ("values", "channel", "solution", "remote", "checker")
FILTER_DESCRIPTOR = 7
# The children get their code through descriptor 3: they need not see the folder that it is in, and nothing is compiled
# for each program again.
BOOTSTRAP = """
import marshal, sys
with open(3, "rb") as file:
    modules, settings = marshal.loads(file.read())
if settings["num_processes"]:
    import resource
    resource.setrlimit(resource.RLIMIT_NPROC, (settings["num_processes"],) * 2)
for name, code in marshal.loads(modules):
    module = sys.modules[name] = type(sys)(name)
    module.__path__ = []
    exec(code, module.__dict__)
module.main(settings)
"""


class Judge:
    """Judges programs one after the other behind one wall."""

    def __init__(self, wall: Wall, limits: Limits) -> None:
        self._wall = wall
        self._limits = limits
        self._filter = program_filter() if has_filters() else None
        self._python = str(Path(sys.executable).resolve())
        self._modules: dict[tuple[str, ...], bytes] = {names: _bundle(names) for names in (SOLUTION, CHECKER)}

    def judge(self, program: Program) -> Outcome:
        """What becomes of one program. Raises: StartError, StuckError where the sandbox itself fails."""
        started = time.monotonic()
        seen = Seen(program=program, limits=self._limits)
        with Trial(seen) as trial:
            try:
                self._start(trial, seen)
                trial.watch()
                if seen.verdict is not None and trial.program is not None:
                    seen.has_left_processes = self._wall.has_more_processes(trial.program)
            finally:
                trial.end_children()
                seen.has_left_processes |= self._wall.clear()
            trial.drain()
        return seen.outcome(time.monotonic() - started)

    def _start(self, trial: Trial, seen: Seen) -> None:
        """Start both processes: all that they have in common is a pipe in either direction.

        The test first, so that the program finds its folder made, and cannot make it in its place.
        """
        program_seat, test_seat = self._wall.seats()
        says = trial.test_says[1]
        streams = {0: trial.nothing(), 1: says, 2: says, 4: trial.answers[0], 5: trial.calls[1], 6: trial.verdict[1]}
        trial.test = self._start_child(
            trial, seen, CHECKER, test_seat, streams, test=seen.program.test, nonce=seen.nonce
        )
        says = trial.program_says[1]
        streams = {0: trial.nothing(), 1: says, 2: says, 4: trial.calls[0], 5: trial.answers[1]}
        trial.program = self._start_child(trial, seen, SOLUTION, program_seat, streams, source=seen.program.source)

    def _start_child(
        self, trial: Trial, seen: Seen, names: tuple[str, ...], seat: Seat, streams: dict[int, int], **settings: str
    ) -> int:
        command = [self._python, "-I", "-S", "-u", "-B", "-X", "utf8", "-c", BOOTSTRAP]
        if seat.prefix:
            filtered = ["--seccomp", str(FILTER_DESCRIPTOR)] if self._filter else []
            command = [*seat.prefix, *filtered, "--", *command]
            streams = streams | {FILTER_DESCRIPTOR: trial.text(self._filter)} if self._filter else streams
        # Behind a wall with a user namespace processes are counted inside it, so the limit is set there.
        num_processes = self._limits.num_processes if seat.prefix else 0
        content = marshal.dumps((self._modules[names], {"num_processes": num_processes, **settings}))
        return processes.start(
            command, seat, {**streams, 3: trial.text(content)}, self._limits, seen.program.time_limit_s, self._filter
        )


def _bundle(names: tuple[str, ...]) -> bytes:
    """Some modules of this package, compiled, in the order in which they are to be executed; with their packages."""
    packages = ["tunebook", "tunebook.evaluate", "tunebook.evaluate.sandbox"]
    modules = [(name, compile("", name, "exec")) for name in packages]
    for name in names:
        source = (FOLDER / f"{name}.py").read_bytes()
        modules.append((f"{packages[-1]}.{name}", compile(source, f"<{name}>", "exec", dont_inherit=True)))
    return marshal.dumps(modules)
