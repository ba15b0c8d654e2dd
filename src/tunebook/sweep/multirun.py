"""Drive Hydra's multirun from our own command: Hydra combines the values and launches the jobs, we run each one.

`hydra.main` reads `sys.argv`, keeps global state and ends the process on its own errors; all of that stays in here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.book import book_root
from tunebook.config.compose import register_configs
from tunebook.errors import RequestError, TunebookError
from tunebook.sweep.trials import Trial

# Keys of the user's own, which `config.compose` merges by itself because Hydra cannot add them.
_OPEN_DICTIONARY = "dataset.parts."

Job = Callable[[int], None]  # given the trial's number


def check_launcher(recipe: str | None, trial: Trial, launcher: list[str], recipes_dirs: list[Path]) -> None:
    """Let Hydra compose one trial with its launcher. Raises: RequestError with what Hydra says."""
    GlobalHydra.instance().clear()
    register_configs(recipe, recipes_dirs)
    words = [*_recipe_word(recipe), *visible_to_hydra(list(trial.overrides), trial), *launcher]
    try:
        with initialize_config_dir(str(book_root() / "hydra_configs"), version_base="1.3"):
            hydra_compose("config", overrides=words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        said = " ".join(str(error).partition("Config search path")[0].split())
        raise RequestError(
            f"Hydra cannot launch this sweep: {said}. A launcher other than basic is a package of its own, such as "
            "hydra-joblib-launcher",
            problem_id="sweep-launcher",
        ) from error


def visible_to_hydra(overrides: list[str], trial: Trial) -> list[str]:
    """The overrides without those that Hydra cannot take and need not know; the trials themselves get them all."""
    return [
        word for word in overrides if not word.startswith(_OPEN_DICTIONARY) or word.partition("=")[0] in trial.swept
    ]


def run_multirun(
    recipe: str | None, overrides: list[str], launcher: list[str], recipes_dirs: list[Path], folder: Path, job: Job
) -> None:
    """Call `job` once per combination, through Hydra's launcher.

    A job returns its failures as files and never raises, except KeyboardInterrupt, which ends the sweep and comes out
    of here. Raises: TunebookError when Hydra itself fails.
    """

    def task(config: DictConfig) -> None:
        job(int(HydraConfig.get().job.num))

    GlobalHydra.instance().clear()
    register_configs(recipe, recipes_dirs)
    try:
        with _arguments(["--multirun", *_recipe_word(recipe), *overrides, *launcher, *_hydra_settings(folder)]):
            hydra.main(version_base="1.3", config_path=str(book_root() / "hydra_configs"), config_name="config")(task)()
    except SystemExit as error:
        raise TunebookError(
            f"Hydra's multirun ended with exit code {error.code}; its message is above. The finished trials are in "
            f"{folder}",
            problem_id="sweep-broken",
        ) from error
    finally:
        GlobalHydra.instance().clear()


def _recipe_word(recipe: str | None) -> list[str]:
    return [] if recipe is None else [f"recipes={recipe}"]


def _hydra_settings(folder: Path) -> list[str]:
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return [
        f"hydra.sweep.dir='{escaped}'",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]


@contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    original = sys.argv
    sys.argv = ["tunebook-sweep", *arguments]
    try:
        yield
    finally:
        sys.argv = original
