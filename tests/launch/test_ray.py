"""Whether a Ray run can begin; Ray itself is not needed for any of these."""

from importlib import metadata
from types import SimpleNamespace

import pytest

from tunebook.errors import RequestError, RulesError
from tunebook.launch import ray as check
from tunebook.launch.ray import check_ray, cluster_resources, runtime_env, worker_resources
from tunebook.train.rank_process import StopRequest

from ..conftest import config_of


@pytest.fixture
def with_ray(monkeypatch):
    monkeypatch.setattr(check.metadata, "version", lambda name: "2.60.0")


@pytest.fixture
def without_ray(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(check.metadata, "version", missing)


def test_without_the_package_the_lock_is_named(without_ray, project_root):
    with pytest.raises(RulesError) as caught:
        check_ray(config_of("dolly3b_ray_zero3_offload"))
    (problem,) = caught.value.problems
    assert problem.id == "missing-package"
    assert "docker/requirements-ray.lock" in problem.fix
    assert (project_root / "docker" / "requirements-ray.lock").is_file()


def test_a_worker_takes_its_cores_and_a_gpu():
    assert worker_resources(config_of("dolly3b_ray_zero3_offload")) == {"CPU": 28.0, "GPU": 1.0}
    assert worker_resources(config_of("quickstart", "launcher=ray")) == {"CPU": 1.0}


def test_a_cluster_without_enough_gpus_is_refused(with_ray, monkeypatch):
    monkeypatch.setattr(check, "cluster_resources", lambda address: {"CPU": 64.0, "GPU": 4.0})
    with pytest.raises(RequestError, match=r"has 4 GPUs, and 8 workers with 1 each need 8; lower hardware.num_nodes"):
        check_ray(config_of("qwen3b_zero2", "launcher=ray"))
    check_ray(config_of("qwen3b_zero2", "launcher=ray", "hardware.gpus_per_node=4"))


@pytest.mark.parametrize("program", ["sleep 30", "echo protocol error >&2; exit 1"])
def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch, tmp_path, program):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(python))
    with pytest.raises(RequestError, match=r"launcher\.address=auto: .*(within 0\.5 s|protocol error).*address=local"):
        cluster_resources("auto", timeout_s=0.5 if "sleep" in program else 60)


def test_the_runtime_environment(monkeypatch):
    monkeypatch.setattr("os.environ", {"HF_TOKEN": "t", "HOME": "/h"})
    settings = config_of(
        "quickstart", "launcher=ray", "launcher.pip=['x==1']", "launcher.env_vars=['NCCL_DEBUG=INFO']"
    ).launcher
    assert runtime_env(settings) == {"env_vars": {"HF_TOKEN": "t", "NCCL_DEBUG": "INFO"}, "pip": ["x==1"]}
    settings = config_of("quickstart", "launcher=ray", "launcher.ship_code=true").launcher
    assert runtime_env(settings)["py_modules"][0].endswith("/tunebook")


def test_a_preemption_notice_asks_the_ranks_to_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "_ASK_EVERY_S", 0.0)
    answers = [None, SimpleNamespace(preempted_ranks=[2, 3])]
    watch = check.NoticeWatch(lambda: answers.pop(0), tmp_path / ".stop")
    watch.run()
    assert watch.has_come
    assert StopRequest(tmp_path).name == "a preemption notice for rank 2, 3"
