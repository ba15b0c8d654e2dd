"""The launchers that a parity accepts."""

import pytest

from tunebook.commands.parity import check_attended
from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def config_of(*words):
    return resolve_auto(compose("quickstart", ["hardware=cpu", *words]).config, NO_GPU).config


def test_a_job_that_nobody_waits_for_is_refused():
    with pytest.raises(RequestError, match=r"before there is a loss to compare; .*: launcher\.wait=true$") as caught:
        check_attended(config_of("launcher=slurm"))
    assert "--launcher" not in caught.value.message  # an option of sweeps
    check_attended(config_of("launcher=slurm", "launcher.wait=true"))


@pytest.mark.parametrize("launcher", [["launcher=local"], ["launcher=ray", "launcher.address=local"]])
def test_several_nodes_need_a_launcher_that_starts_all_of_them(launcher):
    name = launcher[0].removeprefix("launcher=")
    with pytest.raises(RequestError, match=rf"num_nodes=2: with launcher={name} on .*use launcher=slurm launcher.wait"):
        check_attended(config_of(*launcher, "hardware.num_nodes=2"))
    check_attended(config_of(*launcher))


def test_cluster_of_several_nodes_is_accepted():
    check_attended(config_of("launcher=ray", "launcher.address=10.0.0.1:6379", "hardware.num_nodes=2"))
