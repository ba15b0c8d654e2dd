"""A node's command in a container, word by word."""

import json
from pathlib import Path

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.launch.slurm.container import in_container

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
COMMAND = ["/venv/bin/python", "-m", "tunebook.launch.node", "/runs/1"]


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
