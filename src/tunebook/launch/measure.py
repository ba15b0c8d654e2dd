"""`tunebook plan RECIPE --measure`: train two optimizer steps of a configuration, and keep the measurement.

The steps go through the ordinary launcher and ranks, in a temporary run folder. Nothing is saved, evaluated or tracked.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tunebook.config.frozen import architecture_json, config_to_yaml
from tunebook.config.model_facts import ARCHITECTURE_FILE
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.batch import BatchPlan
from tunebook.errors import DoesNotFitError, RequestError, StoppedError, TunebookError
from tunebook.files import atomic_write_json, atomic_write_text
from tunebook.hardware.detect import Machine
from tunebook.hardware.disk import disk_full
from tunebook.launch.commands import ranks_command
from tunebook.launch.logs import make_logs, print_log, rank_log, torchrun_log
from tunebook.launch.supervise import run_and_wait
from tunebook.record.measurement import (
    NUM_STEPS,
    Measurement,
    is_measurable,
    keep_measurement,
    measured_config,
    measurement_file,
    read_steps,
    recall_measurement,
)
from tunebook.record.metrics import is_training_line, read_metrics
from tunebook.record.run_folder import (
    PLAN_FILE,
    PREPARED_FILE,
    RUN_FILE,
    STOP_FILE,
    UNSAVED_FILE,
    Outcome,
    read_outcomes,
)
from tunebook.terminal import print_text
from tunebook.train.environment import rank_environment


def require_measurable(config: RunConfig) -> None:
    """Refuse a run whose ranks do not all start on this machine. Raises: RequestError."""
    if is_measurable(config):
        return
    launcher, nodes = config.launcher.name.name, config.hardware.num_nodes
    raise RequestError(
        f"--measure trains two steps on this machine, and with launcher={launcher} hardware.num_nodes={nodes} the "
        "ranks start on others, where the memory of one rank also depends on how many there are; plan without "
        "--measure, or measure what one node trains, on a node: launcher=local hardware.num_nodes=1",
        problem_id="measure-elsewhere",
    )


def measure(
    config: RunConfig, batch: BatchPlan, machine: Machine, console: Console, plan: dict[str, object]
) -> Measurement:
    """Return the measurement of a resolved configuration, from the cache or taken now. `plan` is its plan.json.

    Raises: TunebookError if the steps fail for another reason than memory, StoppedError on request.
    """
    file = measurement_file(config, batch, machine)
    known = recall_measurement(config, batch, machine)
    if known is not None:
        print_text(f"measured on {known.date}; to measure again, remove {file}", console)
        return known
    taken = measure_steps(measured_config(config, batch), batch.row_length, console, plan)
    keep_measurement(taken, config, batch, machine)
    print_text(f"kept for later plans and runs: {file}", console)
    return taken


def measure_steps(config: RunConfig, row_length: int, console: Console, plan: dict[str, object]) -> Measurement:
    """Train the two steps of `measured_config` in a temporary run folder, and read the measurement."""
    print_text(f"measuring: {NUM_STEPS} optimizer steps with full rows of made-up tokens", console)
    with TemporaryDirectory(prefix="tunebook-measure-") as name:
        folder = Path(name)
        outcome = _train(config, folder, plan)
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        if outcome.exit_code == DoesNotFitError.exit_code and not outcome.reason.startswith(disk_full(folder).message):
            return Measurement(date=date, row_length=row_length, ran_out=outcome.reason.partition(". ")[0])
        lines = [line for line in read_metrics(folder) if is_training_line(line)]
        if outcome.exit_code == 0 and len(lines) >= NUM_STEPS:
            return read_steps(lines, row_length, date)
        for log in (torchrun_log(folder, 0), rank_log(folder, outcome.rank)):
            print_log(log, folder, console)
        raise TunebookError(
            f"the two steps of --measure failed, and nothing was measured: {outcome.reason}",
            problem_id="measure-failed",
        )


def _train(config: RunConfig, folder: Path, plan: dict[str, object]) -> Outcome:
    """Start the ranks like a run on one node, and wait for them."""
    from tunebook.data.prepare import prepare  # imported here so that a plan does not wait for it

    prepared = prepare(config)
    if (architecture := architecture_json(config)) is not None:
        atomic_write_text(folder / ARCHITECTURE_FILE, architecture)
    atomic_write_text(folder / RUN_FILE, config_to_yaml(config))
    atomic_write_json(folder / PLAN_FILE, plan)
    atomic_write_json(folder / PREPARED_FILE, {"folder": str(prepared.folder)})
    (folder / UNSAVED_FILE).touch()
    make_logs(folder)
    end = run_and_wait(
        ranks_command(config, folder),
        rank_environment(config, os.environ),
        output=torchrun_log(folder, 0),  # `--json` prints one object and nothing else
        stop_timeout_s=config.launcher.stop_timeout_s,
        stop_file=folder / STOP_FILE,
    )
    if end.stopped_by is not None:
        raise StoppedError(f"stopped by {end.stopped_by}; nothing was measured", problem_id="stopped")
    return read_outcomes(folder, world_size(config))
