"""Whether a Ray run can begin; Ray itself is not needed for any of these."""

import socket
import sys
from importlib import metadata
from pathlib import Path
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


def test_without_the_package_the_line_that_installs_its_lock_is_given(without_ray, project_root):
    with pytest.raises(RulesError, match="not installed in this environment") as caught:
        check_ray(config_of("dolly3b_ray_zero3_offload"))
    (problem,) = caught.value.problems
    assert problem.id == "missing-package"
    program, *words = problem.fix.split()
    assert program == sys.executable
    assert words == [
        *["-m", "pip", "install", "--no-deps", "--require-hashes", "-r"],
        str(project_root / "docker" / "requirements-ray.lock"),
    ]
    assert Path(words[-1]).is_file()


def test_without_the_package_and_a_checkout_the_extra_is_named(without_ray, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "book_root", lambda: tmp_path)
    with pytest.raises(RulesError, match=r"pip install 'tunebook\[ray\]'"):
        check_ray(config_of("dolly3b_ray_zero3_offload"))


def test_in_an_image_nothing_is_installed_while_it_runs(without_ray, monkeypatch):
    monkeypatch.setattr(check, "read_image", object)
    with pytest.raises(RulesError, match=r"(?s)not installed in this image.*an image of your own.*or WHERE=local"):
        check_ray(config_of("dolly3b_ray_zero3_offload"))


def test_a_worker_takes_its_cores_and_a_gpu():
    assert worker_resources(config_of("dolly3b_ray_zero3_offload")) == {"CPU": 28.0, "GPU": 1.0}
    assert worker_resources(config_of("quickstart", "launcher=ray")) == {"CPU": 1.0}


def test_a_cluster_without_enough_gpus_is_refused(with_ray, monkeypatch):
    monkeypatch.setattr(check, "cluster_resources", lambda address: {"CPU": 64.0, "GPU": 4.0})
    with pytest.raises(RequestError, match=r"has 4 GPUs, and 8 workers with 1 each need 8; lower hardware.num_nodes"):
        check_ray(config_of("qwen3b_zero2", "launcher=ray"))
    check_ray(config_of("qwen3b_zero2", "launcher=ray", "hardware.gpus_per_node=4"))


def test_an_address_where_nobody_listens_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        RequestError, match=rf"launcher.address=127.0.0.1:{port}: no Ray cluster .*refused.*address=local"
    ):
        cluster_resources(f"127.0.0.1:{port}")


def test_one_that_listens_and_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(check.sys, "executable", "/bin/sleep")
    monkeypatch.setattr(check, "_command", lambda address: ["sleep", "30"])
    with pytest.raises(RequestError, match=r"no answer within 0.2 s"):
        cluster_resources("auto", timeout_s=0.2)


def test_one_that_breaks_off_shows_its_last_words(monkeypatch):
    program = "import sys; sys.exit('protocol error')"
    monkeypatch.setattr(check, "_command", lambda address: [sys.executable, "-c", program])
    with pytest.raises(RequestError, match=r"\(protocol error\)"):
        cluster_resources("auto")


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


def test_an_end_of_ray_is_no_notice(tmp_path):
    def ask():
        raise RuntimeError("the actor died")

    watch = check.NoticeWatch(ask, tmp_path / ".stop")
    watch.run()
    assert not watch.has_come
    assert StopRequest(tmp_path).name is None
