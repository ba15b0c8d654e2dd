"""What the containers of a run hold: compared with the launcher's own code, and written into the run's manifest.

A container's node describes it when it joins (`launch.node`); the launcher, which is outside, knows none of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tunebook.config.book import book_root
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.launch.node_facts import code_hash
from tunebook.launch.rendezvous import NodeState
from tunebook.launch.slurm.container import is_contained
from tunebook.record.manifest import read_manifest, update_manifest
from tunebook.record.provenance import describe_code, describe_environment

USE_IMAGE_SOURCES_VARIABLE = "TUNEBOOK_USE_IMAGE_SOURCES"  # "1": what the image holds is meant to run


def required_code(config: RunConfig) -> str | None:
    """The hash of the code that containers must hold; None where there are none, or theirs may be any.

    Versions are not compared: where the launcher runs there need be no torch.
    """
    if not is_contained(config) or os.environ.get(USE_IMAGE_SOURCES_VARIABLE) == "1":
        return None
    return code_hash()


def describe_inside(config: RunConfig) -> dict[str, Any] | None:
    """Code and packages of the container that this runs in; None where it is in none."""
    if not is_contained(config):
        return None
    environment = describe_environment(config.hardware.generation.name)
    return {"code": describe_code(book_root()), "environment": environment}


def note_inside(config: RunConfig, folder: Path, node: NodeState) -> None:
    """Replace in the manifest what was found outside by what a node's container holds."""
    inside, settings = node.inside, config.launcher
    if inside is None or not isinstance(settings, SlurmConfig):
        return
    known = read_manifest(folder)["environment"]  # an image's own Tunebook may say more
    environment = {name: value for name, value in inside["environment"].items() if name in known}
    _, _, last = (settings.container_image or "").rpartition("@")  # before it a user's name may have one, too
    digest = last if last.startswith("sha256:") else environment.get("image_digest")
    facts = {"environment": {"variables": None, "lock": None} | environment | {"image_digest": digest}}
    if node.code != code_hash():  # otherwise the commit that was found outside is the code's, too
        facts["code"] = inside["code"]
    update_manifest(folder, facts)
