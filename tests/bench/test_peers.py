"""Peers get the same documents, their logs are read right, and nothing of a peer's program is left running."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

import peer_llamafactory  # noqa: E402
import peer_torchtitan  # noqa: E402
from peer_documents import TINY, Corpus  # noqa: E402
from peer_runs import (  # noqa: E402
    TOKENS_PER_STEP,
    Attempt,
    Ended,
    last_error,
    medians,
    peer_environment,
    run,
    run_all,
)

from tunebook.data.synthetic import generate  # noqa: E402

LOGGED = (
    "[rank0]:[titan] 2026-11-22 10:02:20,701 - root - INFO - step: {}  loss: {}  grad_norm: 24.0890  "
    "memory: 98.12GiB(70.21%)  tps: {}  tflops: 402.11  mfu: 40.66%\n"
)


@pytest.fixture(scope="module")
def corpus():
    return Corpus(TINY, 40)


def read_by(folder, text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def test_each_peer_reads_the_documents_that_are_generated(corpus, tmp_path):
    corpus.write_tokenizer(tmp_path)
    texts = [json.loads(line)["text"] for line in corpus.write_texts(tmp_path / "texts").read_text().splitlines()]
    pairs = [json.loads(line) for line in corpus.write_pairs(tmp_path / "pairs").read_text().splitlines()]
    assert [[*read_by(tmp_path, text), corpus.eos_id] for text in texts] == corpus.documents
    read = [read_by(tmp_path, pair["instruction"]) + read_by(tmp_path, pair["output"]) for pair in pairs]
    assert read == corpus.documents
    assert all(corpus.padding_id not in ids and ids.count(corpus.eos_id) == 1 for ids in corpus.documents)
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(corpus.facts.vocab_size))


def test_they_are_those_of_the_synthetic_data_set():
    ours = Corpus("qwen25_3b", 3)
    config = ours_config()
    batches = generate(config, num_documents=3, vocab_size=151936, eos_token_id=151645)
    assert ours.documents == [ids for batch in batches for ids in batch.column("input_ids").to_pylist()]
    assert (config.min_tokens, config.max_tokens) == (16, 4096)


def ours_config():
    from tunebook.config.schema import SyntheticConfig

    return SyntheticConfig()


def test_the_share_of_the_peak_counts_attention_within_documents():
    one = Corpus("llama3_8b", 1)
    one.__dict__["documents"] = [[0] * 1000]
    flops = 6 * 8_030_261_248 + 6 * 32 * 4096 * 1000
    assert one.mfu(7000) == round(7000 * flops / 989e12, 4)


def test_torchtitans_log_is_read(corpus):
    text = "".join(LOGGED.format(step, f"{9 - step / 10:8.5f}", f"{6000 + step:,}") for step in range(1, 13))
    line = peer_torchtitan.measured(Ended(0, 1.0, "Running\n" + text), corpus, TOKENS_PER_STEP)
    assert (line["steps"], line["timed_steps"], line["tokens_per_second_per_gpu"]) == (12, 2, 6011.5)
    assert (line["first_loss"], line["last_loss"], line["memory_gib"]) == (8.9, 7.8, 98.12)
    assert line["mfu_it_logs"] == pytest.approx(0.4066)
    assert line["seconds_per_step"] == round(TOKENS_PER_STEP / 6011.5, 4)
    assert peer_torchtitan.measured(Ended(1, 1.0, "no"), corpus, 1) == {"steps": 0, "timed_steps": 0}


@pytest.mark.parametrize("name", sorted(peer_torchtitan.VARIANTS))
def test_a_step_of_torchtitan_holds_the_tokens_it_should(name):
    variant = peer_torchtitan.VARIANTS[name]
    words = dict(word.partition("=")[::2] for word in peer_torchtitan.words_of(variant, 4, 25))
    tokens = int(words["--training.global_batch_size"]) * int(words["--training.seq_len"]) // 4
    assert tokens == (TOKENS_PER_STEP if variant.model != TINY else 2048)
    assert int(words["--training.global_batch_size"]) % (4 * variant.rows) == 0
    assert ("varlen" in variant.flavor) == ("by_document" in name)


def test_packed_rows_of_llamafactory_hold_the_tokens_of_a_step():
    for name, variant in peer_llamafactory.VARIANTS.items():
        settings = peer_llamafactory.settings_of(variant, 25)
        if settings.get("packing") or settings.get("neat_packing"):
            rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
            assert rows * settings["cutoff_len"] == TOKENS_PER_STEP, name
    assert set(peer_llamafactory.DEFAULT) <= set(peer_llamafactory.VARIANTS)


def test_what_llamafactorys_meter_wrote_is_read(corpus, tmp_path):
    file = tmp_path / "measured.json"
    assert peer_llamafactory.measured(file, corpus) == {"steps": 0, "timed_steps": 0}
    found = {"speeds": [1.0] * 10 + [4.0, 6.0, 5.0], "seconds": [9.0] * 10 + [2.0, 3.0, 1.0], "losses": [7.0, 6.0],
             "memory_gib": 90.5, "hardware": "cpu", "weights_dtype": "torch.float32", "attention": "sdpa",
             "rows_per_step": 4}  # fmt: skip
    file.write_text(json.dumps(found))
    line = peer_llamafactory.measured(file, corpus)
    assert (line["steps"], line["timed_steps"], line["tokens_per_second_per_gpu"]) == (13, 3, 5.0)
    assert (line["seconds_per_step"], line["first_loss"], line["last_loss"]) == (2.0, 7.0, 6.0)
    assert (line["weights_dtype"], line["memory_gib"]) == ("torch.float32", 90.5)


def attempt(code, name="one", **keys):
    return Attempt(name=name, command=[sys.executable, "-c", code], environment=dict(os.environ), line=keys)


def test_one_failure_is_a_line_and_does_not_end_the_rest(tmp_path, capsys):
    results = tmp_path / "peer.jsonl"
    attempts = [attempt("raise ValueError('no GPU here')", gpus=4), attempt("print('tps: 7')", name="two")]
    run_all(attempts, results, 60, lambda made, ended: {"said": ended.text.count("tps: 7")})
    first, second = map(json.loads, results.read_text().splitlines())
    assert (first["name"], first["gpus"], first["exit_code"], first["error"]) == (
        "one", 4, 1, "ValueError: no GPU here",
    )  # fmt: skip
    assert (second["name"], second["exit_code"], second["said"]) == ("two", 0, 1)
    assert "error" not in second
    assert "no GPU here" in results.with_suffix(".log.txt").read_text()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_when_the_time_is_up_the_launched_processes_end_too(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        f"import pathlib, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while not pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)\nprint('started', flush=True)\n"
        "time.sleep(600)"
    )
    ended = run(attempt(code), 3)
    assert ended.exit_code is None
    assert last_error(ended, 3) == "its 3 s were up"
    if file.exists():  # else the machine was too busy to start it at all
        pid = int(file.read_text() or 0)
        deadline = time.monotonic() + 20
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(pid)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory.\ntorch.distributed.X.ChildFailedError: \nbye",
         "torch.OutOfMemoryError: CUDA out of memory."),
        ("one\nSegmentation fault\n", "Segmentation fault"),
        ("", "it printed nothing"),
    ],
)  # fmt: skip
def test_the_error_is_what_the_rank_said_not_what_the_launcher_says_of_it(text, error):
    assert last_error(Ended(1, 1.0, text), 60) == error


def test_the_speed_is_the_median_after_ten_steps():
    assert medians([1.0] * 10 + [3.0, 5.0, 100.0]) == {"timed_steps": 3, "tokens_per_second_per_gpu": 5.0}
    assert medians([1.0] * 10) == {"timed_steps": 0}


def test_a_peer_imports_its_own_packages_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    places = peer_environment(tmp_path, {"HF_DATASETS_CACHE": "/cache"})["PYTHONPATH"].split(os.pathsep)
    assert places == [str(tmp_path), str(BENCH), "/ours"]
    assert peer_environment(None, {})["PYTHONPATH"].split(os.pathsep) == [str(BENCH), "/ours"]
