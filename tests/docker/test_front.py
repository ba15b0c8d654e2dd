"""docker/front.sh: where a command runs, in which image, and that its arguments and exit code arrive unchanged.

The texts of docker and nvidia-smi were printed on real machines.
"""

from __future__ import annotations

import re

import pytest

from tunebook.config.choices import Generation
from tunebook.facts.generations import GENERATIONS, capability_text, image_for_driver

TRAIN = ("run", "train", "quickstart")
ONE_GPU = "0, GPU-5f3c7a10-0000-1111-2222-333344445555, {}, {}, {}\n"
A100 = ONE_GPU.format("8.0", "580.95.05", "NVIDIA A100-SXM4-80GB")
V100_AND_A100 = (
    ONE_GPU.format("7.0", "580.95.05", "Tesla V100-SXM2-32GB")
    + "1, GPU-77aa0000-0000-1111-2222-333344445555, 8.0, 580.95.05, NVIDIA A100-SXM4-80GB\n"
    + "2, GPU-88bb0000-0000-1111-2222-333344445555, 8.0, 580.95.05, NVIDIA A100-SXM4-80GB\n"
)
DIGEST = "registry.example/path/tunebook@sha256:" + "a" * 64


def words_of(text):
    """The arguments that a fake was called with."""
    return re.findall(r"^<(.*)>$", text, flags=re.MULTILINE)


# --- where


def test_without_a_gpu_or_docker_it_is_the_venv(machine):
    machine.venv("hopper")
    done = machine.front(*TRAIN, "training.seed=1")
    assert (done.returncode, words_of(done.stdout)) == (0, ["train", "quickstart", "training.seed=1"])
    assert "in .venv with the packages of docker/hopper: no GPU here" in done.stderr
    assert machine.calls("") == []
    machine.gpus()
    (machine.folder / "bin" / "docker").unlink()
    assert "in .venv with the packages of docker/hopper: 2 x NVIDIA H200" in machine.front(*TRAIN).stderr


def test_with_a_gpu_and_docker_it_is_a_container_of_its_generation(machine):
    machine.gpus()
    machine.image("tunebook:hopper")
    done = machine.front(*TRAIN, "training.seed=1")
    assert done.returncode == 0
    assert words_of(done.stdout)[-3:] == ["train", "quickstart", "training.seed=1"]
    assert done.stderr == "tunebook: in a container, image tunebook:hopper: 2 x NVIDIA H200, driver 580.159.04\n"
    (run,) = machine.calls("compose run")
    own, rest = "--env TUNEBOOK_IMAGE_DIGEST=sha256:of-tunebook:hopper", "-T --interactive=false train quickstart"
    assert re.match(rf"compose run --rm --name tunebook-train-[\d-]+ {own} {rest}", run)


def test_a_choice_is_followed_and_named(machine):
    machine.image("tunebook:cpu")
    machine.venv()
    for variables, place in (
        ({"GPU": "cpu"}, "a container, image tunebook:cpu: GPU=cpu"),
        ({"WHERE": "container"}, "a container, image tunebook:cpu: WHERE=container"),
        ({"WHERE": "local", "GPU": "cpu"}, ".venv with the packages of docker/cpu: WHERE=local"),
    ):
        done = machine.front(*TRAIN, **variables)
        assert done.returncode == 0
        assert done.stderr.startswith(f"tunebook: in {place}")


def test_commands_that_need_no_gpu_run_in_a_venv_that_is_set_up_or_in_any_image(machine, refused):
    machine.image("tunebook:hopper")
    assert machine.front("run", "plan", "quickstart", GPU="hopper").returncode == 0
    (run,) = machine.calls("compose -f")
    assert run.startswith("compose -f compose.yaml -f docker/cpu/compose.yaml run --rm")
    refused(machine.front(*TRAIN, GPU="hopper"))
    assert machine.front("image", GPU="hopper").returncode == 0
    machine.gpus()
    assert "image tunebook:hopper: 2 x NVIDIA H200" in machine.front("run", "list").stderr
    machine.venv("volta")
    for command in ("list", "export"):
        assert "in .venv with the packages of docker/volta" in machine.front("run", command).stderr


def test_a_count_of_gpus_becomes_the_visible_devices(machine, refused):
    machine.gpus()
    machine.venv("hopper")
    machine.image("tunebook:hopper")
    assert "sees all" in machine.front(*TRAIN, WHERE="local").stdout
    assert "sees 0\n" in machine.front(*TRAIN, WHERE="local", GPUS="1").stdout
    machine.act("docker-compose-run", 'echo "compose passes $CUDA_VISIBLE_DEVICES"')
    assert "compose passes 0,1\n" in machine.front(*TRAIN, GPUS="2").stdout
    refused(machine.front(*TRAIN, GPUS="3"))
    refused(machine.front(*TRAIN, GPUS="1", CUDA_VISIBLE_DEVICES="1"))
    refused(machine.front(*TRAIN, GPUS="two"))
    refused(machine.front(*TRAIN, GPUS="2", GPU="cpu"))


# --- which image


@pytest.mark.parametrize("generation", [Generation.turing, Generation.ampere, Generation.blackwell])
def test_a_gpu_gets_the_image_of_the_facts(machine, generation):
    facts = GENERATIONS[generation]
    capability = capability_text(max(facts.compute_capabilities))
    for driver in ("580.95.05", "525.60.13"):
        machine.gpus(ONE_GPU.format(capability, driver, "NVIDIA X"))
        assert machine.front("env").returncode == 0
        image = image_for_driver(generation, driver)
        assert image is not None
        assert machine.setting("TUNEBOOK_GENERATION") == image.name
        assert machine.setting("TUNEBOOK_IMAGE") == f"tunebook:{image.name}"
    machine.front("env", GPU=generation.name)
    assert machine.setting("TUNEBOOK_GENERATION") == facts.image.name


def test_visible_devices_select_gpus_and_a_named_image_must_be_for_them(machine, refused):
    machine.gpus(V100_AND_A100)
    refused(machine.front("env"))
    by_id = "GPU-88bb0000-0000-1111-2222-333344445555"
    for visible, generation in (("0", "volta"), ("2, 1", "ampere"), (by_id, "ampere"), ("", "cpu")):
        assert machine.front("env", CUDA_VISIBLE_DEVICES=visible).returncode == 0
        assert machine.setting("TUNEBOOK_GENERATION") == generation
    refused(machine.front("env", CUDA_VISIBLE_DEVICES="7"))
    machine.gpus(A100)
    refused(machine.front(*TRAIN, GPU="hopper"))
    machine.image("tunebook:volta")  # which an older driver needs
    assert machine.front(*TRAIN, GPU="volta").returncode == 0


def test_an_image_is_built_once_and_again_after_an_edit(machine):
    first = machine.front(*TRAIN, GPU="cpu")
    assert first.returncode == 0
    machine.front(*TRAIN, GPU="cpu")
    assert len(machine.calls("compose build")) == 1
    for number, edited in ((2, "recipes/quickstart.yaml"), (3, "docker/cpu/requirements.lock")):
        (machine.checkout / edited).write_text("edited\n")
        machine.front(*TRAIN, GPU="cpu")
        assert len(machine.calls("compose build")) == number


def test_a_digest_is_used_while_it_is_of_this_checkout(machine):
    (machine.checkout / "docker" / "cpu" / "image.digest").write_text(f"{DIGEST}\n")
    machine.image(DIGEST, "cpu")
    done = machine.front(*TRAIN, GPU="cpu")
    assert f"in a container, image {DIGEST}: GPU=cpu" in done.stderr
    assert machine.setting("TUNEBOOK_IMAGE") == DIGEST
    assert machine.setting("TUNEBOOK_IMAGE_DIGEST") == "sha256:" + "a" * 64
    assert "--env" not in machine.calls("compose run")[0]
    (machine.checkout / "recipes" / "quickstart.yaml").write_text("edited\n")
    machine.front(*TRAIN, GPU="cpu")
    assert machine.setting("TUNEBOOK_IMAGE") == "tunebook:cpu"
    assert len(machine.calls("compose build")) == 1


def test_attention_none_is_an_image_of_its_own_and_kept_until_it_is_forgotten(machine, refused):
    machine.gpus()
    machine.image("tunebook:hopper")
    assert machine.front(*TRAIN).returncode == 0
    assert machine.calls("compose build") == []
    assert machine.front("image", ATTENTION="none").returncode == 0
    assert (machine.setting("TUNEBOOK_ATTENTION"), len(machine.calls("compose build"))) == ("none", 1)
    assert machine.front(*TRAIN).returncode == 0
    assert len(machine.calls("compose build")) == 1, "the choice is kept, and the image has none"
    assert machine.front("env", GPU="cpu").returncode == 0
    assert machine.front(*TRAIN, ATTENTION="").returncode == 0
    assert (machine.setting("TUNEBOOK_ATTENTION"), len(machine.calls("compose build"))) == ("flash-attn-2", 2)
    refused(machine.front("image", ATTENTION="flash-attn-3"))


# --- the command itself


def test_arguments_and_exit_codes_arrive_as_they_are(machine):
    machine.image("tunebook:cpu")
    arguments = "optimizer.learning_rate=1e-5,2e-5 'a.b=[1,2]' 'm=x y' 'path=${oc.env:HOME}' 'q=\"*\"'"
    done = machine.command("make", "train", "GPU=cpu", "RECIPE=mine", f"ARGS={arguments}")
    assert words_of(done.stdout)[-7:] == [
        "train", "mine", "optimizer.learning_rate=1e-5,2e-5", "a.b=[1,2]", "m=x y", "path=${oc.env:HOME}", 'q="*"',
    ]  # fmt: skip
    machine.act("docker-compose-run", "exit 137")
    assert machine.front(*TRAIN, GPU="cpu").returncode == 137


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ("training.seed=1 --dry-run", "quickstart"),
        ("dataset.validation_path=held_out.jsonl", "quickstart"),
        ("chats.jsonl.gz model=ORG/NAME", "chats.jsonl.gz"),
    ],
)
def test_the_recipe_of_make_gives_way_to_data(machine, arguments, first):
    machine.venv()
    done = machine.command("make", "sweep", f"ARGS={arguments}")
    assert words_of(done.stdout)[:2] == ["sweep", first]
    done = machine.command("make", "sweep", "RECIPE=typed", f"ARGS={arguments}")
    assert words_of(done.stdout)[:2] == ["sweep", "typed"]


def test_a_recipe_that_is_typed_as_a_target_is_refused(machine):
    machine.venv()
    (machine.checkout / "chats.jsonl").touch()
    for word in ("qwen3b_zero2", "chats.jsonl"):
        done = machine.command("make", "train", word)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"RECIPE={word}" in done.stderr
    assert machine.command("make", "train", "list").returncode == 0


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["eval", "run=quickstart", "suite=code"], True),
        (["eval", "run=quickstart", "tasks=gsm8k,humaneval"], True),
        (["eval", "run=quickstart", "suite=quickstart"], False),
        (["train", "quickstart", "evaluation=code", "--dry-run"], False),
    ],
    ids=str,
)
def test_the_sandbox_is_up_before_a_model_writes_programs(machine, words, starts):
    machine.image("tunebook:cpu")
    machine.tell("docker-compose-up", err="no space\n", code=1)  # the evaluation says what is missing
    assert machine.front("run", *words, GPU="cpu").returncode == 0
    calls = [call for call in machine.calls("compose") if call.split()[1] in ("up", "run")]
    assert calls[:-1] == (["compose up --detach --build sandbox"] if starts else [])
    assert calls[-1].startswith("compose run --rm")


# --- what is refused


def test_docker_gives_gpus_by_the_runtime_its_hook_or_cdi(machine, refused):
    machine.image("tunebook:ampere")
    machine.gpus(A100)
    assert "GPUs in containers: by runtime" in machine.front("env").stderr
    machine.gpus(A100, has_runtime=False)
    refused(machine.front(*TRAIN))
    assert machine.calls("compose build") == []
    folder = machine.folder / "cdi"
    folder.mkdir()
    machine.tell("docker-info", f'{{"DockerRootDir":"/x","Runtimes":{{}},"CDISpecDirs":["/nonexistent","{folder}"]}}')
    refused(machine.front(*TRAIN))
    (folder / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert machine.front(*TRAIN).returncode == 0
    assert machine.setting("COMPOSE_FILE") == "compose.yaml:docker/cdi/compose.yaml"
    machine.install("nvidia-container-runtime-hook", "#!/bin/sh\n")
    assert machine.front(*TRAIN).returncode == 0
    assert machine.setting("COMPOSE_FILE") == "compose.yaml"


def test_gpus_that_no_image_serves_or_that_do_not_answer_are_not_taken_for_none(machine, refused):
    machine.venv()
    for lines, code in (
        (ONE_GPU.format("8.0", "470.256.02", "NVIDIA X"), 0),
        (ONE_GPU.format("6.1", "580.95.05", "NVIDIA X"), 0),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183\n", 18),
        ("0, GPU-1, [N/A], 580.95.05, [Unknown Error]\n", 0),
    ):
        machine.gpus(lines, code=code)
        refused(machine.front(*TRAIN))
    assert machine.front(*TRAIN, GPU="cpu", WHERE="local").returncode == 0


def test_make_passes_a_recipe_and_arguments_and_refuses_what_it_would_ignore(machine, refused):
    machine.venv()
    assert words_of(machine.command("make", "report").stdout) == ["report"]
    done = machine.command("make", "verify", "RECIPE=mine", "ARGS=--json")
    assert words_of(done.stdout) == ["verify", "mine", "--json"], done.stderr
    done = machine.command("make", "train", "GPUS=all", "https_proxy=x", "training.seed=1")
    refused(done)
    assert done.stdout == ""
