"""Whether what a launcher needs is here, asked before anything is prepared."""

from __future__ import annotations

from tunebook.config.schema import RayConfig, RunConfig, SlurmConfig
from tunebook.launch.slurm.client import check_job


def check_launcher(config: RunConfig) -> None:
    """Refuse a launch that cannot begin. Raises: RequestError with what to change, TunebookError when out of reach."""
    if isinstance(config.launcher, SlurmConfig):
        check_job(config)
    elif isinstance(config.launcher, RayConfig):
        from tunebook.launch.ray.check import check_ray

        check_ray(config)
