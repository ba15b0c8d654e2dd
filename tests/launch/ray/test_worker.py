"""What a Ray worker does before its rank starts, with words in the place of Ray."""

from types import SimpleNamespace

import pytest

from tunebook.errors import TunebookError
from tunebook.launch.ray import worker


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_worker_looks_at_its_machine_before_it_calls(monkeypatch, tmp_path, local_rank):
    """Drivers that wake up take longer than a launcher waits for the words of who has called."""
    order = []

    def look(_config, *, is_judged):
        order.append(f"look, judged: {is_judged}")

    def call(*_words):
        order.append("call")
        raise TunebookError("no answer", problem_id="launcher-out-of-reach")

    context = SimpleNamespace(get_world_rank=lambda: 1, get_local_rank=lambda: local_rank)
    (tmp_path / "run.yaml").touch()
    monkeypatch.setenv(worker.TOKEN_VARIABLE, "")
    monkeypatch.setattr(worker, "import_module", lambda name: SimpleNamespace(get_context=lambda: context))
    monkeypatch.setattr(
        worker, "load_config", lambda file: SimpleNamespace(launcher=SimpleNamespace(start_timeout_s=1))
    )
    monkeypatch.setattr(worker, "node_facts", look)
    monkeypatch.setattr(worker, "call_launcher", call)
    with pytest.raises(TunebookError, match="no answer"):
        worker.work({"folder": str(tmp_path), "token": "word", "meet": "head:1", "working_folder": "/"})
    assert order == [f"look, judged: {local_rank == 0}", "call"]
