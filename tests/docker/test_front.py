"""docker/front.sh: where a command runs, in which image, and that its arguments and exit code arrive unchanged."""

from __future__ import annotations

import itertools
import re

import pytest

from tunebook.config.choices import Generation
from tunebook.facts.generations import GENERATIONS, capability_text, generation_of, image_for_driver

TRAIN = ("run", "train", "quickstart")
ONE_GPU = "0, GPU-5f3c7a10-0000-1111-2222-333344445555, {}, {}, {}\n"
V100 = ONE_GPU.format("7.0", "580.95.05", "Tesla V100-SXM2-32GB")
V100_AND_A100 = (
    V100
    + "1, GPU-77aa0000-0000-1111-2222-333344445555, 8.0, 580.95.05, NVIDIA A100-SXM4-80GB\n"
    + "2, GPU-88bb0000-0000-1111-2222-333344445555, 8.0, 580.95.05, NVIDIA A100-SXM4-80GB\n"
)
DIGEST = "registry.example/path/tunebook@sha256:" + "a" * 64


def words_of(text):
    """The arguments that a fake was called with."""
    return re.findall(r"^<(.*)>$", text, flags=re.MULTILINE)


# --- where


def test_without_a_gpu_it_is_the_venv(machine):
    machine.venv()
    done = machine.front(*TRAIN, "training.seed=1")
    assert (done.returncode, words_of(done.stdout)) == (0, ["train", "quickstart", "training.seed=1"])
    assert done.stderr == "tunebook: in .venv with the packages of docker/cpu: no GPU here (there is no nvidia-smi)\n"
    assert machine.calls("") == []


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


def test_with_a_gpu_but_no_docker_it_is_the_venv_for_that_gpu(machine):
    machine.gpus()
    machine.remove("docker")
    machine.venv("hopper")
    done = machine.front(*TRAIN)
    assert done.returncode == 0
    assert "in .venv with the packages of docker/hopper: 2 x NVIDIA H200" in done.stderr
    assert "no container: Docker is not installed" in done.stderr


@pytest.mark.parametrize(
    ("variables", "place", "why"),
    [
        ({"GPU": "cpu"}, "a container, image tunebook:cpu", "GPU=cpu"),
        ({"WHERE": "container"}, "a container, image tunebook:cpu", "WHERE=container and no GPU here"),
        ({"WHERE": "container", "GPU": "cpu"}, "a container, image tunebook:cpu", "WHERE=container and GPU=cpu"),
        ({"WHERE": "local"}, ".venv with the packages of docker/cpu", "WHERE=local and no GPU here"),
        ({"WHERE": "local", "GPU": "cpu"}, ".venv with the packages of docker/cpu", "WHERE=local and GPU=cpu"),
    ],
)
def test_a_choice_is_followed_and_named(machine, variables, place, why):
    machine.image("tunebook:cpu")
    machine.venv()
    done = machine.front(*TRAIN, **variables)
    assert done.returncode == 0
    assert done.stderr.startswith(f"tunebook: in {place}: {why}")


def test_commands_that_need_no_gpu_run_in_what_is_set_up(machine):
    machine.gpus()
    machine.image("tunebook:hopper")
    assert "image tunebook:hopper: 2 x NVIDIA H200" in machine.front("run", "list").stderr  # nothing is set up yet
    for command in ("list", "explain", "report", "export", "data"):
        assert "tunebook:hopper: that is set up already" in machine.front("run", command).stderr
        run = machine.calls("compose -f compose.yaml -f docker/cpu/compose.yaml run")[-1]
        assert run.endswith(f"--entrypoint /opt/tunebook/entrypoint.sh {command} plan")
    machine.venv("volta")
    assert "in .venv with the packages of docker/volta: that is set up" in machine.front("run", "list").stderr


def test_the_doctor_gets_the_gpus_in_a_container_of_their_image(machine, refused):
    machine.gpus()
    machine.image("tunebook:hopper")
    done = machine.front("run", "doctor", "quickstart", "--json")
    assert done.returncode == 0, done.stderr
    assert "in a container, image tunebook:hopper: 2 x NVIDIA H200" in done.stderr
    (run,) = machine.calls("compose run")  # without docker/cpu/compose.yaml, which takes the GPUs away
    assert re.search(r" --entrypoint /opt/tunebook/entrypoint.sh doctor plan quickstart --json$", run)
    assert done.stdout.splitlines()[-2:] == ["<quickstart>", "<--json>"]
    machine.gpus(has_runtime=False)
    refused(machine.front("run", "doctor", "quickstart"), "Docker cannot give GPUs to containers")


def test_gpus_of_the_venv_can_be_counted(machine):
    machine.gpus()
    machine.venv("hopper")
    assert "sees all" in machine.front(*TRAIN, WHERE="local").stdout
    assert "sees 0\n" in machine.front(*TRAIN, WHERE="local", GPUS="1").stdout


# --- which image


@pytest.mark.parametrize("generation", [name for name in GENERATIONS if name is not Generation.cpu])
def test_each_gpu_gets_the_image_of_the_facts(machine, generation):
    facts = GENERATIONS[generation]
    for capability, driver in itertools.product(facts.compute_capabilities, ("580.95.05", "525.60.13")):
        machine.gpus(ONE_GPU.format(capability_text(capability), driver, "NVIDIA X"))
        assert machine.front("env").returncode == 0
        expected = image_for_driver(generation, driver)
        assert expected is not None
        assert machine.setting("TUNEBOOK_GENERATION") == expected.name
        assert machine.setting("TUNEBOOK_IMAGE") == f"tunebook:{expected.name}"
    machine.front("env", GPU=generation.name)
    assert machine.setting("TUNEBOOK_GENERATION") == facts.image.name


@pytest.mark.parametrize("capability", ["8.7", "10.3", "11.0", "12.1"])
def test_an_unknown_gpu_counts_as_the_newest_known_that_is_older(machine, capability):
    machine.gpus(ONE_GPU.format(capability, "590.44.01", "NVIDIA X"))
    assert machine.front("env").returncode == 0
    major, minor = map(int, capability.split("."))
    expected = GENERATIONS[generation_of((major, minor)).generation].image.name
    assert machine.setting("TUNEBOOK_GENERATION") == expected


def test_an_old_driver_gets_the_volta_image_with_its_drawbacks_named(machine):
    machine.gpus(ONE_GPU.format("8.0", "535.183.01", "NVIDIA A100-SXM4-80GB"))
    done = machine.front("env")
    assert done.stderr.splitlines()[0] == (
        "tunebook: driver 535.183.01 is older than 580, which the ampere image (CUDA 13.0) needs, so it is the volta "
        "image: torch 2.10.0 with CUDA 12.8, and attention by sdpa instead of flash-attn-2"
    )


def test_the_volta_image_may_be_asked_for_on_newer_gpus(machine):
    machine.gpus()
    machine.image("tunebook:volta")
    assert machine.front(*TRAIN, GPU="volta").returncode == 0


def test_visible_devices_and_a_count_select_gpus(machine):
    machine.gpus(V100_AND_A100)
    assert machine.front("env").returncode == 2
    for visible, generation in (
        ("0", "volta"), ("2,1", "ampere"), ("GPU-88bb,GPU-77aa", "ampere"), ("1,7", "ampere"), ("", "cpu"),
    ):  # fmt: skip
        assert machine.front("env", CUDA_VISIBLE_DEVICES=visible).returncode == 0
        assert machine.setting("TUNEBOOK_GENERATION") == generation
        assert machine.setting("TUNEBOOK_GPUS") == "all"
    assert machine.front("env", GPUS="1").returncode == 0
    assert (machine.setting("TUNEBOOK_GENERATION"), machine.setting("TUNEBOOK_GPUS")) == ("volta", "1")


def test_an_image_is_built_once_and_again_after_an_edit(machine):
    first = machine.front(*TRAIN, GPU="cpu")
    assert first.returncode == 0
    assert "building tunebook:cpu" in first.stderr
    assert "RUN --mount=type=cache" in first.stderr
    machine.front(*TRAIN, GPU="cpu")
    assert len(machine.calls("compose build")) == 1
    (machine.checkout / "recipes" / "quickstart.yaml").write_text("edited\n")
    again = machine.front(*TRAIN, GPU="cpu")
    assert "was built from other sources: updating it" in again.stderr
    assert len(machine.calls("compose build")) == 2
    (machine.checkout / "docker" / "cpu" / "requirements.lock").write_text("edited\n")
    machine.front(*TRAIN, GPU="cpu")
    assert len(machine.calls("compose build")) == 3


def test_a_digest_is_used_while_it_is_of_this_checkout(machine):
    machine.digest(DIGEST)
    machine.image(DIGEST, "cpu")
    done = machine.front(*TRAIN, GPU="cpu")
    assert f"in a container, image {DIGEST}: GPU=cpu" in done.stderr
    assert machine.setting("TUNEBOOK_IMAGE") == DIGEST
    assert machine.setting("TUNEBOOK_IMAGE_DIGEST") == "sha256:" + "a" * 64
    assert "--env" not in machine.calls("compose run")[0]
    (machine.checkout / "recipes" / "quickstart.yaml").write_text("edited\n")
    own = machine.front(*TRAIN, GPU="cpu", TUNEBOOK_USE_IMAGE_SOURCES="1")
    assert f"in a container, image {DIGEST}" in own.stderr
    machine.tell("docker-buildx-imagetools", '{"config":{"Labels":{"tunebook.lock-sha256":"1"}}}')
    edited = machine.front(*TRAIN, GPU="cpu")
    assert f"image.digest is not used: {DIGEST} is of other sources, another lock" in edited.stderr
    assert machine.setting("TUNEBOOK_IMAGE") == "tunebook:cpu"
    assert len(machine.calls("compose build")) == 1
    assert machine.calls("pull") == []


def test_an_image_of_this_checkout_is_pulled(machine):
    machine.digest(DIGEST)
    machine.image(DIGEST, "cpu")
    image = machine.fake / "images" / DIGEST.replace("/", "_")
    lock, attention, sources = image.read_text().split()
    image.rename(machine.fake / "published")
    labels = f'{{"tunebook.lock-sha256": "{lock}", "tunebook.sources-sha256": "{sources}"'
    labels += f', "tunebook.attention": "{attention}"}}'
    machine.tell("docker-buildx-imagetools", f'{{"config":{{"Labels":{labels}}}}}')
    machine.act("docker-pull", f'mv "$FAKE/published" "{image}"')
    done = machine.front(*TRAIN, GPU="cpu")
    assert f"tunebook: pulling {DIGEST}\ntunebook: in a container, image {DIGEST}" in done.stderr
    assert machine.calls("compose build") == []


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
    assert machine.setting("TUNEBOOK_ATTENTION") == "none"
    again = machine.front(*TRAIN, ATTENTION="")
    assert again.returncode == 0
    assert "attention package none and not flash-attn-2 (ATTENTION=none takes it as it is): updating it" in again.stderr
    assert (machine.setting("TUNEBOOK_ATTENTION"), len(machine.calls("compose build"))) == ("flash-attn-2", 2)
    refused(
        machine.front("image", ATTENTION="flash-attn-3"), "ATTENTION=flash-attn-3 is not known for the hopper image",
        "Choose one of: none flash-attn-2",
    )  # fmt: skip
    machine.front("image", ATTENTION="flash-attn-2")
    assert machine.front("env", GPU="volta").returncode == 0, "what was typed for another image does not count"
    assert machine.setting("TUNEBOOK_ATTENTION") == "none"
    refused(machine.front("image", GPU="volta", ATTENTION="flash-attn-2"), "for the volta image", "one of: none;")


# --- the command itself


def test_arguments_arrive_as_they_were_typed(machine):
    machine.image("tunebook:cpu")
    arguments = "optimizer.learning_rate=1e-5,2e-5 'a.b=[1,2]' 'm=x y' 'path=${oc.env:HOME}' 'q=\"*\"'"
    done = machine.command("make", "train", "GPU=cpu", "RECIPE=mine", f"ARGS={arguments}")
    assert words_of(done.stdout)[-7:] == [
        "train", "mine", "optimizer.learning_rate=1e-5,2e-5", "a.b=[1,2]", "m=x y", "path=${oc.env:HOME}", 'q="*"',
    ]  # fmt: skip


@pytest.mark.parametrize("code", [0, 1, 2, 3, 6, 137])
def test_exit_codes_come_through_unchanged(machine, code):
    machine.image("tunebook:cpu")
    machine.act("docker-compose-run", f'case "$*" in *--entrypoint*) exit 0 ;; *) exit {code} ;; esac')
    done = machine.front(*TRAIN, GPU="cpu")
    assert done.returncode == code
    assert "error" not in done.stderr


def test_a_command_without_need_of_a_gpu_runs_in_any_image_without_one(machine):
    machine.image("tunebook:hopper")
    assert machine.front("run", "plan", "quickstart", GPU="hopper").returncode == 0
    (run,) = machine.calls("compose -f")
    assert run.startswith("compose -f compose.yaml -f docker/cpu/compose.yaml run --rm")


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["eval", "run=quickstart", "suite=code"], True),
        (["eval", "run=quickstart", "tasks=gsm8k,humaneval"], True),
        (["train", "quickstart", "evaluation=code_completion"], True),
        (["sweep", "quickstart", "evaluation.tasks=[small_python]", "training.seed=0,1"], True),
        (["eval", "run=quickstart", "suite=quickstart"], False),
        (["train", "quickstart", "evaluation=code", "--dry-run"], False),
        (["plan", "quickstart", "evaluation=code"], False),
        (["chat", "quickstart", "suite=code"], False),
    ],
    ids=str,
)
def test_the_sandbox_is_up_before_a_model_writes_programs(machine, words, starts):
    machine.image("tunebook:cpu")
    done = machine.front("run", *words, GPU="cpu")
    assert done.returncode == 0
    calls = [call for call in machine.calls("compose") if call.split()[1] in ("up", "run")]
    assert calls[:-1] == (["compose up --detach --build sandbox"] if starts else [])
    assert calls[-1].startswith("compose run --rm")
    assert ("it stays up until: docker compose stop sandbox" in done.stderr) is starts


def test_a_sandbox_that_does_not_start_is_left_to_the_evaluation_to_explain(machine):
    machine.image("tunebook:cpu")
    machine.tell("docker-compose-up", err="no space\n", code=1)
    done = machine.front("run", "eval", "suite=code", GPU="cpu")
    assert done.returncode == 0  # the command's own
    assert "no space\ntunebook: the sandbox could not be started; the reason is above" in done.stderr
    assert len(machine.calls("compose run")) == 1


# --- make


def test_help_names_the_choices(machine):
    done = machine.command("make")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^WHERE: container, local .* auto", done.stdout, flags=re.MULTILINE)
    (gpu,) = re.findall(r"^GPU: .*", done.stdout, flags=re.MULTILINE)
    assert [name.name for name in Generation if name.name not in gpu] == []
    targets = re.findall(r"^  ([a-z-]+) ", done.stdout, flags=re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", (machine.checkout / "Makefile").read_text(), re.MULTILINE)
    assert sorted(targets) == sorted(phony.replace("\\", "").split())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], ["quickstart"]),
        (["RECIPE=mine"], ["mine"]),
        (["ARGS=outputs/a --json"], ["outputs/a", "--json"]),
        (["RECIPE=mine", "ARGS=--json"], ["mine", "--json"]),
    ],
)
def test_a_typed_recipe_is_passed_with_arguments(machine, typed, words):
    machine.venv()
    for target in ("report", "verify", "fetch"):
        done = machine.command("make", target, *typed)
        assert words_of(done.stdout) == [target, *words], done.stderr


def test_the_doctor_of_a_machine_without_gpus_is_in_the_venv(machine):
    machine.venv()
    done = machine.command("make", "doctor", "RECIPE=mine", "ARGS=--json 'a.b=[1,2]'")
    assert words_of(done.stdout) == ["doctor", "mine", "--json", "a.b=[1,2]"]


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("recipe=mine", 'recipe=mine would be ignored. Type RECIPE="mine".'),
        ("args=--dry-run", 'Type ARGS="--dry-run".'),
        ("gpu=cpu", 'Type GPU="cpu".'),
        ("where=local", 'Type WHERE="local".'),
        ("training.seed=1", 'training.seed=1 would be ignored. Type ARGS="training.seed=1".'),
    ],
)
def test_a_variable_that_make_would_ignore_is_refused_with_the_right_one(machine, refused, typed, advice):
    machine.venv()
    done = machine.command("make", "train", "GPUS=all", "https_proxy=x", typed)
    refused(done, advice)
    assert done.stdout == ""


def test_variables_for_libraries_may_have_small_letters(machine):
    machine.venv()
    assert machine.command("make", "list", "https_proxy=proxy:3128", "HF_HUB_OFFLINE=1").returncode == 0
    assert machine.command("make", "train", WHERE="local", recipe="of the environment").returncode == 0
