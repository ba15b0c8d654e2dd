"""A node's command in a container, word by word."""

import json
from pathlib import Path

import pytest

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.launch.slurm.container import in_container

FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "TUNEBOOK_HOME", "TUNEBOOK_CACHE")
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
COMMAND = ["/venv/bin/python", "-m", "tunebook.launch.node", "/runs/1"]


@pytest.fixture(autouse=True)
def no_folders(monkeypatch):
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)


def config_of(*words):
    config = compose(words[0], ["launcher=slurm", *words[1:]]).config
    return resolve_auto(config, NO_GPU).config


def test_without_an_image_nothing_changes():
    assert in_container(config_of("quickstart"), Path("/runs/1"), COMMAND) == COMMAND


def test_pyxis_takes_options_of_srun(monkeypatch, tmp_path):
    monkeypatch.chdir("/")
    (tmp_path / "prepared.json").write_text(json.dumps({"folder": "/cache/prepared/1"}))
    config = config_of("qwen3b_zero2", "launcher.container_image=registry/x:1", "launcher.container_mounts=[/data]")
    assert in_container(config, tmp_path, COMMAND) == [
        "--container-image=registry/x:1",
        f"--container-mounts=/:/,{tmp_path}:{tmp_path},/data:/data,/cache/prepared/1:/cache/prepared/1",
        "--container-workdir=/",
        *["python", "-m", "tunebook.launch.node", "/runs/1"],
    ]


def test_docker_gets_gpus_the_hosts_network_and_no_more_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"NCCL_DEBUG": "INFO", "HF_TOKEN": "secret", "AWS_SECRET": "x"}.items():
        monkeypatch.setenv(name, value)
    image = ["launcher.container_image=x", "launcher.container_runtime=docker"]
    words = in_container(config_of("qwen3b_zero2", *image), tmp_path / "run", COMMAND)
    text = " ".join(words)
    assert text.startswith("docker run --rm --network host --ipc host --gpus all --ulimit memlock=-1 --user ")
    assert f"--volume {tmp_path}:{tmp_path} --volume {tmp_path / 'run'}:{tmp_path / 'run'}" in text
    assert "--env HF_TOKEN " in text
    assert "--env NCCL_DEBUG " in text
    assert "secret" not in text
    assert "AWS_SECRET" not in text
    assert text.endswith("--entrypoint python x -m tunebook.launch.node /runs/1")
    on_cpu = in_container(config_of("quickstart", *image), tmp_path / "run", COMMAND)
    assert "--gpus" not in on_cpu


def test_folders_that_variables_name_are_there_inside(monkeypatch, tmp_path):
    """Else every rank would end for want of its book, or load the model from the network again."""
    monkeypatch.chdir(tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name) if name != "HF_HOME" else "HF_HOME")  # from the working folder
    config = config_of("quickstart", "launcher.container_image=x")
    mounts = in_container(config, tmp_path / "run", COMMAND)[1]
    assert mounts.endswith("," + ",".join(f"{tmp_path / name}:{tmp_path / name}" for name in FOLDERS))
    docker = config_of("quickstart", "launcher.container_image=x", "launcher.container_runtime=docker")
    text = " ".join(in_container(docker, tmp_path / "run", COMMAND))
    for name in FOLDERS:
        assert f"--volume {tmp_path / name}:{tmp_path / name}" in text
        assert f"--env {name}={tmp_path / name} " in text


def test_a_home_that_is_written_as_a_tilde_is_the_same_inside(monkeypatch, tmp_path):
    """Inside, ~ is the home of another user, where nothing is mounted."""
    home = tmp_path / "home"
    (home / "hub").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    docker = config_of("quickstart", "launcher.container_image=x", "launcher.container_runtime=docker")
    text = " ".join(in_container(docker, tmp_path / "run", COMMAND))
    assert f"--volume {home / 'hub'}:{home / 'hub'} " in text
    assert f"--env HF_HUB_CACHE={home / 'hub'} " in text
    assert "~" not in text


def test_folders_that_are_not_there_are_not_named_inside(monkeypatch, tmp_path):
    for name in FOLDERS:
        monkeypatch.setenv(name, str(tmp_path / "nowhere" / name))
    docker = config_of("quickstart", "launcher.container_image=x", "launcher.container_runtime=docker")
    text = " ".join(in_container(docker, tmp_path / "run", COMMAND))
    assert "nowhere" not in text
    assert [name for name in FOLDERS if f"--env {name}" in text] == []
