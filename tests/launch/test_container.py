"""A node's command in a container, word by word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.commands.preflight import check_sandbox
from tunebook.config.book import book_root
from tunebook.config.choices import ContainerRuntime, Generation
from tunebook.config.schema import EvaluationConfig, ModelConfig
from tunebook.errors import RequestError
from tunebook.launch import container
from tunebook.launch.container import container_mounts, in_container, record_container
from tunebook.record.manifest import read_manifest, start_manifest

FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "TUNEBOOK_HOME", "TUNEBOOK_CACHE")
COMMAND = ["/venv/bin/python", "-m", "tunebook.launch.local", "/runs/1"]


@pytest.fixture(autouse=True)
def no_folders(monkeypatch, tmp_path):
    for name in (*FOLDERS, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))


@pytest.fixture
def in_docker(small):
    def config(generation=Generation.hopper, **sections):
        runtime = ContainerRuntime.docker
        return small("slurm", generation=generation, sections=sections, container_image="x", container_runtime=runtime)

    return config


@pytest.fixture
def in_pyxis(small):
    return lambda **settings: small("slurm", **{"container_image": "registry/x:1"} | settings)


def test_without_an_image_nothing_changes(small):
    assert in_container(small("slurm"), Path("/runs/1"), COMMAND) == COMMAND


def test_pyxis_takes_options_of_srun(in_pyxis, monkeypatch, tmp_path):
    monkeypatch.chdir("/")
    data = tmp_path / "prepared"
    data.mkdir()
    (data / "prepared.json").write_text(json.dumps({"image_folders": ["/photos"]}))
    (tmp_path / "prepared.json").write_text(json.dumps({"folder": str(data)}))
    config = in_pyxis(container_mounts=["/data"])
    assert in_container(config, tmp_path, COMMAND) == [
        "--container-image=registry/x:1",
        f"--container-mounts=/:/,{tmp_path}:{tmp_path},/data:/data,{data}:{data},/photos:/photos",
        "--container-workdir=/",
        *["python", "-m", "tunebook.launch.local", "/runs/1"],
    ]


def test_docker_gets_gpus_the_hosts_network_and_no_more_of_the_environment(in_docker, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    passed = ("NCCL_DEBUG", "HF_TOKEN", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN")
    for name in (*passed, "AWS_SECRET"):
        monkeypatch.setenv(name, "secret")
    words = in_container(in_docker(), tmp_path / "run", COMMAND)
    text = " ".join(words)
    assert text.startswith("docker run --rm --network host --ipc host --gpus all --ulimit memlock=-1 --interactive ")
    assert f"--volume {tmp_path}:{tmp_path} --volume {tmp_path / 'run'}:{tmp_path / 'run'}" in text
    assert all(f"--env {name} " in text for name in passed)
    assert "secret" not in text
    assert "AWS_SECRET" not in text
    assert text.endswith("--entrypoint python x -m tunebook.launch.local /runs/1")
    on_cpu = in_docker(Generation.cpu)
    assert "--gpus" not in in_container(on_cpu, tmp_path / "run", COMMAND)


def test_folders_that_variables_name_are_there_inside(in_docker, in_pyxis, monkeypatch, tmp_path):
    """Else every rank would end for want of its book, or load the model from the network again."""
    monkeypatch.chdir(tmp_path)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name) if name != "HF_HOME" else "HF_HOME")  # from the working folder
    mounts = in_container(in_pyxis(), tmp_path / "run", COMMAND)[1]
    assert mounts.endswith("," + ",".join(f"{tmp_path / name}:{tmp_path / name}" for name in FOLDERS))
    text = " ".join(in_container(in_docker(), tmp_path / "run", COMMAND))
    for name in FOLDERS:
        assert f"--volume {tmp_path / name}:{tmp_path / name}" in text
        assert f"--env {name}={tmp_path / name} " in text


def test_a_home_is_the_same_inside_and_missing_folders_are_not_named(in_docker, monkeypatch, tmp_path):
    """Inside, ~ is the home of another user, where nothing is mounted."""
    home = tmp_path / "home"
    (home / "hub").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", "~/hub")
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "nowhere"))
    text = " ".join(in_container(in_docker(), tmp_path / "run", COMMAND))
    assert f"--volume {home / 'hub'}:{home / 'hub'} " in text
    assert f"--env HF_HUB_CACHE={home / 'hub'} " in text
    assert "~" not in text and "nowhere" not in text


def test_unnamed_caches_are_those_of_this_machine_inside_too(in_docker, in_pyxis, monkeypatch, tmp_path):
    """An image has caches of its own, which are empty."""
    home = tmp_path / "home"
    hub, own = home / ".cache" / "huggingface", home / ".cache" / "tunebook"
    for folder in (hub, own):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    text = " ".join(in_container(in_docker(), tmp_path / "run", COMMAND))
    for name, folder in {"HF_HOME": hub, "TUNEBOOK_CACHE": own}.items():
        assert f"--volume {folder}:{folder} " in text
        assert f"--env {name}={folder} " in text
    pyxis = in_container(in_pyxis(), tmp_path / "run", COMMAND)
    assert pyxis[3:6] == ["env", f"HF_HOME={hub}", f"TUNEBOOK_CACHE={own}"]
    assert pyxis[6:8] == ["python", "-m"]


def test_the_named_checkpoint_and_task_files_are_there_inside(in_docker, monkeypatch, tmp_path):
    """They were found on this machine, and the ranks and the evaluation would look for them in vain."""
    (tmp_path / "here" / "tasks").mkdir(parents=True)
    (tmp_path / "far" / "run").mkdir(parents=True)
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tasks = [str(tmp_path / "tasks" / "own.yaml"), "tasks/near.yaml", "book:recipes/quickstart/task.yaml", "gsm8k"]
    config = in_docker(
        model=ModelConfig(path="book:recipes/quickstart/model"), evaluation=EvaluationConfig(tasks=tasks)
    )
    config.training.resume = str(tmp_path / "far" / "run")
    mounts = container_mounts(config, tmp_path / "run")
    model, named = "recipes/quickstart/model", [str(tmp_path / "far" / "run"), str(tmp_path / "tasks")]
    assert mounts == [*(str(tmp_path / name) for name in ("here", "run")), str(book_root() / model), *named]
    config.training.resume = str(tmp_path / "gone")  # Docker would make it, as root
    assert str(tmp_path / "gone") not in container_mounts(config, tmp_path / "run")


def test_programs_that_no_container_would_execute_are_refused_before_the_training(in_docker):
    for tasks, is_refused in ((["small_python"], True), (["gsm8k"], False)):
        config = in_docker(evaluation=EvaluationConfig(tasks=tasks))
        if not is_refused:
            check_sandbox(config)
            continue
        with pytest.raises(RequestError) as error:
            check_sandbox(config)
        assert error.value.problem_id == "sandbox-missing"
        config.launcher.container_mounts = ["/handover"]
        check_sandbox(config)


DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("image", "digest"),
    [
        (f"registry.example/tunebook@{DIGEST}", DIGEST),
        ("/data/me@site/tunebook.sqsh", None),
    ],
)
def test_the_manifest_describes_the_container_and_the_code_that_runs(in_pyxis, monkeypatch, tmp_path, image, digest):
    config = in_pyxis(container_image=image)
    start_manifest(tmp_path, config, world_size=1, command=["tunebook", "train"])
    before = read_manifest(tmp_path)
    inside = before["environment"] | {"python": "3.99", "image_digest": None}
    monkeypatch.setattr(container, "describe_environment", lambda generation: inside | {"of_a_later_version": 1})
    monkeypatch.setattr(container, "describe_code", lambda checkout: {"git_commit": "1" * 40})
    monkeypatch.delenv("TUNEBOOK_USE_IMAGE_SOURCES", raising=False)
    record_container(config, tmp_path)
    after = read_manifest(tmp_path)
    assert after["environment"] == inside | {"image_digest": digest}
    assert after["code"] == before["code"]
    monkeypatch.setenv("TUNEBOOK_USE_IMAGE_SOURCES", "1")
    record_container(config, tmp_path)
    assert read_manifest(tmp_path)["code"]["git_commit"] == "1" * 40
