"""What the image checks about itself while it is built, on made-up and on real inputs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
HOPPER = {
    "GENERATION": "hopper", "TORCH": "2.13.0", "CUDA": "13.0", "MIN_DRIVER": "580", "COMPUTE_CAPABILITIES": "9.0",
    "TORCH_CUDA_ARCH_LIST": "9.0", "ATTENTION": "flash-attn-2", "FLASH_ATTN_CUDA_ARCHS": "90",
}  # fmt: skip
TORCH_213 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture(scope="module")
def check_image() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_image", DOCKER / "check_image.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_image"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --- what is read


def test_generation_env_is_read_with_its_quotes_and_without_its_comments(
    check_image: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "generation.env"
    file.write_text('# why\nTORCH=2.13.0\nCOMPUTE_CAPABILITIES="8.0 8.6"\nCUDA=\n')
    assert check_image.read_settings(file) == {"TORCH": "2.13.0", "COMPUTE_CAPABILITIES": "8.0 8.6", "CUDA": ""}


def test_a_lock_is_read_for_this_machine_and_by_canonical_name(check_image: ModuleType) -> None:
    lock = (
        "# Written by `make lock`\n"
        "Antlr4_Runtime==4.9.3 \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\n    # via hydra\n"
        "colorama==0.4.6 ; sys_platform == 'win32' \\\n    --hash=sha256:02\n"
        "triton==3.7.1 ; sys_platform == 'linux' \\\n    --hash=sha256:03\n"
    )
    assert check_image.locked_versions(lock) == {"antlr4-runtime": "4.9.3", "triton": "3.7.1"}


@pytest.mark.parametrize("generation", ["cpu", "volta", "ampere", "hopper", "blackwell"])
def test_every_lock_of_the_project_is_read(check_image: ModuleType, generation: str) -> None:
    expected = check_image.expected_versions(DOCKER / generation, {"torch": "2.13.0+cpu"})
    settings = check_image.read_settings(DOCKER / generation / "generation.env")
    assert expected["torch"].split("+")[0] == settings["TORCH"]
    assert {"pip", "transformers", "deepspeed"} <= expected.keys()
    assert ("flash-attn" in expected) == (settings["ATTENTION"] == "flash-attn-2")


def test_on_cpu_the_build_of_torch_decides_which_lock_counts(check_image: ModuleType) -> None:
    own = check_image.expected_versions(DOCKER / "cpu", {"torch": "2.13.0+cpu"})
    registry = check_image.expected_versions(DOCKER / "cpu", {"torch": "2.13.0"})
    assert own["torch"] == "2.13.0+cpu"
    assert "nvidia-cublas" not in own
    assert registry["torch"] == "2.13.0"
    assert "nvidia-cublas" in registry


def test_the_build_finds_what_the_check_imports_where_it_is_mounted(tmp_path: Path) -> None:
    """Tunebook is not installed in that stage; without .pth files its own checkout is not found here either."""
    mounts = re.findall(r"source=(\S+\.py),target=/build/(\S+\.py)", (DOCKER / "Dockerfile").read_text())
    assert len(mounts) == 2
    for source, target in mounts:
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCKER.parent / source, tmp_path / target)
    packages = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    command = [sys.executable, "-B", "-S", str(tmp_path / "check_image.py")]
    done = subprocess.run(command, env=packages, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "The image checks its own claim, while it is built")


# --- versions


def test_what_differs_from_the_lock_is_named_in_both_directions(check_image: ModuleType) -> None:
    expected = {"trl": "1.16.0", "peft": "0.21.2", "rich": "15.0.0"}
    installed = {"trl": "1.15.0", "rich": "15.0.0", "requests": "2.0", "tunebook": "0.1.0"}
    assert check_image.version_problems(expected, installed) == [
        "peft 0.21.2 is locked but not installed",
        "requests 2.0 is installed but in no lock",
        "trl 1.15.0 is installed, but 1.16.0 is locked",
    ]


def test_another_interpreter_than_the_locks_is_a_problem(
    check_image: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.2")
    assert check_image.python_problems() == []
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.3")
    assert check_image.python_problems() == ["Python is 3.12.3, but the locks are for 3.11"]


def test_the_facts_list_what_is_locked_for_the_runs_in_the_image(
    check_image: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = check_image.TorchFacts(version="2.13.0+cpu", cuda=None, arch_list=[])
    monkeypatch.setattr(check_image, "torch_facts", lambda: torch)
    monkeypatch.setattr(check_image, "pip_problems", list)
    monkeypatch.setattr(check_image, "installed_versions", lambda: {"torch": "2.13.0+cpu", "trl": "1.15.0"})
    facts, problems = check_image.check_packages(DOCKER / "cpu")
    assert "trl 1.15.0 is installed, but 1.16.0 is locked" in problems
    assert facts["packages"]["torch"] == "2.13.0+cpu"
    assert facts["packages"]["trl"] == "1.16.0"


def test_another_local_version_of_torch_is_another_torch(check_image: ModuleType) -> None:
    (problem,) = check_image.version_problems({"torch": "2.13.0"}, {"torch": "2.13.0+cpu"})
    assert problem == "torch 2.13.0+cpu is installed, but 2.13.0 is locked"


# --- architectures


@pytest.mark.parametrize(
    ("capability", "runs"),
    [("7.0", False), ("7.5", True), ("8.0", True), ("8.6", True), ("8.9", True), ("9.0", True), ("10.0", True),
     ("10.3", True), ("12.0", True), ("11.0", False)],
)  # fmt: skip
def test_code_runs_on_the_same_major_version_and_on_no_older_minor(
    check_image: ModuleType, capability: str, runs: bool
) -> None:
    assert check_image.runs_on(TORCH_213, capability) is runs


def test_a_newer_minor_version_does_not_run_on_an_older_gpu(check_image: ModuleType) -> None:
    assert not check_image.runs_on(["sm_86"], "8.0")
    assert not check_image.runs_on(["compute_90", "sm_90a"], "9.0")


def torch_facts(check_image: ModuleType, **changed: object) -> object:
    return check_image.TorchFacts(**{"version": "2.13.0+cu130", "cuda": "13.0", "arch_list": TORCH_213} | changed)


def test_the_right_torch_passes(check_image: ModuleType) -> None:
    assert check_image.torch_problems(HOPPER, torch_facts(check_image)) == []


def test_a_torch_that_is_not_what_generation_env_says_is_refused_point_by_point(check_image: ModuleType) -> None:
    wrong = torch_facts(check_image, version="2.10.0+cu128", cuda="12.8", arch_list=["sm_70", "sm_80"])
    assert check_image.torch_problems(HOPPER, wrong) == [
        "torch is 2.10.0+cu128, but generation.env says TORCH=2.13.0",
        "torch was built with CUDA 12.8, but generation.env says CUDA=13.0",
        "torch has no code of its own for 9.0 (TORCH_CUDA_ARCH_LIST); it has sm_70 sm_80",
        "torch has no code that runs on 9.0 (COMPUTE_CAPABILITIES); it has sm_70 sm_80",
    ]


def test_a_cpu_build_in_a_gpu_image_is_refused(check_image: ModuleType) -> None:
    problems = check_image.torch_problems(HOPPER, torch_facts(check_image, cuda=None, arch_list=[]))
    assert problems[0] == "torch was built with CUDA None, but generation.env says CUDA=13.0"
    assert problems[1].endswith("it has nothing")


def test_the_cpu_image_takes_either_build(check_image: ModuleType) -> None:
    settings = check_image.read_settings(DOCKER / "cpu" / "generation.env")
    assert check_image.torch_problems(settings, torch_facts(check_image)) == []
    assert check_image.torch_problems(settings, torch_facts(check_image, cuda=None, arch_list=[])) == []


def test_the_installed_torch_answers_without_a_gpu(check_image: ModuleType) -> None:
    facts = check_image.torch_facts()
    assert facts.version.startswith("2.")
    assert all(name.startswith(("sm_", "compute_")) for name in facts.arch_list)


# --- the attention package


def container(*entries: tuple[int, int]) -> bytes:
    """A CUDA container as nvcc writes it, with entries of a kind and an architecture; the code is left blank."""
    body = b""
    for kind, architecture in entries:
        body += struct.pack("<HHIQIIIIQ24x", kind, 0x101, 64, 16, 0, 0, 0, architecture, 0) + bytes(16)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_the_gpus_of_a_library_are_read_from_it(check_image: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    code, ptx = 2, 1
    library.write_bytes(b"\x7fELF" + bytes(100) + container((code, 80), (ptx, 120)) + bytes(33) + container((code, 90)))
    assert check_image.gpu_architectures(library) == {"80", "90"}  # PTX is not code for one


def test_a_library_without_gpu_code_has_none_and_a_broken_one_ends(check_image: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(bytes(64))
    assert check_image.gpu_architectures(library) == set()
    library.write_bytes(container((2, 90))[:60] + b"\xff" * 200)
    assert check_image.gpu_architectures(library) <= {"90"}


def test_kernels_for_other_gpus_are_refused(check_image: ModuleType) -> None:
    assert check_image.kernel_problems(HOPPER, {"90"}) == []
    assert check_image.kernel_problems(HOPPER | {"FLASH_ATTN_CUDA_ARCHS": "100;120"}, {"100", "120"}) == []
    (problem,) = check_image.kernel_problems(HOPPER, {"80"})
    assert problem == "flash-attn-2 was compiled for 80, but generation.env says FLASH_ATTN_CUDA_ARCHS=90"


def test_an_attention_package_that_does_not_import_is_named_with_its_error(check_image: ModuleType) -> None:
    problems = check_image.attention_problems(HOPPER)
    assert "flash-attn-2: `import flash_attn_2_cuda` fails: ModuleNotFoundError" in "\n".join(problems)


def test_no_attention_package_is_no_problem_and_an_unknown_one_is(check_image: ModuleType) -> None:
    assert check_image.attention_problems(HOPPER | {"ATTENTION": "none"}) == []
    (problem,) = check_image.attention_problems(HOPPER | {"ATTENTION": "flash-attn-9"})
    assert "none, flash-attn-2" in problem


def test_files_that_another_package_wrote_over_are_named(
    check_image: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, facts = tmp_path / "flash_attn", tmp_path / "flash_attn-2.8.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "a.py").write_bytes(b"")
    (package / "b.py").write_bytes(b"changed")
    empty = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    names = ("a.py", "b.py", "c.py")
    (facts / "RECORD").write_text("".join(f"flash_attn/{name},{empty},0\n" for name in names))
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_image.overwritten_files("flash-attn") == [
        "flash-attn: flash_attn/b.py was written over by another package",
        "flash-attn: flash_attn/c.py is missing",
    ]
    assert check_image.overwritten_files("no-such-package") == []


# --- the image


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    facts = {"generation": "hopper", "torch": "2.13.0", "min_driver": 580, "lock_sha256": "aa", "num_packages": 150}
    (tmp_path / "packages.json").write_text(json.dumps(facts))
    (tmp_path / "sources.sha256").write_text("cc\n")
    return tmp_path


def test_labels_that_would_lie_are_refused(check_image: ModuleType, image_folder: Path) -> None:
    said = {"GENERATION": "volta", "LOCK_SHA256": "bb", "SOURCES_SHA256": "cc", "TORCH": "", "MIN_DRIVER": "580"}
    _, problems = check_image.check_image(image_folder, said)
    assert [text.partition(":")[0] for text in problems[:2]] == [
        "the build was told GENERATION=volta, but it is hopper",
        "the build was told LOCK_SHA256=bb, but it is aa",
    ]
    assert all(text.endswith("Type: make env") for text in problems[:2])


def test_image_json_says_where_the_image_came_from(check_image: ModuleType, image_folder: Path) -> None:
    said = {"GIT_COMMIT": "1234", "GIT_DIFF_SHA256": "", "BASE_IMAGE": "", "DEFAULT_BASE_IMAGE": "debian:12"}
    facts, _ = check_image.check_image(image_folder, said)
    assert facts["sources_sha256"] == "cc"
    assert (facts["git_commit"], facts["git_diff_sha256"], facts["base_image"]) == ("1234", None, "debian:12")


def test_a_checkout_that_is_installed_in_place_has_no_book_of_its_own(check_image: ModuleType) -> None:
    assert check_image.own_problems() == ["tunebook is installed without its recipes"]


def test_a_problem_fails_the_build_and_nothing_is_written(
    check_image: ModuleType, image_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH", "2.10.0")
    assert check_image.main(["image", str(image_folder)]) == 1
    assert "error: the build was told TORCH=2.10.0, but it is 2.13.0" in capsys.readouterr().err
    assert not (image_folder / "image.json").exists()
    monkeypatch.setattr(check_image, "own_problems", list)
    monkeypatch.delenv("TORCH")
    assert check_image.main(["image", str(image_folder)]) == 0
    assert json.loads((image_folder / "image.json").read_text())["sources_sha256"] == "cc"


def test_other_words_are_answered_with_the_usage(check_image: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_image.main(["packages"]) == 2
    assert "check_image.py packages GENERATION_FOLDER" in capsys.readouterr().err
