"""The answer of the process: asked once for a config.json, remembered, and asked again where the memory is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.plan import architecture as meta_device
from tunebook.plan.architecture import ALL_WAYS

ANSWER = {
    "architecture": "XForCausalLM", "num_parameters": 1000, "num_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "bfloat16",
    "measured": {
        "num_layers": 2, "parameters": 400, "linear_inputs": 50, "adapter_parameters": 90,
        "linear_parameters": 300, "active_parameters": 350, "largest_parameter": 200,
        "unreached": ["model.tower"], "unreached_parameters": 70,
        "attention": ["eager", "sdpa"],
        "adapters": {"q_proj": [16, 24]}, "expert_adapters": {"w2": [20, 30]},
        "saved": {"fp32/full/sdpa": [0, 100, 4, 0, 50, 2]},
        "saved_without_autocast": {"cast/full/sdpa": [0, 80, 4, 0, 45, 2]},
        "saved_beside_experts": {"fp32/adapter/sdpa": [0, 90, 4, 0, 40, 2]},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "architectures"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    return tmp_path / "config.json"


@pytest.fixture
def asked(monkeypatch):
    """Every time that the process would have been started; `asked.answer` is what it says."""

    class Asked(list):
        answer = ANSWER

    calls = Asked()
    monkeypatch.setattr(meta_device, "_ask", lambda file, trusted, *_: calls.append((file, trusted)) or calls.answer)
    return calls


def test_it_is_asked_once_for_the_same_file_in_the_same_environment(file, asked, cache, monkeypatch):
    facts = meta_device.trace_file(file)
    assert (facts.architecture, facts.num_parameters, facts.tie_word_embeddings) == ("XForCausalLM", 1000, False)
    assert facts.measured.saved == {"fp32/full/sdpa": [0, 100, 4, 0, 50, 2]}
    assert facts.measured.saved_without_autocast == {"cast/full/sdpa": [0, 80, 4, 0, 45, 2]}
    assert facts.measured.saved_beside_experts == {"fp32/adapter/sdpa": [0, 90, 4, 0, 40, 2]}
    assert (facts.measured.adapters, facts.measured.expert_adapters) == ({"q_proj": [16, 24]}, {"w2": [20, 30]})
    assert (facts.measured.parameters, facts.measured.adapter_parameters) == (400, 90)
    assert (facts.measured.linear_parameters, facts.measured.active_parameters) == (300, 350)
    assert facts.measured.largest_parameter == 200
    assert (facts.unreached, facts.measured.unreached_parameters) == (["model.tower"], 70)
    assert meta_device.trace_file(file) == facts
    assert asked == [(file, False)]
    file.write_text('{"model_type": "x", "vocab_size": 33}')
    meta_device.trace_file(file)
    monkeypatch.setattr(meta_device, "installed_version", lambda package: "99.0")
    meta_device.trace_file(file, trust_remote_code=True)
    assert asked == [(file, False), (file, False), (file, True)]
    assert len(list(cache.iterdir())) == 3


def test_people_are_told_once_that_it_takes_a_while(file, asked, cache, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    meta_device.trace_file(file)
    told = f"tracing the layers of {file}, once: this takes 5 to 15 s, longer on a busy machine\n"
    assert capsys.readouterr().err == told
    meta_device.trace_file(file)
    for remembered in cache.iterdir():
        remembered.unlink()
    meta_device.trace_file(file)
    assert len(asked) == 2
    assert capsys.readouterr() == ("", "")


def test_programs_are_told_nothing_but_the_answer(file, asked, capsys):
    meta_device.trace_file(file)
    assert len(asked) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps(ANSWER),  # without what was traced
        json.dumps(ANSWER | {"num_layers": None}),
        json.dumps({key: value for key, value in ANSWER.items() if key != "measured"}),
        json.dumps(ANSWER | {"measured": ANSWER["measured"] | {"saved": {"fp32/full/sdpa": [1, 2]}}}),
        json.dumps(ANSWER | {"measured": ANSWER["measured"] | {"adapters": {"q_proj": [1]}}}),
    ],
    ids=["empty", "cut", "list", "null", "untold", "wrong type", "key missing", "too few numbers", "one size"],
)
def test_a_damaged_memory_is_made_again(file, asked, cache, damage):
    facts = meta_device.trace_file(file)
    (remembered,) = cache.iterdir()
    remembered.write_text(damage)
    assert meta_device.trace_file(file) == facts
    assert len(asked) == 2
    assert ANSWER.items() <= json.loads(remembered.read_text()).items()
    assert [each.name for each in cache.iterdir()] == [remembered.name]  # nothing half written beside it


def test_nothing_is_remembered_where_nothing_can_be_written(file, asked, cache):
    cache.parent.mkdir()
    cache.write_text("a file where the folder would be")
    assert meta_device.trace_file(file).num_parameters == 1000
    assert meta_device.trace_file(file).num_parameters == 1000
    assert len(asked) == 2


def test_nothing_is_asked_without_torch(file, asked, monkeypatch):
    monkeypatch.setattr(meta_device, "installed_version", lambda package: None if package == "torch" else "1.0")
    assert meta_device.trace_file(file) is None
    assert asked == []


@pytest.mark.parametrize(
    ("answer", "problem", "said"),
    [
        (
            {"error": "unknown-architecture", "reason": "model_type=lama", "meant": "llama"},
            "unknown-architecture",
            r"model_type=lama; correct model_type in the file \(did you mean 'llama'\?\), or .* or set model.trust_rem",
        ),
        (
            {"error": "unknown-architecture", "reason": "model_type=foobar"},
            "unknown-architecture",
            "model_type=foobar; correct model_type in the file, or use a newer transformers, or set ",
        ),
        (
            {"error": "cannot-build", "reason": "KeyError: 'nonsense'"},
            "model-config",
            r"config.json: no model can be built with these sizes \(KeyError: 'nonsense'\); correct the file",
        ),
        ({"error": "cannot-build"}, "model-config", "no reason is given"),
        (
            {"error": "code-absent", "reason": "configuration_phi3.py", "is_known": True},
            "model-config",
            r"auto_map names .* not in this folder: configuration_phi3.py; copy it .* model.trust_remote_code=false: ",
        ),
        (
            {"error": "code-absent", "reason": "modeling_x.py", "is_known": False},
            "model-config",
            "modeling_x.py; copy it there, or download the whole model$",
        ),
        (
            {"error": "not-causal", "reason": "model_type=t5", "kind": "an encoder-decoder"},
            "model-not-causal",
            "model_type=t5 is an encoder-decoder, which is not trained here; name a causal language model",
        ),
    ],
)
def test_a_refusal_says_what_to_do_and_is_not_remembered(file, asked, cache, answer, problem, said):
    asked.answer = answer
    with pytest.raises(RequestError, match=said) as caught:
        meta_device.trace_file(file)
    assert caught.value.problem_id == problem
    assert not cache.exists()


def test_the_process_ends_without_an_answer(file, monkeypatch):
    """As it would where torch is broken: its last words are the reason."""
    monkeypatch.setattr(meta_device.sys, "executable", "/bin/false")
    assert meta_device._ask(file, False, ALL_WAYS, None) == {
        "error": "cannot-build",
        "reason": "the process ended with 1",
    }


def test_a_process_that_takes_too_long_is_ended(file, monkeypatch):
    monkeypatch.setattr(meta_device, "_MAX_SILENCE_S", 0.001)
    assert meta_device._ask(file, False, ALL_WAYS, None) == {
        "error": "cut-off",
        "reason": "nothing new was found for 0 s",
    }


def test_a_process_that_takes_long_and_finds_something_now_and_then_is_waited_for(tmp_path, monkeypatch):
    """On a machine that computes for others too; each look at what was found is one look later than the last."""
    monkeypatch.setattr(meta_device, "_MAX_SILENCE_S", 0.05)
    looked = []

    def num_found(_):
        looked.append(None)
        if len(looked) == 4:
            (tmp_path / "go").touch()
        return len(looked)

    monkeypatch.setattr(meta_device, "_num_found", num_found)
    waiting = f"import sys, time, os\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    command = [sys.executable, "-c", f"{waiting}print('done', file=sys.stderr)"]
    assert meta_device._run(command, dict(os.environ), tmp_path / "answer.found") == "done"
    assert len(looked) >= 4


def test_what_was_found_is_counted(tmp_path):
    progress = meta_device.progress_file(tmp_path / "answer.json")
    assert meta_device._num_found(progress) == 0
    progress.write_bytes(b"..")
    assert meta_device._num_found(progress) == 2


def test_what_takes_too_long_ends_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(meta_device, "_MAX_SILENCE_S", 2.0)
    code = f"import os, time; os.fork(); open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(60)"
    assert meta_device._run([sys.executable, "-c", code], dict(os.environ), tmp_path / "answer.found") is None
    started = [int(file.name) for file in tmp_path.iterdir() if file.name.isdecimal()]
    assert len(started) == 2
    end = time.monotonic() + 20
    while any(map(is_running, started)):  # the kernel takes a moment
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word of a parent's death is Linux's")
def test_it_ends_with_a_plan_that_is_killed(tmp_path):
    look = f"import os, time; open({str(tmp_path / 'started')!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    plan = (
        "import os, sys; from pathlib import Path; from tunebook.plan import architecture as meta_device; "
        f"meta_device._run([sys.executable, '-c', {look!r}], dict(os.environ), Path({str(tmp_path / 'found')!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", plan]) as killed:
        started, end = tmp_path / "started", time.monotonic() + 20
        while not (started.exists() and started.read_text().endswith(" ")):
            assert time.monotonic() < end
            time.sleep(0.02)
        killed.kill()
    while is_running(int(started.read_text())):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid):
    """Whether it is there and no zombie, which an orphan is until somebody collects it."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


def test_being_cut_off_says_nothing_against_the_file(file, asked):
    asked.answer = {"error": "cut-off", "reason": "nothing new was found for 300 s"}
    with pytest.raises(RequestError, match=r"could not be traced \(nothing new was found for 300 s\); try again"):
        meta_device.trace_file(file)


@pytest.fixture
def ways(asked, monkeypatch):
    """What the process would have been asked to trace, each time; it answers with as many numbers."""
    calls = []

    def answer(_, __, ways, compiles):
        calls.append((*ways, compiles))
        saved = {f"{way}/flash": [0, 1, 0, 0, 1, 0] for way in ways}
        return ANSWER | {"measured": ANSWER["measured"] | {"saved": saved}}

    monkeypatch.setattr(meta_device, "_ask", answer)
    return calls


def test_only_what_is_missing_is_traced_and_added_to_the_rest(file, ways, cache):
    full, adapter = "autocast/full", "bf16/adapter"
    for wanted in ((full,), (full,), (full, adapter), (adapter,), ALL_WAYS, (full, "bf16/dropout")):
        facts = meta_device.trace_file(file, ways=wanted)
        assert {f"{way}/flash" for way in wanted} <= {*facts.measured.saved}
    assert ways == [(full, True), (adapter, True), (*(way for way in ALL_WAYS if way not in (full, adapter)), True)]
    assert len([*cache.iterdir()]) == 1


def test_dropout_is_of_compiled_layers(file, ways):
    for way in ("bf16/dropout", "bf16/adapter"):
        meta_device.trace_file(file, ways=[way], compiles=False)
    assert ways == [("bf16/dropout", False)], "layers that are not compiled have the same traces"
    meta_device.trace_file(file, ways=["bf16/adapter"], compiles=True)
    assert ways[1:] == [("bf16/adapter", True)]


def test_a_trace_with_compiled_layers_serves_a_run_without_them(file, ways, monkeypatch):
    for compiles in (False, None, True, None, False):
        meta_device.trace_file(file, ways=["bf16/full"], compiles=compiles)
    assert [compiles for _, compiles in ways] == [False, True], "auto compiles no layers of XForCausalLM"
    monkeypatch.setattr(meta_device, "COMPILED_ARCHITECTURES", {"XForCausalLM"})
    for compiles in (False, None, True, None, False):
        meta_device.trace_file(file, ways=["bf16/full"], compiles=compiles)
    assert [compiles for _, compiles in ways[2:]] == [False, None], "auto does now"
