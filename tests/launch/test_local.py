"""What the nodes of a run compare, and how a node that is started by hand finds the run of node 0."""

import pytest
from rich.console import Console

from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.files import atomic_write_json, read_json
from tunebook.launch import local as module
from tunebook.launch.local import START_FILE, announce_start, code_hash, join_run, refuse_other_node
from tunebook.record.run_folder import create_run_folder, write_outcome


@pytest.fixture
def started(small, tmp_path):
    """A configuration for two nodes, and the folder of its run."""
    model = ModelConfig(path="book:recipes/quickstart/model")
    config = small(nodes=2, timeout_s=1, sections={"model": model, "outputs": str(tmp_path)})
    folder = create_run_folder(tmp_path, "small")
    (folder / "run.yaml").write_text(config_to_yaml(config))
    atomic_write_json(folder / "prepared.json", {"folder": str(tmp_path)})
    announce_start(config, folder)
    return config, folder


@pytest.mark.parametrize("name", ["code", "weights"])
def test_a_node_that_differs_from_node_0_is_refused(started, name):
    config, folder = started
    refuse_other_node(config, folder)
    atomic_write_json(folder / START_FILE, read_json(folder / START_FILE) | {name: "another"})
    with pytest.raises(RequestError) as caught:
        refuse_other_node(config, folder)
    assert caught.value.problem_id == "node-refused"


def test_a_node_without_the_prepared_data_is_refused(started, tmp_path):
    config, folder = started
    atomic_write_json(folder / "prepared.json", {"folder": str(tmp_path / "gone")})
    with pytest.raises(RequestError) as caught:
        refuse_other_node(config, folder)
    assert caught.value.problem_id == "folder-not-shared"


@pytest.mark.parametrize("is_named", [True, False])
def test_a_later_node_joins_the_run_that_node_0_starts(started, monkeypatch, is_named):
    config, folder = started
    config.launcher.node_rank, commands = 1, []

    def run(command, environment, **_):
        commands.append(command)
        for rank in range(2):
            write_outcome(folder, rank=rank, exit_code=6, reason="stopped")

    monkeypatch.setattr(module, "run_and_wait", run)
    assert join_run(config, folder if is_named else None, Console(quiet=True)) == 6
    (command,) = commands
    assert command[-1] == str(folder)
    assert "join_timeout=1,read_timeout=1,is_host=0" in command


def test_a_later_node_waits_for_node_0_and_gives_up_in_time(started):
    config, _ = started
    config.training.seed = 1  # another run
    with pytest.raises(TunebookError) as caught:
        join_run(config, None, Console(quiet=True))
    assert (caught.value.problem_id, caught.value.exit_code) == ("node-missing", 1)


def test_the_code_is_told_apart_by_its_content_and_by_nothing_else(tmp_path, monkeypatch):
    found = []
    for name, line in (("here", "SEED = 0"), ("elsewhere", "SEED = 0"), ("changed", "SEED = 1")):
        package = tmp_path / name / "tunebook"
        (package / "data" / "__pycache__").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "data" / "sampler.py").write_text(line)
        (package / "data" / "__pycache__" / "sampler.pyc").write_text(name)
        (package / "data" / ".#sampler.py").symlink_to("somebody@somewhere")  # as editors leave them
        monkeypatch.setattr(module.tunebook, "__file__", str(package / "__init__.py"))
        found.append(code_hash())
    here, elsewhere, changed = found
    assert here == elsewhere != changed
    (package / "_book" / "recipes").mkdir(parents=True)  # as an installed package has it
    (package / "_book" / "recipes" / "make_data.py").touch()
    assert code_hash() == changed
