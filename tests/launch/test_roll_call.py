"""The roll call over real connections: who is let in, who is missing, what the others hear."""

import signal
import socket
import time
from pathlib import Path

import pytest

from tunebook.errors import RequestError, TunebookError
from tunebook.launch.line import Line
from tunebook.launch.roll_call import RollCall

FOLDER = Path("/runs/1")


@pytest.fixture
def opened():
    made = []

    def make(num_members=2, *, start_timeout_s=60, stop_timeout_s=60, begins=True, **settings):
        roll = RollCall(num_members=num_members, token="word", **settings)
        made.append(roll)
        if begins:
            roll.begin(FOLDER, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s)
        return roll

    yield make
    for roll in made:
        roll.close(1)


class Caller:
    """A node that calls."""

    def __init__(self, roll, node, **said):
        self.roll = roll
        self.line = Line(socket.create_connection(("127.0.0.1", roll.port)))
        usual = {
            "token": "word", "node": node, "ranks": [node], "host": f"host{node}", "address": "127.0.0.1",
            "reached_at": "127.0.0.1", "port": 4000 + node, "versions": "torch 1", "code": "c0de", "problems": [],
            "place": None,
        }  # fmt: skip
        self.line.send("hello", **(usual | said))
        settle(roll)

    def heard(self):
        """What it is told, but for the answer that every caller gets at once."""
        return [message for message in self.answered() if message["kind"] != "welcome"]

    def answered(self):
        settle(self.roll)
        return self.line.receive(0.05)


@pytest.fixture
def call():
    """Call as a node; the lines are closed after the test."""
    made = []

    def begin(roll, node, **said):
        made.append(Caller(roll, node, **said))
        return made[-1]

    yield begin
    for caller in made:
        caller.line.close()


def settle(roll):
    for _ in range(6):
        roll.poll(0.01)


def test_all_are_told_to_go_together_and_where_to_meet(opened, call):
    went = []
    roll = opened(on_go=went.append)
    first = call(roll, 0)
    assert first.heard() == []
    assert roll.missing() == "node 1 of 2 nodes has not called in"
    second = call(roll, 1, address="10.0.0.2", reached_at="10.0.0.1")
    go = {"kind": "go", "folder": "/runs/1", "master_address": "10.0.0.1", "master_port": 4000}
    assert first.heard() == second.heard() == [go]  # node 0 came over loopback: the others reached its machine at .1
    assert went == [0]
    assert roll.hosts == {0: "host0", 1: "host1"}


def test_who_calls_before_the_launcher_has_prepared_waits_in_line(opened, call):
    roll = opened(num_members=1, begins=False)
    caller = call(roll, 0)
    assert caller.heard() == []
    roll.begin(FOLDER, start_timeout_s=60, stop_timeout_s=60)
    early = call(roll, 0)  # as in line: heard only now
    assert [message["kind"] for message in (caller.heard() + early.heard())] != []


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"node": 2}, r"node 2 \(host1\) called in, and the run has 2: numbers go from 0 to 1; set launcher.node_rank"),
        ({"node": 0}, r"node 0 \(host1\) called in, and so did host0 by that number"),
        (
            {"versions": "torch 2"},
            r"node 1 \(host1\) has other software than node 0 \(host0\): torch 2, and there",
        ),
        (
            {"code": "0ther" * 4},
            r"node 1 \(host1\) has other code of Tunebook than node 0 \(host0\), .* hash 0ther0ther0t, and there c0de; "
            r"bring every node to the same commit",
        ),
        (
            {"weights": "b" * 64},
            r"node 1 \(host1\) has other weights of the base model in model\.path than node 0 \(host0\): .* is "
            r"bbbbbbbbbbbb, and there aaaaaaaaaaaa; copy the folder anew",
        ),
        (
            {"problems": ["hardware.generation: hopper"]},
            r"node 1 \(host1\) cannot take part: hardware.generation",
        ),
        ({"config_sha256": "b"}, r"node 1 \(host1\) was asked for another run: type the same words on every node"),
        (
            {"config_sha256": "b", "node": 7, "problems": ["other hardware"]},
            r"node 7 \(host1\) was asked for another run: type the same words on every node",
        ),
    ],
)
def test_a_node_that_does_not_fit_sends_all_home(opened, said, message, call):
    roll = opened(config_sha256="a")
    first = call(roll, 0, weights="a" * 64)
    second = call(roll, **({"node": 1, "host": "host1"} | said))
    with pytest.raises(RequestError, match=message):
        raise roll.failure
    assert [each["kind"] for each in first.heard()] == ["refuse"]
    assert [each["kind"] for each in second.heard()] == ["refuse"]
    assert roll.is_over


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"config_sha256": "b"}, "node 1 (host9) was asked for another run: type the same words on every node"),
        ({"config_sha256": "a"}, "node 1 (host9) called in, and the run is at work already, with all its nodes"),
        ({"node": 5}, "node 5 (host9) called in, and the run has 3"),
        ({"versions": "torch 2"}, "node 1 (host9) called in, and the run is at work already"),
    ],
    ids=["other-words", "same-words", "other-number", "other-software"],
)
@pytest.mark.parametrize("is_first_lost", [False, True])
def test_who_comes_while_the_run_is_at_work_is_refused_and_ends_nothing(opened, call, said, message, is_first_lost):
    roll = opened(3, config_sha256="a")
    first, second, third = (call(roll, node) for node in range(3))
    assert [each["kind"] for each in first.heard() + third.heard()] == ["go", "go"]
    if is_first_lost:  # while the others save, its place is not taken by another
        second.line.close()
        assert [each["kind"] for each in first.heard() + third.heard()] == ["stop", "stop"]
    failure = roll.failure
    (answer,) = call(roll, **({"node": 1, "host": "host9"} | said)).heard()
    assert answer["kind"] == "refuse"
    assert answer["message"].startswith(message)
    assert first.heard() == third.heard() == []
    assert roll.failure is failure
    assert (failure is not None, roll.is_over, roll.stopped_by) == (is_first_lost, False, None)


def test_a_node_of_another_run_ends_no_run_that_waits_for_others(opened, call):
    roll = opened(3, config_sha256="a")
    first = call(roll, 0)
    second = call(roll, 1, config_sha256="a")
    (answer,) = call(roll, 1, host="host9", config_sha256="b").heard()
    assert answer["message"].startswith("node 1 (host9) was asked for another run")
    assert (roll.failure, roll.is_over) == (None, False)
    third = call(roll, 2)
    assert [each["kind"] for caller in (first, second, third) for each in caller.heard()] == ["go", "go", "go"]


def test_who_comes_after_the_run_was_given_up_hears_why(opened, call):
    roll = opened()
    call(roll, 0, problems=["no GPU"])
    (answer,) = call(roll, 1).heard()
    assert answer == {"kind": "refuse", "message": "node 0 (host0) cannot take part: no GPU"}
    assert roll.is_over


def test_a_caller_is_answered_at_once_and_also_while_the_launcher_prepares(opened, call):
    roll = opened(num_members=2, begins=False)
    roll.answer_early()
    line = Line(socket.create_connection(("127.0.0.1", roll.port)))
    hello = {
        "token": "word", "node": 1, "ranks": [1], "host": "host1", "address": "127.0.0.1", "reached_at": "127.0.0.1",
        "port": 4001, "versions": "torch 1", "code": "c0de", "problems": [], "place": None,
    }  # fmt: skip
    line.send("hello", **hello)
    assert line.receive(20) == [{"kind": "welcome"}]  # nobody else polls
    roll.begin(FOLDER, start_timeout_s=60, stop_timeout_s=60)
    assert roll.missing() == "node 0 of 2 nodes has not called in"
    first = call(roll, 0)
    assert [each["kind"] for each in first.answered()] == ["welcome", "go"]
    assert [each["kind"] for each in line.receive(20)] == ["go"]
    line.close()


def test_who_is_refused_while_the_launcher_prepares_may_correct_it_and_call_again(opened, call):
    roll = opened(config_sha256="a", begins=False)
    answers = []
    for wrong in ({"config_sha256": "b"}, {"problems": ["no GPU"]}):
        (answer,) = call(roll, 1, **wrong).heard()
        answers.append(answer["message"])
    assert answers[0].startswith("node 1 (host1) was asked for another run: type the same words on every node")
    assert answers[1] == "node 1 (host1) cannot take part: no GPU"
    assert (roll.failure, roll.is_over) == (None, False)
    second = call(roll, 1, config_sha256="a")
    assert [each["kind"] for each in second.answered()] == ["welcome"]
    roll.begin(FOLDER, start_timeout_s=60, stop_timeout_s=60)
    first = call(roll, 0)
    assert [each["kind"] for each in first.heard() + second.heard()] == ["go", "go"]


def test_who_was_refused_early_and_did_not_come_again_ends_the_run_as_it_begins(opened, call):
    roll = opened(3, begins=False)
    call(roll, 1, problems=["no GPU"])
    call(roll, 2, problems=["no disk"])
    call(roll, 2)
    assert roll.failure is None
    roll.begin(FOLDER, start_timeout_s=600, stop_timeout_s=60)
    settle(roll)
    assert roll.failure.message == "node 1 (host1) cannot take part: no GPU"
    assert roll.failure.problem_id == "node-refused"


@pytest.mark.parametrize("said", [{"weights": "a" * 64}, {"weights": None}, {}], ids=["same", "not-looked", "older"])
def test_who_has_the_same_weights_or_has_not_looked_takes_part(opened, call, said):
    roll = opened()
    first, second = call(roll, 0, weights="a" * 64), call(roll, 1, **said)
    assert [each["kind"] for each in first.heard() + second.heard()] == ["go", "go"]


def test_a_stranger_is_turned_away_and_changes_nothing(opened, call):
    roll = opened()
    for said in ({"token": "guess"}, {"ranks": None}):
        (answer,) = call(roll, 0, **said).heard()
        assert answer["kind"] == "refuse"
        assert "another run, or another version of Tunebook, is at work on this port" in answer["message"]
    assert (roll.failure, roll.is_over) == (None, False)


def test_who_is_missing_is_named_when_the_time_is_up(opened, call):
    roll = opened(3, start_timeout_s=0.1, names={2: "gpu07"})
    call(roll, 0)
    time.sleep(0.1)
    settle(roll)
    assert roll.failure.message == (
        "node 1, node 2 (gpu07) of 3 nodes have not called in within 0.1 s (launcher.start_timeout_s)"
    )
    assert (roll.failure.exit_code, roll.is_over) == (1, True)


def test_a_node_that_came_too_early_and_left_may_come_again(opened, call):
    roll = opened()
    call(roll, 0).line.close()
    settle(roll)
    first, second = call(roll, 0), call(roll, 1)
    assert [each["kind"] for each in first.heard() + second.heard()] == ["go", "go"]


def test_when_one_is_lost_the_others_get_time_to_save(opened, call):
    roll = opened(stop_timeout_s=40)
    first, second = call(roll, 0), call(roll, 1)
    first.heard()
    second.line.close()
    assert first.heard() == [{"kind": "stop", "signal": "SIGTERM", "kill_after_s": 40}]
    assert roll.failure.message == "node 1 (host1) was lost with rank 1: its launcher was killed, or the machine"
    assert roll.lost_ranks == [1]
    assert not roll.is_over
    first.line.send("ended", exit_code=0, why=None)
    settle(roll)
    assert roll.is_over


def test_a_lost_node_of_several_ranks_names_the_first_and_the_last(opened, call):
    roll = opened()
    call(roll, 0, ranks=[0, 1, 2])
    call(roll, 1, ranks=[3, 4, 5]).line.close()
    settle(roll)
    assert roll.failure.message.startswith("node 1 (host1) was lost with ranks 3 to 5: ")
    assert roll.lost_ranks == [3, 4, 5]


def test_when_ranks_of_one_fail_the_others_are_ended_soon(opened, call):
    roll = opened()
    first, second = call(roll, 0), call(roll, 1)
    first.heard()
    second.line.send("ended", exit_code=-9, why=None)
    assert first.heard() == [{"kind": "stop", "signal": "SIGTERM", "kill_after_s": 30}]
    assert (roll.failed.rank, roll.failed.exit_code) == (1, -9)
    first.line.send("ended", exit_code=1, why=None)
    settle(roll)
    assert roll.is_over
    assert roll.failure is None  # the ranks say why
    roll.close(7)
    assert second.line.receive(1)[-1] == {"kind": "end", "exit_code": 7}


def test_a_request_of_one_node_reaches_all(opened, call):
    roll = opened()
    first, second = call(roll, 0), call(roll, 1)
    first.heard()
    second.heard()
    second.line.send("asked", signal="SIGINT")
    stop = {"kind": "stop", "signal": "SIGINT", "kill_after_s": None}
    assert first.heard() == [stop]
    assert second.heard() == [stop]
    assert roll.stopped_by == "SIGINT"


@pytest.mark.parametrize(
    ("gone_in_s", "stop_timeout_s", "kill_after_s", "when"),
    [(20.4, 60, 20.4, " in 20 s"), (90, 60, 60, " in 90 s"), (None, 60, 60, "")],
    ids=["sooner", "later", "unknown"],
)
def test_before_a_machine_is_taken_away_all_get_time_to_save(
    opened, call, gone_in_s, stop_timeout_s, kill_after_s, when
):
    roll = opened(reassembles=True, unit="rank", stop_timeout_s=stop_timeout_s)
    first, second = call(roll, 0), call(roll, 1)
    first.heard()
    second.heard()
    first.line.send("notice", ranks=[1], gone_in_s=gone_in_s)
    stop = {"kind": "stop", "signal": "SIGTERM", "kill_after_s": kill_after_s}
    assert first.heard() == [stop]
    assert second.heard() == [stop]
    assert roll.stopped_by == "SIGTERM"
    assert roll.notice == f"host1 is to be taken away{when}, with rank 1"
    for caller in (first, second):
        caller.line.send("ended", exit_code=6, why=None)
    settle(roll)
    assert roll.is_over  # and does not wait for others in their place


def test_machines_that_are_taken_away_are_named_with_their_ranks(opened, call):
    roll = opened(3)
    callers = [call(roll, 0, host="a"), call(roll, 1, host="b"), call(roll, 2, host="b")]
    callers[0].line.send("notice", ranks=[1, 2], gone_in_s=3.0)
    settle(roll)
    assert roll.notice == "b is to be taken away in 3 s, with ranks 1, 2"


def test_a_request_before_the_start_sends_all_home(opened, call):
    roll = opened()
    first = call(roll, 0)
    roll.stop(signal.SIGTERM)
    assert first.heard() == [{"kind": "refuse", "message": "stopped by SIGTERM before the start"}]
    assert roll.is_over


@pytest.mark.parametrize("ends", [False, True], ids=["before-the-end", "after-the-end"])
def test_who_comes_after_a_stop_before_the_start_is_sent_home_and_changes_nothing(opened, call, ends):
    """A container that was slow to start would call for `launcher.start_timeout_s` otherwise."""
    roll = opened()
    roll.stop(signal.SIGINT)
    settle(roll)
    assert roll.is_over
    if ends:
        roll.end(6)
    refusal = {"kind": "refuse", "message": "stopped by SIGINT before the start"}
    assert call(roll, 0).heard() == call(roll, 1).heard() == [refusal]
    assert (roll.failure, roll.is_running) == (None, False)


def test_who_comes_after_the_end_of_a_run_is_sent_home(opened, call):
    roll = opened(1, reassembles=True)
    first = call(roll, 0)
    first.line.send("ended", exit_code=0, why=None)
    settle(roll)
    roll.end(0)
    assert [each["kind"] for each in first.heard()] == ["go", "end"]
    assert call(roll, 0).heard() == [{"kind": "refuse", "message": "the run has ended"}]
    assert roll.failure is None


def test_containers_with_other_code_than_the_launchers_are_refused(opened, call):
    """All of them alike, so that comparing them with each other shows nothing."""
    roll = opened(code="1auncher" * 8)
    first = call(roll, 0, code="0ther" * 4)
    assert [each["kind"] for each in first.heard()] == ["refuse"]
    assert roll.failure.message == (
        "node 0 (host0) has other code of Tunebook in its container than the launcher: its files have the hash "
        "0ther0ther0t, and there 1auncher1aun; bring the image of every node up to date (make image, or make pull), "
        "or run what it holds: TUNEBOOK_USE_IMAGE_SOURCES=1"
    )
    assert roll.failure.exit_code == 2
    same = opened(1, code="c0de")
    assert [each["kind"] for each in call(same, 0).heard()] == ["go"]
    assert same.hello_of(0)["code"] == "c0de"


def test_lost_workers_may_be_replaced(opened, call):
    went = []
    roll = opened(reassembles=True, unit="rank", on_go=went.append)
    first, second = call(roll, 0), call(roll, 1)
    second.line.close()
    settle(roll)
    first.line.send("ended", exit_code=1, why=None)
    settle(roll)
    assert (roll.is_over, roll.failure) == (False, None)
    assert first.line.receive(1)[-1] == {"kind": "end", "exit_code": 1}
    again = [call(roll, 0), call(roll, 1)]
    assert went == [0, 1]
    for caller in again:
        caller.line.send("ended", exit_code=0, why=None)
    settle(roll)
    assert roll.is_over


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (lambda worker: worker.line.close(), r"after rank 1 \(host1\) was lost"),
        (
            lambda worker: worker.line.send("ended", exit_code=-9, why=None),
            r"after rank 1 on host1 had failed: it was killed by SIGKILL",
        ),
    ],
    ids=["lost", "killed"],
)
def test_lost_workers_that_nobody_replaces_are_named_when_the_time_is_up(opened, call, ends, said):
    roll = opened(reassembles=True, unit="rank", start_timeout_s=0.3)
    first, second = call(roll, 0), call(roll, 1)
    ends(second)
    settle(roll)
    first.line.send("ended", exit_code=1, why=None)
    settle(roll)
    assert roll.failure is None
    call(roll, 0)  # comes again, alone
    time.sleep(0.3)
    settle(roll)
    with pytest.raises(TunebookError, match=r"rank 1 of 2 ranks has not called in within 0.3 s \(.*\) " + said):
        raise roll.failure


def test_what_ended_the_last_attempt_is_said_where_no_other_follows(opened, call):
    roll = opened(reassembles=True, unit="rank")
    first, second = call(roll, 0), call(roll, 1)
    second.line.close()
    settle(roll)
    first.line.send("ended", exit_code=1, why=None)
    settle(roll)
    assert (roll.is_over, roll.failure) == (False, None)  # others may come in their place
    roll.conclude()
    assert roll.is_over
    assert roll.failure.message == "rank 1 (host1) was lost: its launcher was killed, or the machine"
    assert roll.lost_ranks == [1]


def test_what_ended_an_earlier_attempt_is_no_failure_of_the_next(opened, call):
    roll = opened(reassembles=True, unit="rank")
    first, second = call(roll, 0), call(roll, 1)
    second.line.close()
    settle(roll)
    first.line.send("ended", exit_code=1, why=None)
    settle(roll)
    for caller in (call(roll, 0), call(roll, 1)):
        caller.line.send("ended", exit_code=0, why=None)
    settle(roll)
    roll.conclude()
    assert (roll.failure, roll.lost_ranks) == (None, [])


def test_workers_on_other_machines_than_planned_are_refused(opened, call):
    roll = opened(num_places=2, unit="rank")
    call(roll, 0, place="a")
    call(roll, 1, place="a")
    with pytest.raises(RequestError, match=r"the ranks were placed on 1 machine, and hardware.num_nodes=2 was planned"):
        raise roll.failure


def test_a_port_in_use_names_another(opened):
    roll = opened()
    with pytest.raises(RequestError, match=f"launcher.master_port={roll.port}: .* Try launcher.master_port="):
        opened(port=roll.port)
