"""What a container holds, against what the launcher has, and in the manifest."""

import json

import pytest

from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.launch.node_facts import code_hash
from tunebook.launch.rendezvous import NodeState
from tunebook.launch.slurm.inside import describe_inside, note_inside, required_code
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.record.manifest import read_manifest, start_manifest

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
DIGEST = "sha256:" + "0" * 64
OF_THE_IMAGE = {"git_commit": "1" * 40, "git_diff_sha256": None, "is_clean": True, "reason": None}


def config_of(*words):
    config = compose("quickstart", ["launcher=slurm", *words]).config
    return resolve_auto(config, NO_GPU).config


def node_with(code, inside):
    """What a node publishes."""
    return NodeState(node=0, ranks=[0], host="a", address="a", reached_at="b", port=1, versions="", code=code,
                     inside=inside)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    start_manifest(tmp_path, config_of(), world_size=1, command=["tunebook", "train"])
    return tmp_path


def environment(**more):
    image = {"generation": "cpu", "torch": "2.13.0"}
    found = {"image_digest": None, "image": image, "lock_sha256": "2" * 64, "installed_sha256": "3" * 64}
    return found | {"python": "3.99", "packages": {"torch": "2.13.0+cpu"}} | more


def test_the_launchers_code_is_required_of_containers_alone_and_not_where_the_images_is_meant(monkeypatch):
    image = "launcher.container_image=x"
    monkeypatch.delenv("TUNEBOOK_USE_IMAGE_SOURCES", raising=False)
    assert required_code(config_of()) is None
    assert required_code(config_of(image)) == code_hash()
    monkeypatch.setenv("TUNEBOOK_USE_IMAGE_SOURCES", "1")
    assert required_code(config_of(image)) is None


def test_a_container_describes_itself_and_nothing_else_does(monkeypatch, tmp_path):
    facts = {
        "generation": "cpu", "torch": "2.13.0", "cuda": None, "min_driver": None, "compute_capabilities": [],
        "arch_list": [], "attention": "none", "lock_sha256": "2" * 64, "sources_sha256": "4" * 64,
        "git_commit": "1" * 40, "git_diff_sha256": None, "base_image": None,
    }  # fmt: skip
    (tmp_path / "image.json").write_text(json.dumps(facts))
    assert describe_inside(config_of()) is None
    monkeypatch.setenv("TUNEBOOK_IMAGE_FILE", str(tmp_path / "image.json"))
    inside = describe_inside(config_of("launcher.container_image=x"))
    assert inside["code"] == OF_THE_IMAGE
    assert inside["environment"]["lock_sha256"] == "2" * 64
    assert inside["environment"]["image"]["sources_sha256"] == "4" * 64


def test_the_manifest_says_what_the_container_holds_and_keeps_the_commit_of_the_same_code(folder):
    before = read_manifest(folder)
    config = config_of(f"launcher.container_image='registry.example/tunebook@{DIGEST}'")
    inside = {"code": OF_THE_IMAGE, "environment": environment(of_a_later_version=1)}
    note_inside(config, folder, node_with(code_hash(), inside))
    after = read_manifest(folder)
    assert after["environment"] == environment(image_digest=DIGEST, variables=None, lock=None), "an earlier version"
    assert after["code"] == before["code"] != OF_THE_IMAGE


def test_other_code_in_the_container_is_the_runs_code(folder):
    differences = {"torch": {"installed": "2.11.0", "locked": "2.13.0"}}
    lock = {"name": "cpu", "sha256": "2" * 64, "differences": differences, "reason": None}
    found = environment(variables={"NCCL_ALGO": "Ring"}, lock=lock, lock_sha256=None)
    inside = {"code": OF_THE_IMAGE, "environment": found}
    note_inside(config_of("launcher.container_image=x"), folder, node_with("5" * 64, inside))
    after = read_manifest(folder)
    assert (after["code"], after["environment"]) == (OF_THE_IMAGE, found)


@pytest.mark.parametrize("image", ["user@host#image", "/data/me@site/tunebook.sqsh"])
def test_what_is_no_digest_is_not_recorded_as_one(folder, image):
    inside = {"code": OF_THE_IMAGE, "environment": environment()}
    config = config_of(f"launcher.container_image='{image}'")
    note_inside(config, folder, node_with("5" * 64, inside))
    assert read_manifest(folder)["environment"]["image_digest"] is None


def test_nodes_without_containers_change_nothing(folder):
    before = read_manifest(folder)
    note_inside(config_of(), folder, node_with("5" * 64, None))
    assert read_manifest(folder) == before
