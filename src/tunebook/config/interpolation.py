"""What `${...}` in a configuration may read: other keys, and a short list of environment variables.

Recipes are often written by others, and the values that they read are written to run.yaml, manifest.json and the
report. So a recipe must not be able to read a token from the environment. The name of a variable may be the result of
another interpolation, so the check is in the resolver and does not look at the text.
"""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import OmegaConf

from tunebook.config.unsafe_text import is_secret_name
from tunebook.errors import causes

# Folders of this machine, its user, and the job.
_NAMES = (
    *("HOME", "USER", "LOGNAME", "HOSTNAME", "PWD", "TMPDIR", "SCRATCH", "WORK", "PROJECT", "STORE", "DATA", "MODELS"),
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME"),
)
_ENDINGS = ("_DIR", "_PATH", "_ROOT", "_HOME", "_FOLDER", "_SCRATCH", "_DATA", "_TMPDIR")
ALLOWED = f"{', '.join(_NAMES)}, and names that end in {', '.join(_ENDINGS)}"
# OmegaConf's own, which read only the configuration.
_RESOLVERS = ("oc.create", "oc.decode", "oc.deprecated", "oc.dict.keys", "oc.dict.values", "oc.env", "oc.select")
_UNSET: Any = object()


class OutsideError(Exception):
    """An interpolation of something forbidden or missing; `advice` is what to type, with `{key}` for the key."""

    def __init__(self, message: str, advice: str, *, problem_id: str) -> None:
        super().__init__(message)
        self.message, self.advice, self.problem_id = message, advice, problem_id


def may_read(variable: str) -> bool:
    """True if a configuration may read an environment variable."""
    return variable in _NAMES or (variable.endswith(_ENDINGS) and not is_secret_name(variable))


def guard_resolvers() -> None:
    """Restrict interpolations to the configuration and the allowed variables.

    Call it before each configuration is resolved, since Hydra registers its own resolvers with every composition.
    """
    OmegaConf.clear_resolvers()
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)


def to_object(tree: Any) -> Any:
    """The tree as dataclasses, with its interpolations resolved. Raises: OmegaConf's errors, also for OutsideError."""
    guard_resolvers()
    return OmegaConf.to_object(tree)


def outside_error(error: BaseException) -> OutsideError | None:
    """The refused interpolation because of which resolving failed; None if it failed for another reason."""
    if (refused := next((one for one in causes(error) if isinstance(one, OutsideError)), None)) is not None:
        return refused
    unknown = re.search(r"Unsupported interpolation type (\S+)", str(error))
    if unknown is None:
        return None
    return OutsideError(
        f"takes its value from '{unknown[1]}', and a configuration may only use {', '.join(_RESOLVERS)}: the clock and "
        "the machine are in no record of a run, so it could not be repeated",
        "{key}=VALUE",
        problem_id="interpolation-refused",
    )


def _read_variable(name: str, default: Any = _UNSET) -> str | None:
    """Like OmegaConf's own `oc.env`, for allowed variables only. Raises: OutsideError."""
    if not may_read(name):
        raise OutsideError(
            f"takes ${{oc.env:{name}}} from the environment, and what a configuration reads is written to run.yaml, "
            f"manifest.json and the report. It may read {ALLOWED}. Tokens (HF_TOKEN, WANDB_API_KEY) are read where "
            "they are needed, by themselves",
            "{key}=VALUE",
            problem_id="interpolation-refused",
        )
    text = os.environ.get(name)
    if text is not None:
        return text
    if default is not _UNSET:
        return None if default is None else str(default)
    raise OutsideError(
        f"takes ${{oc.env:{name}}}, and {name} is not set",
        f"export {name}=VALUE before the command, or {{key}}=VALUE; a recipe may state a default: "
        f"${{oc.env:{name},VALUE}}",
        problem_id="variable-not-set",
    )


def escaped(text: str) -> str:
    """The text escaped so that OmegaConf does not read `${` as an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{2 * found[1]}\\${{", text)
