"""What a Ray worker does before its rank starts, and with a preemption notice; without Ray."""

from types import SimpleNamespace

import pytest

from tunebook.errors import TunebookError
from tunebook.launch import node
from tunebook.launch.ray import worker
from tunebook.launch.ray.worker import NoticeWatch, notice_of


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_worker_looks_at_its_machine_before_it_joins(monkeypatch, tmp_path, local_rank):
    """Drivers that wake up take longer than a launcher waits for the facts of a node that has connected."""
    order = []

    def look(_config, *, checks_machine):
        order.append(f"look, checks machine: {checks_machine}")
        return {}

    def connect(*_words, **_options):
        order.append("connect")
        raise TunebookError("no answer", problem_id="launcher-out-of-reach")

    context = SimpleNamespace(get_world_rank=lambda: 1, get_local_rank=lambda: local_rank)
    (tmp_path / "run.yaml").touch()
    monkeypatch.setenv(worker.TOKEN_VARIABLE, "")
    ray_context = SimpleNamespace(get_node_id=lambda: "a")
    modules = {
        "ray.train": SimpleNamespace(get_context=lambda: context),
        "ray": SimpleNamespace(get_runtime_context=lambda: ray_context),
    }
    monkeypatch.setattr(worker, "import_module", modules.__getitem__)
    monkeypatch.setattr(
        worker, "load_config", lambda file: SimpleNamespace(launcher=SimpleNamespace(start_timeout_s=1))
    )
    monkeypatch.setattr(worker, "node_facts", look)
    monkeypatch.setattr(node, "find_launcher", connect)
    with pytest.raises(TunebookError, match="no answer"):
        worker.work({"folder": str(tmp_path), "token": "word", "endpoint": "head:1", "working_folder": "/"})
    assert order == [f"look, checks machine: {local_rank == 0}", "connect"]


def info(deadline_ms=None, ranks=(1,)):
    """What Ray Train's get_preemption_info returns."""
    return SimpleNamespace(deadline_ms=deadline_ms, preempted_ranks=list(ranks))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(worker, "_ASK_EVERY_S", 0.0)


@pytest.mark.parametrize(
    ("deadline_ms", "gone_in_s"),
    [(1_000_030_500, 30.5), (999_999_000, 0.0), (None, None)],
    ids=["ahead", "past", "unknown"],
)
def test_the_time_left_counts_from_now(deadline_ms, gone_in_s):
    assert notice_of(info(deadline_ms, [2, 3]), now=1_000_000.0) == {"ranks": [2, 3], "gone_in_s": gone_in_s}


def test_asks_until_told_and_hands_that_on_once():
    answers = [None, None, info()]
    told = []
    watch = NoticeWatch(lambda: answers.pop(0), told.append)
    watch.start()
    watch.join(20)
    assert told == [{"ranks": [1], "gone_in_s": None}]
    assert (answers, watch.has_come) == ([], True)


def test_an_end_of_ray_is_no_notice():
    def ask():
        raise RuntimeError("the actor died")

    told = []
    watch = NoticeWatch(ask, told.append)
    watch.start()
    watch.join(20)
    assert (told, watch.has_come, watch.is_alive()) == ([], False, False)
