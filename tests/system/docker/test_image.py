"""The images themselves: what they claim, what is in them and what is not, who may use them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

OPERATORS = (
    "from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder; CPUAdamBuilder().load(); "
    "AsyncIOBuilder().load(); print('both operators are loaded')"
)


def in_image(in_checkout, *words, timeout_s=400, **settings):
    """Run a program in the container of `train`, in place of the entry point."""
    return in_checkout(
        "docker",
        "compose",
        "run",
        "--rm",
        "--entrypoint",
        words[0],
        "train",
        *words[1:],
        timeout_s=timeout_s,
        **settings,
    )


def test_the_cpu_image_is_small_enough_and_says_what_it_is(cpu_image, inspect, in_checkout):
    facts = inspect(cpu_image)
    assert facts["Size"] <= 2.5e9
    assert facts["Config"]["User"] not in ("", "0", "root")
    labels = facts["Config"]["Labels"]
    shown = in_image(in_checkout, "cat", "/opt/tunebook/image.json").stdout
    said = json.loads(shown[shown.index("{") :])  # compose says first which volumes it makes
    assert said["generation"] == labels["tunebook.generation"] == "cpu"
    assert said["lock_sha256"] == labels["tunebook.lock-sha256"]
    assert said["sources_sha256"] == labels["tunebook.sources-sha256"]
    assert said["git_commit"] == labels["org.opencontainers.image.revision"]
    assert said["torch"].startswith("2.13.0")


def found_in_layers(image, texts):
    """Which of some texts are in an image's layers, all of which are read once."""
    words = ["grep", "-a", "-o", "-F", *(f"-e{text}" for text in texts)]
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saving:
        search = subprocess.run(
            words, stdin=saving.stdout, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=False,
            timeout=600,
        )  # fmt: skip
    assert saving.returncode == 0
    assert search.returncode in (0, 1), search.stderr
    return set(search.stdout.split())


def test_what_a_site_handed_to_the_build_is_in_no_layer(cpu_image, markers):
    """Each secret of the build held a line that is nowhere else; on a fresh engine every layer was made with them."""
    assert len(markers) == 3
    present = "tunebook.sources-sha256"  # a label's name: the search finds what is there
    assert found_in_layers(cpu_image, [*markers, present]) == {present}
    history = subprocess.check_output(["docker", "history", "--no-trunc", cpu_image], text=True)
    assert [marker for marker in markers if marker in history] == []


def give(folder, user, group):
    """Let a folder and everything in it belong to somebody."""
    for path in [folder, *folder.rglob("*")]:
        os.lchown(path, user, group)


def test_files_belong_to_whoever_typed_sudo(cpu_image, checkout, in_checkout):
    user, group = 12345, 12346
    outputs = checkout / "outputs"
    outputs.mkdir(exist_ok=True)
    give(outputs, user, group)
    words = ("make", "train", "WHERE=container", "GPU=cpu")
    arguments = f"ARGS=evaluation=none training.max_steps=2 --run-folder {outputs / 'other'}"
    volumes = {"COMPOSE_PROJECT_NAME": f"tunebook-tests-{os.getpid()}-{user}"}  # the caches are one user's
    someone = {"SUDO_UID": str(user), "SUDO_GID": str(group), **volumes}
    try:
        done = in_checkout(*words, f"{arguments}/run", timeout_s=600, **someone)
        assert done.returncode == 0, done.stdout[-4000:]
        made = [path.lstat() for path in (outputs / "other").rglob("*")]
        assert {(entry.st_uid, entry.st_gid) for entry in made} == {(user, group)}
        give(outputs, 0, 0)
        refused = in_checkout(*words, f"{arguments}/again", timeout_s=600, **someone)
        assert refused.returncode == 2
        assert "make it writable" in refused.stdout
    finally:
        shutil.rmtree(outputs / "other", ignore_errors=True)
        give(outputs, os.getuid(), os.getgid())
        in_checkout("docker", "compose", "down", "--volumes", **volumes)
        assert in_checkout("make", "env", "GPU=cpu").returncode == 0


def test_without_env_the_entry_point_says_what_to_type(cpu_image, checkout, in_checkout):
    (checkout / ".env").rename(checkout / ".env.kept")
    try:
        base = {"TUNEBOOK_BASE_IMAGE": os.environ.get("BASE_IMAGE", "")}  # what .env would have said
        done = in_checkout("docker", "compose", "run", "--rm", "train", timeout_s=600, **base)
        assert done.returncode == 2, done.stdout
        assert "make env" in done.stdout
    finally:
        (checkout / ".env.kept").rename(checkout / ".env")


def test_other_sources_than_the_images_are_refused_until_it_is_built_again(cpu_image, checkout, in_checkout):
    source = checkout / "src" / "tunebook" / "__init__.py"
    text = source.read_text()
    source.write_text(f"{text}\n# one more line\n")
    words = ("docker", "compose", "run", "--rm", "train", "quickstart", "--dry-run")
    try:
        refused = in_checkout(*words)
        assert refused.returncode == 2, refused.stdout
        assert "make image" in refused.stdout
        assert in_checkout("make", "image", "GPU=cpu", timeout_s=600).returncode == 0
        allowed = in_checkout(*words)
        assert allowed.returncode == 0, allowed.stdout
    finally:
        source.write_text(text)
        assert in_checkout("make", "image", "GPU=cpu", timeout_s=600).returncode == 0


@pytest.mark.slow  # minutes of compiling, on what only a change of the locks or the Dockerfile touches
def test_it_compiles_what_offload_needs(cpu_image, in_checkout):
    """CPUAdam, and libaio's reads and writes for NVMe: compiled when they are first used, in the cache."""
    done = in_image(in_checkout, "python", "-c", OPERATORS, timeout_s=900, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "both operators are loaded" in done.stdout


def test_nothing_in_it_can_be_written_and_it_has_no_rights(cpu_image, in_checkout):
    program = (
        "import os, pathlib; "
        "blocked = [p for p in ('/opt/tunebook', '/usr', '/opt/venv', os.environ['TUNEBOOK_CHECKOUT']) "
        "if not os.access(p, os.W_OK)]; "
        "status = dict(l.split(':', 1) for l in pathlib.Path('/proc/self/status').read_text().splitlines()); "
        "print(len(blocked), status['CapEff'].strip(), status['CapBnd'].strip(), status['NoNewPrivs'].strip())"
    )
    done = in_image(in_checkout, "python", "-c", program)
    assert done.stdout.split()[-4:] == ["4", "0" * 16, "0" * 16, "1"], done.stdout


@pytest.mark.skipif(not os.environ.get("BUILD_GPU_IMAGES"), reason="several GB are fetched and installed")
def test_volta_is_built_whole_and_has_code_for_its_gpus(cpu_image, in_checkout, inspect):
    """The image with nothing to compile. Its own check has read the architectures out of torch when this is reached."""
    root = subprocess.check_output(["docker", "info", "--format", "{{.DockerRootDir}}"], text=True).strip()
    free_gib = shutil.disk_usage(root).free / 2**30
    if free_gib < 40:
        pytest.skip(f"it takes up to 30 GiB while it is built, and {free_gib:.0f} GiB are left in {root}")
    try:
        built = in_checkout("make", "image", "GPU=volta", timeout_s=1800)
        assert built.returncode == 0, built.stdout[-4000:]
        assert inspect("tunebook:volta")["Config"]["Labels"]["tunebook.torch"] == "2.10.0"
        read = in_checkout("docker", "run", "--rm", "--entrypoint", "cat", "tunebook:volta", "/opt/tunebook/image.json")
        said = json.loads(read.stdout)
        assert {"sm_70", "sm_75"} <= set(said["arch_list"])
        ran = in_checkout("make", "train", "GPU=volta", "WHERE=container")
        assert ran.returncode == 2
        assert "GPU=volta needs such GPUs" in ran.stdout
    finally:
        in_checkout("docker", "image", "rm", "tunebook:volta")
        assert in_checkout("make", "env", "GPU=cpu").returncode == 0
