"""Rules about the launcher's settings: which node this is, what a Slurm job may be given, where a Ray cluster is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from tunebook.config.choices import ContainerRuntime, LauncherName
from tunebook.config.override_text import typed, typed_list
from tunebook.config.schema import LauncherConfig, RayConfig, RunConfig, SlurmConfig
from tunebook.plan.rules.frame import Finding, Level, Rule, rule
from tunebook.slurm import slurm_seconds

# Options of sbatch that the rendered script sets, and those that would run the same folder more than once.
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
_EARLIER_S = 60  # than asked for Slurm may send its warning (`man sbatch`, --signal)
_ADDRESS = re.compile(r"[^/:\s]+:\d{1,5}")


@rule(
    "node-rank-range",
    summary="launcher.node_rank is not the number of one of the nodes.",
    why="The nodes of a run are numbered from 0 to hardware.num_nodes - 1, each once.",
    advice="Number the nodes from 0; on one node leave launcher.node_rank out.",
)
def node_rank_range(config: RunConfig) -> Finding | None:
    """Beyond the last node."""
    node, num_nodes = config.launcher.node_rank, config.hardware.num_nodes
    if config.launcher.name is not LauncherName.local or node < max(1, num_nodes):
        return None
    message = f"{node} is beyond the last of {num_nodes} node{'s' if num_nodes != 1 else ''}, numbered from 0"
    return Finding(key="launcher.node_rank", message=message, fix=f"launcher.node_rank={max(0, num_nodes - 1)}")


@rule(
    "master-address-missing",
    summary="A later node does not know where node 0 is.",
    why="Every node but the first calls node 0, which prepares the data, makes the run folder and says when to start.",
    advice="Name node 0 as this node reaches it: launcher.master_address=HOST.",
)
def master_address_missing(config: RunConfig) -> Finding | None:
    """A node rank without an address."""
    launcher = config.launcher
    is_later = 0 < launcher.node_rank < config.hardware.num_nodes
    if launcher.name is not LauncherName.local or not is_later or launcher.master_address:
        return None
    message = f"node {launcher.node_rank} needs the name or address of node 0"
    return Finding(key="launcher.master_address", message=message, fix="launcher.master_address=HOST")


@rule(
    "node-settings-ignored",
    summary="Settings for nodes that are started by hand, with a launcher that starts them itself.",
    why="Slurm and Ray number the nodes and find the addresses.",
    advice="Leave the setting out, or start the nodes by hand with launcher=local.",
)
def node_settings_ignored(config: RunConfig) -> Iterator[Finding]:
    """node_rank, master_address and master_port belong to launcher=local."""
    if config.launcher.name is LauncherName.local:
        return
    usual = LauncherConfig(name=LauncherName.local)
    for name in ("node_rank", "master_address", "master_port"):
        value, default = getattr(config.launcher, name), getattr(usual, name)
        if value != default:
            message = f"launcher={config.launcher.name.name} does not read this ({value})"
            word = "null" if default is None else default
            yield Finding(key=f"launcher.{name}", message=message, fix=f"launcher.{name}={word}")


@rule(
    "time-limit-too-short",
    summary="A Slurm job would be asked to stop as soon as it starts.",
    why="Slurm warns a run launcher.stop_timeout_s before launcher.time_limit, or up to a minute earlier, so that it "
    "can save and be requeued. A turn that ends before its first step saves nothing, and the next would not either.",
    advice="Raise launcher.time_limit, or lower launcher.stop_timeout_s to what a save takes.",
)
def time_limit_too_short(config: RunConfig) -> Finding | None:
    """The warning may come before the first step."""
    settings = config.launcher
    left_s = _seconds_before_the_warning(settings)
    if left_s is None or left_s > 0:
        return None
    assert isinstance(settings, SlurmConfig)
    limit = f"launcher.time_limit={settings.time_limit}"
    message = f"{settings.stop_timeout_s} s of warning, up to {_EARLIER_S} s early, leave nothing of {limit}"
    return Finding(key="launcher.time_limit", message=message, fix=_long_enough(settings))


@rule(
    "time-limit-too-short-for-a-slow-start",
    level=Level.warning,
    summary="A turn of a Slurm job that starts slowly would end before its first step.",
    why="A start may take launcher.start_timeout_s before it is given up. Where it takes that long, and "
    "launcher.time_limit holds no more than that and the warning before its end (launcher.stop_timeout_s, up to a "
    "minute early), the turn saves nothing and is not requeued.",
    advice="Raise launcher.time_limit, or lower launcher.start_timeout_s to what a start takes on this cluster.",
)
def time_limit_too_short_for_a_slow_start(config: RunConfig) -> Finding | None:
    """Enough for the warning, but not for the longest start that is waited for and one step."""
    settings = config.launcher
    left_s = _seconds_before_the_warning(settings)
    if left_s is None or left_s <= 0 or left_s > settings.start_timeout_s:
        return None
    message = (
        f"{left_s} s before the run is warned are less than the start may take "
        f"(launcher.start_timeout_s={settings.start_timeout_s})"
    )
    return Finding(key="launcher.time_limit", message=message, fix=_long_enough(settings))


def _seconds_before_the_warning(settings: LauncherConfig) -> int | None:
    """What a turn of a Slurm job has at least to start and train; None without a limit that can be read."""
    if not isinstance(settings, SlurmConfig) or settings.time_limit is None:
        return None
    limit_s = slurm_seconds(settings.time_limit)
    if not limit_s:  # sbatch takes 0 for no limit
        return None
    return -(-limit_s // 60) * 60 - settings.stop_timeout_s - _EARLIER_S  # Slurm rounds a limit up to minutes


def _long_enough(settings: LauncherConfig) -> str:
    """A limit that holds the longest start that is waited for, as long again for steps, and the end."""
    minutes = -(-(2 * settings.start_timeout_s + settings.stop_timeout_s + _EARLIER_S) // 60)
    return f"launcher.time_limit={minutes}"


@rule(
    "sbatch-option-reserved",
    summary="launcher.extra_args holds an option that the job script sets itself, or that would break it.",
    why="The script, its output, its nodes and the way it is warned and requeued belong together.",
    advice="Take the option out and use the key that the message names.",
)
def sbatch_option_reserved(config: RunConfig) -> Iterator[Finding]:
    """Options that are Tunebook's."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig):
        return
    rest = [option for option in settings.extra_args if _why_reserved(option) is None]
    for option in settings.extra_args:
        if why := _why_reserved(option):
            fix = typed_list("launcher.extra_args", rest)
            yield Finding(key="launcher.extra_args", message=f"{option}: {why}", fix=fix)


def _why_reserved(option: str) -> str | None:
    """Why an option is not the user's; None where it is. sbatch takes every beginning of a name that is no other's."""
    name = _option_name(option)
    if len(name) <= len("--") or not name.startswith("--"):
        return _RESERVED.get(name)
    return _RESERVED.get(name) or next((why for known, why in _RESERVED.items() if known.startswith(name)), None)


def _option_name(option: str) -> str:
    """--nodes of --nodes=3 and "--nodes 3"; of a short one its letter, to which the value may be attached: -N3.

    Short ones that take no value may stand before it in the same word: -HN3.
    """
    if option.startswith("--"):
        return re.split(r"[=\s]", option, maxsplit=1)[0]
    return re.sub(r"^-[HIkOQsv]+(?=\w)", "-", option)[:2]


@rule(
    "container-settings",
    summary="Settings of a container that is not used, or mounts that are no absolute paths.",
    why="Without launcher.container_image the ranks run in the environment that the command is typed in. A mount is a "
    "folder of the node at the same path inside.",
    advice="Name launcher.container_image, or leave the mounts out; write them as absolute paths.",
)
def container_settings(config: RunConfig) -> Iterator[Finding]:
    """Mounts without an image, or of another form."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or not settings.container_mounts:
        return
    key = "launcher.container_mounts"
    if settings.container_image is None:
        yield Finding(key=key, message="no launcher.container_image is named to mount them in", fix=f"{key}=[]")
        return
    wrong = [place for place in settings.container_mounts if not place.startswith("/") or set(place) & set(":,")]
    if wrong:
        rest = [place for place in settings.container_mounts if place not in wrong]
        yield Finding(key=key, message=f"{wrong[0]!r} is no absolute path of a folder", fix=typed_list(key, rest))


@rule(
    "container-on-shared-node",
    summary="Containers of plain Docker on nodes that are shared with other jobs.",
    why="Slurm confines a job to its GPUs and cores by control groups, which a container of Docker's is not in: it "
    "sees all GPUs of the node, those of other jobs too. pyxis starts containers inside the job.",
    advice="Take whole nodes (launcher.cpus_per_task=null), or launcher.container_runtime=pyxis.",
)
def container_on_shared_node(config: RunConfig) -> Finding | None:
    """Docker and a part of a node's cores."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or settings.container_image is None or settings.cpus_per_task is None:
        return None
    if settings.container_runtime is not ContainerRuntime.docker:
        return None
    message = f"docker does not keep to {settings.cpus_per_task} cores and the job's GPUs on a node shared with others"
    return Finding(key="launcher.container_runtime", message=message, fix="launcher.cpus_per_task=null")


@rule(
    "container-image-without-registry",
    summary="An image for pyxis by a name that only Docker's own engine would know.",
    why="pyxis knows no image of the node's Docker: enroot fetches a name without `#` from Docker Hub, where anybody "
    "may have published one of that name. A registry stands before a `#`, and not before a `/`.",
    advice="Push the image to a registry of your own (make push REGISTRY=host/path) and name it as host#path:tag, or "
    "as a file.sqsh with its folder; or run images of the nodes' own with launcher.container_runtime=docker.",
)
def container_image_without_registry(config: RunConfig) -> Finding | None:
    """A bare name, or one as Docker writes it. Source: enroot's import (docker://[USER@][REGISTRY#]IMAGE[:TAG])."""
    settings = config.launcher
    if not isinstance(settings, SlurmConfig) or settings.container_runtime is not ContainerRuntime.pyxis:
        return None
    image = settings.container_image or ""
    host, slash, rest = image.partition("/")
    names_registry = bool(slash) and ("." in host.lstrip(".") or ":" in host)
    if not image or "#" in image or image.endswith(".sqsh") or image[0] in "/." or (slash and not names_registry):
        return None
    as_enroot_has_it = typed("launcher.container_image", f"{host}#{rest}")
    fix = as_enroot_has_it if names_registry else "launcher.container_runtime=docker"
    message = f"pyxis would fetch {image} from Docker Hub, where anybody may have published it"
    return Finding(key="launcher.container_image", message=message, fix=fix)


@rule(
    "ray-address-form",
    summary="launcher.address is no address of a Ray cluster.",
    why="It is HOST:PORT of the head node (6379 unless started with another), `auto` on a machine of the cluster, or "
    "`local`. A Ray client's address (ray://) reaches a proxy, which Ray Train does not run through.",
    advice="Type launcher.address=HOST:6379, or run the command on a machine of the cluster with auto.",
)
def ray_address_form(config: RunConfig) -> Finding | None:
    """auto, local, or HOST:PORT."""
    settings = config.launcher
    if not isinstance(settings, RayConfig) or settings.address in ("auto", "local"):
        return None
    if _ADDRESS.fullmatch(settings.address):
        return None
    message = f"'{settings.address}' is neither auto, local nor HOST:PORT"
    return Finding(key="launcher.address", message=message, fix="launcher.address=auto")


@rule(
    "launcher-settings-mismatch",
    summary="The launcher's name and its settings belong to different launchers.",
    why="Changing only launcher.name leaves the other launcher's settings in place.",
    advice="Choose the group as a whole, such as launcher=slurm.",
)
def launcher_settings_mismatch(config: RunConfig) -> Finding | None:
    """slurm and ray have schemas of their own."""
    needed = {LauncherName.slurm: SlurmConfig, LauncherName.ray: RayConfig}.get(config.launcher.name, LauncherConfig)
    if type(config.launcher) is needed:
        return None
    name = config.launcher.name.name
    own = ", ".join(field.name for field in fields(config.launcher))
    message = f"{name} is set in a group with the settings {own}"
    return Finding(key="launcher.name", message=message, fix=f"launcher={name}")


@rule(
    "ray-variable-form",
    summary="launcher.env_vars holds something that sets no variable.",
    why="Each entry sets one environment variable of the workers.",
    advice="Write launcher.env_vars=['NAME=VALUE'], with the quotes.",
)
def ray_variable_form(config: RunConfig) -> Finding | None:
    """NAME=VALUE."""
    settings = config.launcher
    if not isinstance(settings, RayConfig):
        return None
    wrong = [variable for variable in settings.env_vars if not re.match(r"[A-Za-z_]\w*=", variable)]
    if not wrong:
        return None
    rest = [variable for variable in settings.env_vars if variable not in wrong]
    message = f"{wrong[0]!r} is not of the form NAME=VALUE"
    return Finding(key="launcher.env_vars", message=message, fix=typed_list("launcher.env_vars", rest))


RULES: tuple[Rule, ...] = (
    node_rank_range,
    master_address_missing,
    node_settings_ignored,
    time_limit_too_short,
    time_limit_too_short_for_a_slow_start,
    sbatch_option_reserved,
    container_settings,
    container_on_shared_node,
    container_image_without_registry,
    ray_address_form,
    ray_variable_form,
    launcher_settings_mismatch,
)
