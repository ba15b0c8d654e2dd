"""Recorded lines, evidence and drawn configurations run again as they ran."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH))

import gpu_draw  # noqa: E402
import sequence_cases  # noqa: E402
from gpu_models import slice_words  # noqa: E402
from gpu_runs import (  # noqa: E402
    PATIENT,
    compare_series,
    jobs_of,
    parse,
    planned,
    read_cases,
    verdict,
    words_of,
    write_planned,
)

RESULTS = BENCH / "results"
LEFT_OUT = {  # lines that other programs measured
    "callback_overhead", "checkpoint_costs", "checkpoint_kills", "checkpoint_ranks", "export_memory", "h200_peer_trl",
    "h200_products", "h200x2_evaluation", "h100x2_stalled_rank", "loading_memory", "preparation", "h200_speed",
    "h100_trl_agreement", "preparation_tools", "export_agreement", "harness_agreement", "humaneval_agreement",
    "h100_hopper_image", "h100_sinks", "row_balance", "small_architectures",
}  # fmt: skip


def listed(tmp_path, *files, words=()):
    arguments = parse([*map(str, files), "--output", str(tmp_path), "--gpus", "4", "--list", *words,
                       "--models", str(tmp_path / "models")])  # fmt: skip
    return jobs_of(list(read_cases(arguments.files)), arguments)


def test_every_recorded_line_can_run_again(tmp_path):
    for file in sorted(RESULTS.glob("*.jsonl")):
        jobs, refused = listed(tmp_path, file)
        assert not refused and bool(jobs) == (file.stem not in LEFT_OUT), file.name
        for job in jobs:
            keys = [word.partition("=")[0] for word in job.words]
            assert len(set(keys)) == len(keys), "Hydra takes a key only once"
            is_named = "recipe" in job.line or job.is_script
            assert is_named or f"hardware.gpus_per_node={len(job.gpus)}" in job.words
            assert not any("=DIR" in word for word in job.words)


def test_a_line_runs_as_it_ran(tmp_path):
    jobs, _ = listed(tmp_path, RESULTS / "h200x4_parity.jsonl")
    [single] = [job.words for job in jobs if job.name == "fp32-single"]
    assert single[0] == "quickstart"
    assert {"parallelism=single", "training.max_steps=50", "model.compile_layers=false"} <= set(single), "2026-11-21"
    jobs, _ = listed(tmp_path, RESULTS / "h200_selective.jsonl", words=["--more", "training.max_steps=12"])
    [compiled] = [job.words for job in jobs if job.name == "compiled_16384"]
    assert {"packing.row_length=16384", "training.global_tokens=32768", "training.max_steps=12"} <= set(compiled)
    assert "model.one_pass_head=true" in compiled, "which auto had decided"


def test_cases_of_shared_rows_are_planned_and_fill_the_gpus(tmp_path):
    file = tmp_path / "cases.jsonl"
    sequence_cases.main(["--cases", str(file), "--memory-gib", "79.6"])
    cases = list(read_cases([file]))
    jobs, refused = listed(tmp_path, file)
    assert not refused and len(jobs) == len(cases) >= 16
    for series in ("sequence_fp32", "sequence_bf16"):
        assert {case["name"] for case in cases if case["series"] == series} >= {"single", "ddp", "zero3", "fsdp"}
    for case in cases:
        plan = planned(words_of(case, tmp_path, more=["hardware=hopper"]))
        assert "refused" not in plan, case["name"]
        if case["series"].startswith("longest"):
            assert 0.97 * 0.83 * 79.6 <= plan["planned_gib"] <= 0.83 * 79.6 or case["name"].startswith("zero3")


def test_evidence_runs_again_as_often_as_asked(tmp_path):
    file = BENCH.parents[1] / "recipes/zero3_lora/evidence/hopper-2-random_weights.json"
    jobs, _ = listed(tmp_path, file, words=["--repeats", "2"])
    assert [job.name for job in jobs] == ["evidence-zero3_lora_2-1", "evidence-zero3_lora_2-2"]
    assert [job.gpus for job in jobs] == [(0, 1), (2, 3)]
    assert jobs[0].words == ["zero3_lora", *json.loads(file.read_text())["ran"]["overrides"], PATIENT]


def test_runs_on_fewer_gpus_take_turns_and_those_on_more_are_refused(tmp_path):
    cases = [{"name": f"{gpus}_{number}", "gpus": gpus, "recipe": "quickstart", "overrides": []}
             for number, gpus in enumerate((2, 2, 2, 1, 1, 8))]  # fmt: skip
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in cases))
    jobs, [refused] = listed(tmp_path, file)
    assert [job.gpus for job in jobs] == [(0, 1), (2, 3), (0, 1), (0,), (1,)]
    assert (refused["name"], refused["refused"][0]["message"]) == ("8_5", "8 GPUs are needed")


def test_losses_are_compared_with_those_of_one_gpu():
    lines = [
        {"name": "no series", "losses": [3.0, 1.0]},
        {"series": "fp32", "name": "single", "losses": [2.0, 1.0]},
        {"series": "fp32_fewer", "name": "ddp_2", "losses": [2.0, 1.1]},
        {"series": "sinks", "name": "varlen", "losses": [2.0, 1.0]},
        {"series": "sinks", "name": "compiled", "against": "varlen", "losses": [2.0, 1.2]},
    ]
    compare_series(lines)
    found = [line.get("largest_difference") for line in lines]
    assert found == [None, 0.0, pytest.approx(0.1), None, pytest.approx(0.2)]


def test_cases_are_planned_before_they_run(tmp_path):
    """Every recipe's settings and every override of the stored cases compose, and what they need is in the plan."""
    for name in ("h100_models", "held_out_models"):
        cases = list(read_cases([BENCH / f"cases/{name}.jsonl"]))
        write_planned(cases, tmp_path / "again.jsonl", tmp_path)
        again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
        assert len(again) == len(cases) >= 20
        planned = [case for case in again if "script" not in case and not case.get("allows")]
        assert all(case["planned_then_gib"] for case in planned if "peft.use_dora=true" not in case["overrides"])
    jobs, refused = listed(tmp_path, BENCH / "cases/h100_models.jsonl")
    assert not refused and jobs[0].is_script and jobs[0].words == ["sinks_gpu.py"]
    compiled = next(job for job in jobs if job.name == "dora-dora_compiled")
    assert compiled.environment["TUNEBOOK_BENCH_ALLOWS"] == "dora-not-tested"
    assert (compiled.warm_up_steps, compiled.turn_timeout_s) == (6, 120)
    assert {"TUNEBOOK_BENCH_UNSAVED", "TUNEBOOK_BENCH_WAITS_DRAWN"} <= set(compiled.environment)
    fsdp = next(job for job in jobs if job.name == "recipes-qwen3_8b_fsdp")
    assert "TUNEBOOK_BENCH_KEEPS_GPUS" in fsdp.environment


def test_what_a_rule_refuses_runs_only_where_the_case_allows_it():
    words = ["quickstart", "peft=lora", "peft.use_dora=true", "parallelism=zero3"]
    assert [one["id"] for one in planned(words)["refused"]] == ["dora-not-tested"]
    assert planned(words, ["dora-not-tested"])["planned_gib"] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"exit_code": 0, "losses": [3.0, 3.0, 3.0, 2.0, 2.0, 2.0]}, "ok"),
        ({"exit_code": 3, "losses": [3.0, 2.0]}, "failed: exit code 3"),
        ({"exit_code": 0}, "failed: 0 of 0 losses are finite"),
        ({"exit_code": 0, "losses": [3.0, float("nan")]}, "failed: 1 of 2 losses are finite"),
        ({"exit_code": 0, "script": ["peer_trl.py"], "verdict": "ok"}, "ok"),
        ({"exit_code": 0, "script": ["peer_trl.py"]}, "failed: no results"),
        ({"exit_code": 0, "losses": [3.0] * 6}, "failed: the loss did not fall (3.0000 to 3.0000)"),
    ],
)
def test_the_verdict_on_a_run(line, said):
    assert verdict(line) == said


@pytest.mark.parametrize(
    ("model", "layers", "total"),
    [("qwen25_3b", 2, 465_320_960), ("dolly_v2_3b", 32, 2_775_086_080), ("llama2_70b_chat", 4, 3_946_913_792)],
)
def test_a_slice_has_the_parameters_of_its_layers(model, layers, total):
    words, counted = slice_words(model, layers)
    assert counted == total
    assert words == [f"model.facts.num_layers={layers}", f"model.facts.num_parameters={total}"]


def test_what_is_drawn_has_been_planned_and_can_run(tmp_path, monkeypatch):
    file = tmp_path / "cases.jsonl"
    words = ["gpu_draw.py", "--seed", "3", "--count", "2", "--cases", str(file), "--configs", str(tmp_path / "configs")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu_draw, "PUBLISHED", {})  # each takes half a minute on the meta device
    gpu_draw.main()
    jobs, refused = listed(tmp_path, file)
    assert [job.name for job in jobs] == ["drawn-drawn_3_1", "drawn-drawn_3_2"] and not refused
    assert all(json.loads(line)["planned_gib"] <= gpu_draw.LARGEST_GIB for line in file.read_text().splitlines())


# Tokens a second that are planned for what was measured. The share of experts in 16 bits is from the first two.
EXPERTS = {
    "layers_8_bf16": (46_811, 46_375), "layers_8_bf16_compiled": (72_812, 81_271),
    "qwen3_30b_a3b_fsdp": (94_159, 89_173), "qwen3_30b_a3b_fsdp_2": (45_306, 55_662),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_layers_with_experts_are_planned_by_the_number_format_of_the_experts(name, tmp_path):
    texts = [(RESULTS / f"{file}.jsonl").read_text() for file in ("h100_models", "h200x2_models")]
    line = next(line for text in texts for line in map(json.loads, text.splitlines()) if line["name"] == name)
    words = [*words_of(line, tmp_path, more=[], has_weights=False), *line["resolved"]]
    found, measured = planned(words)["planned_tokens_per_second"], line["tokens_per_second_per_gpu"]
    assert (found, round(measured)) == (pytest.approx(EXPERTS[name][0], rel=0.01), EXPERTS[name][1])
    assert found == pytest.approx(measured, rel=0.2)


LONG_ROWS = [
    line
    for file in ("h100x2_sequence", "h200x2_sequence")
    for line in map(json.loads, (RESULTS / f"{file}.jsonl").read_text().splitlines())
    if line["verdict"] == "ok" and not line["series"].startswith("sequence")
]


@pytest.mark.parametrize("line", LONG_ROWS, ids=lambda line: f"{line['series']}-{line['name']}-{line['date']}")
def test_the_longest_rows_take_the_memory_that_is_planned(line, tmp_path):
    """With tiles, and with activations on the host, of which one or two layers' inputs are on the GPU."""
    h200 = ["hardware=hopper", "hardware.memory_gib=140.4"] if line.get("hardware") == "NVIDIA H200" else []
    more = h200 if "recipe" in line else []  # others name the memory that they were planned for
    words = [*words_of(line, tmp_path, more=more), *line["resolved"]]
    assert planned(words)["planned_gib"] == pytest.approx(max(line["memory_gib"]), rel=0.016)
