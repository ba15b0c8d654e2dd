"""Whether a run's command is at work until the run has ended, which a parity needs as much as a sweep."""

from __future__ import annotations

from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError
from tunebook.sweep.options import SweepOptions
from tunebook.sweep.planning import check_launch


def check_attended(config: RunConfig) -> None:
    """Refuse runs whose end nobody would see, or that wait for other commands. Raises: RequestError."""
    try:
        check_launch(config, SweepOptions())
    except RequestError as error:  # which names options of a sweep
        raise RequestError(_instead(config), problem_id="parity-request") from error


def _instead(config: RunConfig) -> str:
    """What a parity is told where a sweep's trials would be refused."""
    if isinstance(config.launcher, SlurmConfig):
        return (
            "launcher=slurm: a run's command would end when its job is submitted, before there is a loss to compare; "
            "let each wait for its job: launcher.wait=true"
        )
    return (
        f"hardware.num_nodes={config.hardware.num_nodes}: with launcher={config.launcher.name.name} on this machine "
        "alone, every configuration would wait for the other nodes; use launcher=slurm launcher.wait=true or "
        "launcher=ray launcher.address=HOST:PORT, or hardware.num_nodes=1"
    )
