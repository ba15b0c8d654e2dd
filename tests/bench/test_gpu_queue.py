"""Whose turn it is on the GPUs, what the jobs are made of, and the hook that makes a run wait."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

from gpu_queue import Job, host_memory, last_json, measured, resolved, run_jobs, visible, wait_for_turn, who_goes  # noqa: E402

OTHER_CHOICE = {"key": "packing.row_length", "value": 4096, "why": "the shortest"}


def job(name, gpus, **keys):
    return Job(name=name, gpus=gpus, words=[], line={}, **keys)


ALL, PAIR, OTHER = job("all", (0, 1, 2, 3)), job("pair", (0, 1), priority=1), job("other", (2, 3), priority=2)


def test_a_run_records_what_auto_decided_and_nobody_typed():
    choice = {"key": "model.one_pass_head", "value": True, "why": "computed once"}
    assert resolved({"choices": [choice, OTHER_CHOICE]}) == ["model.one_pass_head=true"]
    assert resolved({"choices": [choice | {"why": "as asked"}, OTHER_CHOICE]}) == []


def test_a_script_waits_for_its_turn_and_its_last_json_line_counts(tmp_path, monkeypatch):
    (tmp_path / "go").touch()
    monkeypatch.setenv("TUNEBOOK_BENCH_TURN", str(tmp_path))
    wait_for_turn()
    assert (tmp_path / "ready-0").exists()
    (tmp_path / "terminal.txt").write_text('{"steps": 1}\nwarning\n{"steps": 2, "mfu": 0.4}\nbye\n')
    assert last_json(tmp_path / "terminal.txt") == {"steps": 2, "mfu": 0.4}


@pytest.mark.parametrize(("mine", "numbers"), [(None, "0,2"), ("", "0,2"), ("4,5,7", "4,7")])
def test_a_job_gets_of_the_gpus_that_this_process_may_use(monkeypatch, mine, numbers):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mine is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
    assert visible((0, 2)) == numbers


@pytest.mark.parametrize(
    ("jobs", "found", "said"),
    [
        ([job("one", (0,))], 0, "a GPU needed, and 0 found here"),
        ([job("one", (0,)), PAIR, OTHER], 3, "4 GPUs needed, and 3 found here"),
    ],
)
def test_without_the_gpus_of_its_jobs_a_script_says_so_and_does_nothing(tmp_path, monkeypatch, jobs, found, said):
    def before():
        raise AssertionError("nothing is started")

    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    arguments = argparse.Namespace(list=False, output=tmp_path / "output", runs=tmp_path)
    (tmp_path / jobs[0].name).mkdir()  # of an earlier time
    with pytest.raises(SystemExit, match=said) as ended:
        run_jobs(jobs, arguments, before)
    assert isinstance(ended.value.code, str), "which Python prints, to end with 1"
    assert [path.name for path in tmp_path.iterdir()] == [jobs[0].name]


def test_every_script_that_measures_on_gpus_looks_for_them_first():
    scripts = {file.name: file.read_text() for file in [*BENCH.glob("gpu_*.py"), *BENCH.glob("peer_*.py")]}
    scripts = {name: text for name, text in scripts.items() if "__main__" in text}
    without = {name for name, text in scripts.items() if "require_gpus(" not in text and "run_jobs(" not in text}
    assert without == {"gpu_draw.py", "peer_llamafactory_run.py"}  # the latter is started by another


def test_disjoint_gpus_are_used_together_and_the_lowest_priority_goes_first():
    assert who_goes([OTHER, PAIR], []) == [PAIR, OTHER]
    assert who_goes([OTHER, PAIR, ALL], []) == [ALL]


def test_gpus_that_a_job_waits_for_are_kept_for_it():
    assert who_goes([ALL, OTHER], [PAIR]) == []
    shared = [job(f"share{number}", (0,), is_alone=False, priority=5) for number in range(2)]
    assert who_goes([PAIR, shared[1]], [shared[0]]) == []


def test_short_runs_may_take_what_is_kept_while_another_is_alone_on_a_part_of_it():
    short = job("short", (2, 3), is_alone=False, priority=9)
    assert who_goes([ALL, short, OTHER], [PAIR]) == [short]


def test_three_share_a_gpu_and_none_joins_one_that_is_alone():
    shared = [job(f"share{number}", (0, 1), is_alone=False, priority=number) for number in range(4)]
    assert who_goes(shared, []) == shared[:3]
    assert who_goes(shared, [PAIR]) == []


def test_a_job_that_holds_no_gpus_waits_for_nobody_and_nobody_for_it():
    free = job("free", (3,), holds_gpus=False)
    assert who_goes([free], [ALL]) == [free]
    assert who_goes([ALL], [free]) == [ALL]


def test_a_run_without_records_has_measured_nothing(tmp_path):
    assert measured(tmp_path) == {}


TRAINER = """
import sys, types
from pathlib import Path
from tunebook.train.trainer import RecipeTrainer
print(RecipeTrainer().train())
"""
RANK = """
from tunebook.launch.first_collective import meet
print("starts", flush=True)
meet()
"""


@pytest.fixture
def environment(tmp_path):
    """Of a rank whose run has its turns in `tmp_path/turn`, and a package that does what Tunebook does there."""
    files = {
        "train/trainer.py": "class RecipeTrainer:\n    def train(self):\n        return 'trained'\n",
        "train/run.py": "print('imported', flush=True)\n",
        "launch/first_collective.py": "def meet():\n    print('met', flush=True)\n",
    }
    for name, text in files.items():
        file = tmp_path / "site/tunebook" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        (file.parent.parent / "__init__.py").touch()
        file.write_text(text)
    (tmp_path / "turn").mkdir()
    path = os.pathsep.join([str(BENCH / "gpu_turns"), str(tmp_path / "site")])
    return os.environ | {"PYTHONPATH": path, "TUNEBOOK_BENCH_TURN": str(tmp_path / "turn")}


def waits(program, environment, turn, ready):
    """What a program prints that waits until it is told to go."""
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        assert [file.name for file in turn.iterdir()] == [ready]
        (turn / "go").touch()
        return process.communicate(timeout=30)[0].decode().split()


def test_training_waits_for_its_turn_and_says_when_it_is_through(tmp_path, environment):
    turn = tmp_path / "turn"
    assert waits(TRAINER, environment | {"RANK": "3"}, turn, "ready-3") == ["trained"]
    assert (turn / "done-3").exists()
    [now], [peak] = (host_memory(turn)[key] for key in ("host_gib", "host_peak_gib"))
    assert 0 < now <= peak


def test_one_of_several_ranks_waits_with_its_libraries_before_it_meets_the_others(tmp_path, environment):
    turn = tmp_path / "turn"
    early = environment | {"RANK": "1", "TUNEBOOK_BENCH_WAITS_EARLY": "1"}
    assert waits(RANK, early, turn, "ready-1") == ["starts", "imported", "met"]
    (turn / "go").unlink()
    usual = environment | {"RANK": "1"}
    ended = subprocess.run([sys.executable, "-c", RANK], env=usual, capture_output=True, text=True, timeout=30)
    assert ended.stdout.split() == ["starts", "met"], "else it waits when it is to train"


def test_a_rank_alone_waits_once_the_trainer_is_imported(tmp_path, environment):
    early = {**environment, "TUNEBOOK_BENCH_WAITS_EARLY": "1"}
    early.pop("RANK", None)
    importing = "from tunebook.train.trainer import RecipeTrainer\nprint('imported')\n"
    assert waits(importing, early, tmp_path / "turn", "ready-0") == ["imported"]


def test_the_host_memory_of_each_rank_is_recorded(tmp_path):
    assert host_memory(tmp_path) == {}
    for rank in (10, 2):
        (tmp_path / f"host-{rank}").write_text(f'{{"host_peak_gib": {rank}.5, "host_pinned_gib": {rank}}}')
    assert host_memory(tmp_path) == {"host_peak_gib": [2.5, 10.5], "host_pinned_gib": [2, 10]}
