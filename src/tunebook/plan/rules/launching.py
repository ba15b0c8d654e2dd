"""Rules about the launcher's settings (nodes, Slurm jobs, Ray clusters), and about text in its scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from tunebook.config.choices import LauncherName
from tunebook.config.override_text import typed, typed_list
from tunebook.config.schema import LauncherConfig, RayConfig, RunConfig, SlurmConfig
from tunebook.config.unsafe_text import control_character, shown, without_control_characters
from tunebook.config.walk import texts_of
from tunebook.launch.slurm.client import slurm_seconds
from tunebook.plan.rules.frame import Finding, rule, without

# sbatch options that the rendered script sets, and those that would run the same folder more than once.
_RESERVED = {
    "--array": "every task would work in the same run folder; tunebook sweep starts several runs",
    "-a": "every task would work in the same run folder; tunebook sweep starts several runs",
    "--wrap": "the job has a script of its own",
    "--signal": "launcher.stop_timeout_s says when Slurm warns the run",
    "--output": "what the job prints goes into the run folder",
    "-o": "what the job prints goes into the run folder",
    "--nodes": "hardware.num_nodes says it",
    "-N": "hardware.num_nodes says it",
    "--ntasks": "one task per node starts all ranks of it",
    "-n": "one task per node starts all ranks of it",
    "--ntasks-per-node": "one task per node starts all ranks of it",
    "--requeue": "launcher.requeue says it",
    "--no-requeue": "launcher.requeue says it",
    "--time": "launcher.time_limit says it",
    "-t": "launcher.time_limit says it",
    "--wait": "launcher.wait says it",
    "-W": "launcher.wait says it",
    "--parsable": "Tunebook reads sbatch's answer",
}
# Text for the model and names inside data files: no script uses it, so it may hold anything.
_FREE = {
    *("system_prompt", "pad_token", "eos_token", "text_field", "ignore_keys", "chat_template_kwargs"),
    *("question_template", "answer_template"),
}
_ADDRESS = re.compile(r"[^/:\s]+:\d{1,5}")


@rule("node-rank-range", "launcher.node_rank")
def node_rank_range(config: RunConfig) -> Finding | None:
    """Refuse a node rank beyond the last node."""
    node, num_nodes = config.launcher.node_rank, config.hardware.num_nodes
    if config.launcher.name is not LauncherName.local or node < max(1, num_nodes):
        return None
    message = f"{node} is beyond the last of {num_nodes} node{'s' if num_nodes != 1 else ''}, numbered from 0"
    return Finding(message, f"launcher.node_rank={max(0, num_nodes - 1)}")


@rule("master-address-missing", "launcher.master_address")
def master_address_missing(config: RunConfig) -> Finding | None:
    """Require a master address for a later node: node 0 prepares the data and starts the run."""
    launcher = config.launcher
    is_later = 0 < launcher.node_rank < config.hardware.num_nodes
    if launcher.name is not LauncherName.local or not is_later or launcher.master_address:
        return None
    return Finding(f"node {launcher.node_rank} needs the name or address of node 0", "launcher.master_address=HOST")


@rule("node-settings-ignored")
def node_settings_ignored(config: RunConfig) -> Iterator[Finding]:
    """Refuse node_rank, master_address and master_port with other launchers: they find the nodes themselves."""
    if config.launcher.name is LauncherName.local:
        return
    usual = LauncherConfig(name=LauncherName.local)
    for name in ("node_rank", "master_address", "master_port"):
        value, default = getattr(config.launcher, name), getattr(usual, name)
        if value != default:
            message = f"launcher={config.launcher.name.name} does not read this ({value})"
            word = "null" if default is None else default
            yield Finding(message, f"launcher.{name}={word}", key=f"launcher.{name}")


@rule("time-limit-form", "launcher.time_limit")
def time_limit_form(config: RunConfig) -> Finding | None:
    """Require one of Slurm's time formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or settings.time_limit is None:
        return None
    if slurm_seconds(settings.time_limit) is not None:
        return None
    return Finding(f"'{settings.time_limit}' is not a time that sbatch takes", "launcher.time_limit=12:00:00")


@rule("sbatch-option-reserved", "launcher.extra_args")
def sbatch_option_reserved(config: RunConfig) -> Iterator[Finding]:
    """Refuse sbatch options that Tunebook sets: output, nodes, warning and requeue belong together."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig):
        return
    reserved = {option: why for option in settings.extra_args if (why := _RESERVED.get(_option_name(option)))}
    for option, why in reserved.items():
        yield Finding(f"{option}: {why}", without("launcher.extra_args", settings.extra_args, reserved))


def _option_name(option: str) -> str:
    """The option's name: --nodes of --nodes=3 and "--nodes 3", -N of -N3."""
    return re.split(r"[=\s]", option, maxsplit=1)[0] if option.startswith("--") else option[:2]


@rule("container-settings")
def container_settings(config: RunConfig) -> Iterator[Finding]:
    """Refuse mounts without an image, or mounts that are not absolute paths.

    Without an image the ranks run in the environment of the command. A mount is a folder of the node at the same path
    inside.
    """
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or not settings.container_mounts:
        return
    key = "launcher.container_mounts"
    if settings.container_image is None:
        yield Finding("no launcher.container_image is named to mount them in", f"{key}=[]", key=key)
        return
    wrong = [place for place in settings.container_mounts if not place.startswith("/") or set(place) & set(":,")]
    if wrong:
        fix = without(key, settings.container_mounts, wrong)
        yield Finding(f"{wrong[0]!r} is not the absolute path of a folder", fix, key=key)


@rule("ray-address-form", "launcher.address")
def ray_address_form(config: RunConfig) -> Finding | None:
    """Require auto, local, or HOST:PORT.

    A Ray client's address (ray://) reaches a proxy, which Ray Train does not run through.
    """
    settings = config.launcher
    if not isinstance(settings, RayConfig) or settings.address in ("auto", "local"):
        return None
    if _ADDRESS.fullmatch(settings.address):
        return None
    return Finding(f"'{settings.address}' is neither auto, local nor HOST:PORT", "launcher.address=auto")


@rule("ray-variable-form", "launcher.env_vars")
def ray_variable_form(config: RunConfig) -> Finding | None:
    """Require NAME=VALUE."""
    settings = config.launcher
    if not isinstance(settings, RayConfig):
        return None
    wrong = [variable for variable in settings.env_vars if not re.match(r"[A-Za-z_]\w*=", variable)]
    if not wrong:
        return None
    return Finding(
        f"{wrong[0]!r} is not of the form NAME=VALUE", without("launcher.env_vars", settings.env_vars, wrong)
    )


@rule("launcher-settings-mismatch", "launcher.name")
def launcher_settings_mismatch(config: RunConfig) -> Finding | None:
    """Refuse a launcher in another launcher's schema; slurm and ray have their own schemas.

    Changing only launcher.name leaves the other launcher's settings in place; choose the group, such as
    launcher=slurm.
    """
    needed = {LauncherName.slurm: SlurmConfig, LauncherName.ray: RayConfig}.get(config.launcher.name, LauncherConfig)
    if type(config.launcher) is needed:
        return None
    name = config.launcher.name.name
    own = ", ".join(field.name for field in fields(config.launcher))
    return Finding(f"{name} is set in a group with the settings {own}", f"launcher={name}")


@rule("control-characters")
def control_characters(config: RunConfig) -> Iterator[Finding]:
    """Refuse control characters in all text except text that only a model or a data file uses.

    Values reach job scripts and command lines. A line break there ends a comment or an option, and what follows would
    be run as a command. A terminal would obey an escape.
    """
    for key, values, is_list in texts_of(config):
        found = next((control_character(value) for value in values if control_character(value)), None)
        if found is None or not _FREE.isdisjoint(key.split(".")):
            continue
        clean = [without_control_characters(value) for value in values]
        message = f"{', '.join(map(shown, values))} holds {found}"
        yield Finding(message, typed_list(key, clean) if is_list else typed(key, clean[0]), key=shown(key))
