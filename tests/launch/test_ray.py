"""Whether a Ray run can begin; Ray itself is not needed for any of these."""

import sys
from types import SimpleNamespace

import pytest

from tunebook.config.choices import Generation
from tunebook.errors import RequestError
from tunebook.launch import ray as check
from tunebook.launch.ray import check_ray, cluster_resources, worker_resources
from tunebook.train.rank_process import StopRequest

from ..conftest import wait_for


def test_without_the_package_it_is_refused(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError) as caught:
        check_ray(small("ray"))
    assert caught.value.problem_id == "missing-package"


def test_a_worker_takes_its_cores_and_a_gpu(small):
    assert worker_resources(small("ray", cpus_per_worker=28)) == {"CPU": 28.0, "GPU": 1.0}
    assert worker_resources(small("ray", generation=Generation.cpu)) == {"CPU": 1.0}


def test_a_cluster_without_enough_gpus_is_refused(small, monkeypatch, tmp_path):
    (tmp_path / "ray.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "cluster_resources", lambda address: {"CPU": 64.0, "GPU": 4.0})
    with pytest.raises(RequestError) as caught:
        check_ray(small("ray", gpus=8))
    assert caught.value.problem_id == "ray-too-small"
    check_ray(small("ray", gpus=4))


@pytest.mark.parametrize("program", ["sleep 30", "echo protocol error >&2; exit 1"])
def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch, tmp_path, program):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(python))
    with pytest.raises(RequestError) as caught:
        cluster_resources("auto", timeout_s=0.5 if "sleep" in program else 60)
    assert caught.value.problem_id == "ray-out-of-reach"


def test_a_preemption_notice_asks_the_ranks_to_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "_ASK_EVERY_S", 0.0)
    answers = [None, SimpleNamespace(preempted_ranks=[2, 3])]
    has_come = check.watch_notices(lambda: answers.pop(0), tmp_path / ".stop")
    assert has_come.wait(30)
    wait_for(lambda: StopRequest(tmp_path).name == "a preemption notice for rank 2, 3")
