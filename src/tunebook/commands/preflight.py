"""What is refused before a run starts, because it can be planned but cannot run here."""

from __future__ import annotations

import os

from tunebook.config.launchers import RayConfig, SlurmConfig
from tunebook.config.schema import RunConfig
from tunebook.errors import DoesNotFitError, RequestError, RulesError
from tunebook.evaluate.code.judging import check_code
from tunebook.evaluate.fetch import require_tasks
from tunebook.evaluate.sandbox.start import HANDOVER_VARIABLE, SERVICE_HANDOVER
from tunebook.evaluate.task_files import resolve_task
from tunebook.launch.commands import is_later_node
from tunebook.launch.container import is_contained
from tunebook.launch.slurm import check_job
from tunebook.model.load import check_model
from tunebook.plan.auto.resolve import Resolution
from tunebook.plan.draft import RUN_NOT_TRAINED, Draft
from tunebook.train.requirements import check_environment


def require_runnable(job: Draft) -> None:
    """Refuse a run that can be planned but cannot run here. Raises: TunebookError."""
    require_machine(job.resolved)
    for error in job.shortcomings:
        if isinstance(error, DoesNotFitError):
            raise error
    for problem in job.problems:
        if problem.id == RUN_NOT_TRAINED:
            run = job.config.model.run
            raise RequestError(f"model.run={run}: {problem.message}; {problem.fix}", problem_id=problem.id)
    if job.unusable_data is not None and not is_later_node(job.config):
        raise job.unusable_data
    check_launcher(job.config)
    check_model(job.config.model)
    if job.config.evaluation.tasks:
        # Now, and not after hours of training.
        config = job.config
        require_tasks(config.evaluation.tasks, download_images=config.dataset.download_images, model=config.model)
        check_sandbox(job.config)


def require_machine(resolution: Resolution) -> None:
    """Refuse a run that this machine's hardware or packages cannot start. Raises: RequestError, RulesError."""
    if resolution.problem is not None:
        raise RequestError(resolution.not_runnable_reason, problem_id=resolution.problem.id)
    if missing := check_environment(resolution.config):
        raise RulesError(missing)


def check_launcher(config: RunConfig) -> None:
    """Refuse a launch that cannot start. Raises: RequestError with what to change, TunebookError if unreachable."""
    if isinstance(config.launcher, SlurmConfig):
        check_job(config)
    elif isinstance(config.launcher, RayConfig):
        from tunebook.launch.ray import check_ray

        check_ray(config)


def check_sandbox(config: RunConfig) -> None:
    """Refuse an evaluation that needs a sandbox if there is none; a Slurm job checks on its own node.

    In a container there is none: no image has bubblewrap, because a container would not let it isolate anything, and
    the sandbox service's folder is not mounted. Raises: RequestError.
    """
    settings, evaluation = config.launcher, config.evaluation
    if not isinstance(settings, SlurmConfig):
        if not is_later_node(config):
            check_code(evaluation.tasks)
        return
    handover = os.environ.get(HANDOVER_VARIABLE) or str(SERVICE_HANDOVER)
    if not is_contained(config) or handover in settings.container_mounts:
        return
    tasks = [task for task in evaluation.tasks if resolve_task(task).code is not None]
    if tasks and (evaluation.before or evaluation.after):
        raise RequestError(
            f"evaluation.tasks: {', '.join(tasks)} has programs executed that a model wrote, and a container of "
            "launcher.container_image has no sandbox for them; train with evaluation=none, and evaluate the run "
            f"afterwards where there is one: tunebook eval run=FOLDER tasks={','.join(tasks)}",
            problem_id="sandbox-missing",
        )
