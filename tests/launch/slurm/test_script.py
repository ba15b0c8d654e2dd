"""The job script, line by line, as a shell and sbatch read it."""

import subprocess
from pathlib import Path

import pytest

from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.launch.slurm.script import job_script, option_lines, option_words, unusable_sign
from tunebook.plan.auto.resolve import resolve_auto

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
FOLDER = Path("/runs/1")


def config_of(*words):
    return resolve_auto(compose(words[0], list(words[1:])).config, NO_GPU).config


def test_two_nodes_of_eight_gpus(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = config_of("llama2_70b_fsdp", "launcher.partition=gpu", "launcher.time_limit=24:00:00")
    lines = job_script(config, FOLDER, "/venv/bin/python").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        *["--job-name=llama2_70b_fsdp", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8"],
        *["--exclusive", "--mem=0", "--partition=gpu", "--time=24:00:00", "--output=/runs/1/slurm-%j.out"],
        *["--open-mode=append", "--requeue", "--signal=B:USR1@300"],
    ]
    assert lines[-2:] == [f"cd {tmp_path}", "exec /venv/bin/python -m tunebook.launch.slurm /runs/1"]


def test_shared_nodes_no_requeue_and_more_options():
    words = option_words(
        config_of(
            *["quickstart", "launcher=slurm", "launcher.cpus_per_task=8", "launcher.requeue=false"],
            *["launcher.account=physics", "launcher.stop_timeout_s=60", "launcher.extra_args=['--qos=high']"],
        )
    )
    assert words == [
        *["--job-name=quickstart", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--account=physics"],
        *["--no-requeue", "--signal=B:USR1@60", "--qos=high"],
    ]


@pytest.mark.parametrize("name", ["plain", "with blank", "it's"])
def test_the_shell_reads_it_whatever_the_folders_are_called(monkeypatch, tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    monkeypatch.chdir(place)
    program = place / "python"
    program.write_text('#!/bin/sh\nprintf "%s|" "$PWD" "$SRUN_CPUS_PER_TASK" "$@"\n')
    program.chmod(0o755)
    script = job_script(config_of("quickstart", "launcher=slurm"), place / "run", str(program))
    answer = subprocess.run(
        ["bash", "-c", script], env={"SLURM_CPUS_ON_NODE": "4", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert answer.stdout == f"{place}|4|-m|tunebook.launch.slurm|{place / 'run'}|", answer.stderr


@pytest.mark.parametrize("sign", ["\n", "\r", "\0", "\x1b", "\t", "\x85", "\u2028", "\u2029"], ids=ascii)
@pytest.mark.parametrize(
    "part", ["title", "recipe", "partition", "account", "time_limit", "extra_args", "folder", "python", "cwd"]
)
def test_no_part_of_a_script_may_begin_another_line(monkeypatch, sign, part):
    """sbatch reads no option after a line that is none, and the node would run it."""
    config = config_of("quickstart", "launcher=slurm")
    text = f"x{sign}touch /tmp/injected"
    folder, python = "/runs/a", "python"
    if part in ("title", "recipe"):
        setattr(config, part, text)
    elif part == "extra_args":
        config.launcher.extra_args = [f"--comment={text}"]
    elif part == "folder":
        folder = f"/runs/{text}"
    elif part == "python":
        python = text
    elif part == "cwd":
        monkeypatch.setattr(Path, "cwd", lambda: Path(f"/home/{text}"))
    else:
        setattr(config.launcher, part, text)
    with pytest.raises(RequestError) as caught:
        job_script(config, Path(folder), python)
    assert (caught.value.exit_code, caught.value.problem_id) == (2, "control-characters")
    assert sign not in caught.value.message
    assert f"(U+{ord(sign):04X}), which could begin another line" in caught.value.message


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--exclusive", "--exclusive"),
        ("--comment=two words", '--comment="two words"'),
        ("--output=/runs/#1/x", '--output="/runs/#1/x"'),
        ("--comment=it's", '--comment="it\'s"'),
        ('--comment=a "b"', r'--comment="a \"b\""'),
        ("--comment=a\\b", r'--comment="a\\b"'),
        ("--constraint=a|b&c", "--constraint=a|b&c"),
        ("-C a100", '"-C a100"'),
        ("--gres=gpu:a=1 b", '--gres="gpu:a=1 b"'),
    ],
)
def test_what_means_something_to_sbatch_is_between_quotes(word, line):
    """As sbatch 22.05 was seen to read them."""
    assert option_lines([word]) == [f"#SBATCH {line}"]


def test_the_signs_of_a_folder_are_not_slurms():
    options = option_words(config_of("quickstart", "launcher=slurm"), Path("/runs/50%j"))
    assert "--output=/runs/50%%j/slurm-%j.out" in options


@pytest.mark.parametrize(
    ("path", "sign"), [("/a\\b", "a backslash"), ("/a\nb", "a line break (U+000A)"), ("/a%b #'", None)]
)
def test_paths_that_slurm_cannot_print_to(path, sign):
    assert unusable_sign(Path(path)) == sign
