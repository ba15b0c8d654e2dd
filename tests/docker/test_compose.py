"""compose.yaml and Dockerfile.dockerignore as text: what a service gets, what the sandbox does not, what a build sees.

Docker's own reading of them (`docker compose config`, builds, runs) is in tests/system/docker.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
RUNNING = ("train", "sweep", "plan", "chat", "eval")  # the services that run the image


COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def targets(service: dict[str, Any]) -> list[str]:
    """Where a service's volumes are mounted, as written."""
    return [volume["target"] if isinstance(volume, dict) else volume.rsplit(":", 1)[1] for volume in service["volumes"]]


def without_env(text: str) -> str:
    """A text as it is without .env: `${NAME:-default}` becomes the default, and `${NAME:+text}` nothing."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", re.sub(r"\$\{\w+:\+[^}]*\}", "", text))


@pytest.mark.parametrize("name", RUNNING)
def test_a_service_is_one_command_without_rights_that_writes_outputs_and_caches(name: str) -> None:
    service = SERVICES[name]
    assert (service["entrypoint"], service["command"]) == (["/opt/tunebook/entrypoint.sh", name], [])
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not {"privileged", "cap_add"} & service.keys()
    assert "shm_size" in service
    assert service["ulimits"] == {"memlock": -1, "stack": 64 << 20}
    writable = {"/cache", "/cache/huggingface", "/handover", "${TUNEBOOK_CHECKOUT:-/run/no}/outputs"}
    for volume, target in zip(service["volumes"], targets(service), strict=True):
        is_read_only = isinstance(volume, dict) and volume.get("read_only", False)
        assert is_read_only or target in writable
    assert {"HF_TOKEN", "WANDB_API_KEY"} <= service["environment"].keys()
    for variable, value in service["environment"].items():  # tokens are passed by name only
        assert value is None or value.startswith("${TUNEBOOK_"), f"{variable}={value}"
        assert value is None or not re.search("TOKEN|KEY|SECRET|PASSWORD", variable)


def test_the_sandbox_has_nothing_of_the_users() -> None:
    sandbox = SERVICES["sandbox"]
    assert sandbox["network_mode"] == sandbox["ipc"] == "none"
    assert sandbox["read_only"] is True
    assert sandbox["cap_drop"] == ["ALL"]
    assert sandbox["security_opt"] == ["no-new-privileges:true"]
    assert sandbox["volumes"] == ["handover:/closed/handover"]
    assert (
        not {"environment", "secrets", "deploy", "devices", "gpus", "privileged", "group_add", "cap_add", "init"}
        & sandbox.keys()
    )
    assert {"pids_limit", "mem_limit", "memswap_limit", "cpus"} <= sandbox.keys()
    assert all("size=" in folder for folder in sandbox["tmpfs"])


def test_without_env_file_every_path_exists_and_the_stage_that_says_so_is_built() -> None:
    files = [secret["file"] for secret in COMPOSE["secrets"].values()]
    mounts = [volume["source"] for volume in SERVICES["train"]["volumes"] if isinstance(volume, dict)]
    folders = [service["build"]["additional_contexts"]["wheels"] for service in SERVICES.values()]
    for path in map(without_env, [*files, *mounts, *folders]):
        assert (ROOT / path).exists(), path
    assert list(DOCKER.glob("*.whl")) == []  # docker/ stands in for a folder of wheels
    assert {without_env(SERVICES[name]["build"]["target"]) for name in RUNNING} == {"unset"}
    assert {without_env(SERVICES[name]["image"]) for name in RUNNING} == {"tunebook:unset"}


# --- what reaches a build, and what an image's hash covers


def sources_hash(folder: Path) -> str:
    return subprocess.check_output([str(DOCKER / "sources_hash.sh"), str(folder)], text=True).strip()


def test_the_hash_leaves_out_what_the_build_does_not_see(tmp_path: Path) -> None:
    lines = [line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    hashed = ("src", "hydra_configs", "recipes", "docker")
    assert {line[1:] for line in lines if line.startswith("!")} == {*hashed, "pyproject.toml", "LICENSE"}
    of_the_host = ("docker/front", "docker/front.sh", "docker/venv.sh")
    left_out = [line for line in lines[1:] if not line.startswith("!")]
    assert left_out == ["**/__pycache__", "**/*.pyc", "docker/*/image.digest", *of_the_host]
    for name in (*hashed, "docker/cpu", "docker/front", "src/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    before = sources_hash(tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", before)
    unseen = ("src/__pycache__/a", "src/a.pyc", "docker/cpu/image.digest", "docker/front/a", "LICENSE")
    for name in (*unseen, *of_the_host[1:]):
        (tmp_path / name).touch()
    assert sources_hash(tmp_path) == before
    for name in ("src/a.py", "docker/image.digest.txt", "recipes/a b\nc", "hydra_configs/.hidden"):
        (tmp_path / name).touch()
        assert sources_hash(tmp_path) != before
        before = sources_hash(tmp_path)
    (tmp_path / "src" / "a.py").rename(tmp_path / "src" / "b.py")
    assert sources_hash(tmp_path) != before
