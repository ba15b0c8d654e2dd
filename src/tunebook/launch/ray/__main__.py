"""`python -m tunebook.launch.ray RUN_FOLDER --endpoint ADDRESS:PORT`: run Ray Train's TorchTrainer for a run folder.

Ray places the workers, gives each its GPU, and restarts all of them when one is lost. The ranks then resume from the
newest checkpoint of the run folder. The launcher that started this process follows the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import tunebook
from tunebook.config.choices import Generation
from tunebook.config.frozen import load_config
from tunebook.config.schema import RayConfig, RunConfig, world_size
from tunebook.launch.ray.check import connect, worker_resources
from tunebook.launch.ray.worker import work
from tunebook.launch.rendezvous import TOKEN_VARIABLE
from tunebook.record.run_folder import RUN_FILE
from tunebook.train.environment import handed_on


def runtime_env(settings: RayConfig) -> dict[str, Any]:
    """Return Ray's runtime environment for the workers."""
    variables = dict(variable.split("=", 1) for variable in settings.env_vars)
    environment: dict[str, Any] = {"env_vars": handed_on(os.environ) | variables}
    if settings.pip:
        environment["pip"] = list(settings.pip)
    if settings.ship_code:
        environment["py_modules"] = [str(Path(tunebook.__file__).parent)]
    return environment


def make_trainer(config: RunConfig, folder: Path, endpoint: str) -> Any:
    """Return Ray Train's trainer, which starts one worker per rank."""
    train, torch_train = import_module("ray.train"), import_module("ray.train.torch")
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    return torch_train.TorchTrainer(
        work,
        train_loop_config={
            "folder": str(folder),
            "endpoint": endpoint,
            "token": os.environ[TOKEN_VARIABLE],
            "working_folder": str(Path.cwd()),
        },
        # Only the workers use this process group; their ranks make their own for training.
        torch_config=torch_train.TorchConfig(backend="gloo", timeout_s=settings.start_timeout_s),
        scaling_config=train.ScalingConfig(
            num_workers=world_size(config),
            use_gpu=config.hardware.generation is not Generation.cpu,
            resources_per_worker=worker_resources(config),
            placement_strategy="STRICT_PACK" if config.hardware.num_nodes == 1 else "PACK",
        ),
        run_config=train.RunConfig(
            name="ray",
            storage_path=str(folder),
            failure_config=train.FailureConfig(
                max_failures=settings.max_failures,
                controller_failure_limit=0,
                # If a machine will be removed, the launcher ends the ranks within this time.
                preemption_grace_s=settings.stop_timeout_s,
            ),
        ),
    )


def main() -> int:
    """Start the workers and wait for them; the run's outcome is in its folder."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.launch.ray")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--endpoint", required=True)
    words = parser.parse_args()
    config = load_config(words.folder / RUN_FILE)
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(settings.start_timeout_s))
    ray = connect(settings.address, runtime_env(settings))
    try:
        make_trainer(config, words.folder, words.endpoint).fit()
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
