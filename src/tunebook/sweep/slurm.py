"""Trials as tasks of a Slurm job array: each runs the next trial of the study on one node.

`python -m tunebook.sweep.slurm FOLDER` is one task. Slurm sends SIGUSR1 before the time limit, and SIGTERM on
preemption. The trial then saves, and the task is requeued and resumes it.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path

from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.files import atomic_write_json, atomic_write_text, read_json
from tunebook.launch.slurm import (
    is_unknown_job,
    option_words,
    output_pattern,
    requeue,
    script_text,
    slurm,
    submit_script,
)
from tunebook.launch.supervise import StopRequests
from tunebook.sweep.study import Study, read_sweep
from tunebook.sweep.table import sweep_exit_code
from tunebook.sweep.trials import CommandOf, run_trials, train_command

_JOB_FILE = "slurm.json"
_TASK = "slurm_task"  # attribute of a trial: the task that ran it last


def is_array(config: RunConfig) -> bool:
    """Whether trials of this configuration are tasks of one array; with launcher.wait=true each submits its own job."""
    return isinstance(config.launcher, SlurmConfig) and not config.launcher.wait


def check_array(configs: list[RunConfig]) -> None:
    """Check that trials can be tasks of one array. Raises: RequestError with what to type."""
    if len({tuple(option_words(config)) for config in configs}) > 1:
        what = "the trials differ in their nodes or time limit, and all tasks of a job array have the same"
    elif configs[0].hardware.num_nodes > 1:
        what = f"hardware.num_nodes={configs[0].hardware.num_nodes}: a task of a job array runs on one node"
    elif isinstance(configs[0].launcher, SlurmConfig) and configs[0].launcher.container_image is not None:
        what = "launcher.container_image: a task of a job array runs outside of containers"
    else:
        return
    raise RequestError(
        f"{what}; let each trial submit a job of its own, with a command that waits: launcher.wait=true --jobs=2",
        problem_id="sweep-array",
    )


def submit_array(study: Study, config: RunConfig, num_at_once: int) -> str:
    """Submit one task for each trial that is left; return the job ID. Raises: RequestError if Slurm refuses it."""
    indices = f"{study.num_trials - study.num_left}-{study.num_trials - 1}"
    options = [
        *option_words(config),
        f"--array={indices}%{num_at_once}",
        f"--output={output_pattern(study.folder, 'slurm-%A_%a.out')}",
        "--open-mode=append",
    ]
    # The signal must not end Python before `run_task` handles it.
    body = f"trap '' USR1; exec {shlex.join([sys.executable, '-m', 'tunebook.sweep.slurm', str(study.folder)])}"
    script = study.folder / "array.sh"
    atomic_write_text(script, script_text([f"The trials of {study.folder}"], options, body))
    job_id = submit_script(script)
    atomic_write_json(study.folder / _JOB_FILE, {"job_id": job_id})
    return job_id


def queued_array(folder: Path) -> str | None:
    """Return the ID of the sweep's array while Slurm has tasks of it. Raises: TunebookError if it does not answer."""
    file = folder / _JOB_FILE
    if not file.is_file():
        return None
    job_id = str(read_json(file)["job_id"])
    try:
        return job_id if slurm("squeue", "--noheader", f"--jobs={job_id}").strip() else None
    except RequestError as error:
        if is_unknown_job(error):
            return None
        raise


def run_task(folder: Path, command_of: CommandOf = train_command) -> int:
    """Run one trial; return its exit code."""
    started = time.time()
    study = Study(folder, read_sweep(folder))
    index = os.environ["SLURM_ARRAY_TASK_ID"]
    task = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{index}"
    study.reopen(lambda trial: trial.user_attrs.get(_TASK) == task)  # of a turn before this task was requeued
    trial = study.next_trial(seed=int(index))
    if trial is None:
        return 0
    trial.set_user_attr(_TASK, task)
    stop, waiting = StopRequests(), [trial]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the script ignores it until now
    with stop.listening():
        run_trials(study, [{}], stop, print, command_of, lambda: waiting.pop() if waiting else None)
    newest = newest_checkpoint(study.run_folder(trial.number))
    # USR1 is Slurm's warning before the time limit and a preemption; a canceled task gets SIGTERM. A turn that saved
    # nothing would repeat itself for ever. Slurm refuses jobs with launcher.requeue=false.
    if stop.first == signal.SIGUSR1.name and newest is not None and newest.stat().st_mtime > started:
        requeue(os.environ["SLURM_JOB_ID"], lambda text: print(text, flush=True))
    return sweep_exit_code([row for row in study.rows() if row.number == trial.number])


if __name__ == "__main__":
    sys.exit(run_task(Path(sys.argv[1])))
