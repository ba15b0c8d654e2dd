"""Every speed that plans rest on is in a recorded result, and its share of the peak is the one recorded there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunebook.config.choices import Compute, Strategy
from tunebook.model.flops import flops_per_token, model_flops_utilization
from tunebook.plan.speed.measured_speed import (
    ADAPTER_SPEEDS,
    BF16_PEAK,
    DETERMINISTIC_SHARE,
    DETERMINISTIC_SOURCE,
    EXPERTS_SHARE,
    EXPERTS_SOURCE,
    FP8_PEAK,
    FP32_PEAK,
    LLAMA_8B,
    LLAMA_8B_SLICE,
    ONE_GPU_SPEEDS,
    QWEN_05B,
    QWEN_3B,
    RECOMPUTED_GAIN,
    RECOMPUTED_SOURCE,
    RECOMPUTED_SPEED,
    SELECTIVE,
    SELECTIVE_LORA,
    SHORT_PASSES,
    STORED_SPEED,
    STRATEGY_SPEEDS,
    USUAL_PADDING_SHARE,
    OneGpuSpeed,
    ShortPass,
    StrategySpeed,
)

ROOT = Path(__file__).resolve().parents[3]


def result(source: str) -> dict[str, Any]:
    """The line of a result file that a source names: `file name`."""
    file, name = source.split()
    lines = [json.loads(line) for line in (ROOT / file).read_text().splitlines()]
    (found,) = [line for line in lines if line["name"] == name and "series" not in line]
    return dict(found)


def name_of(row: OneGpuSpeed | ShortPass | StrategySpeed) -> str:
    return row.source.rpartition("/")[2].replace(" ", ":")


@pytest.mark.parametrize("row", ONE_GPU_SPEEDS, ids=map(name_of, ONE_GPU_SPEEDS))
def test_what_one_gpu_reached_is_what_was_recorded(row: OneGpuSpeed) -> None:
    line = result(row.source)
    assert row.tokens_per_second == line["tokens_per_second_per_gpu"]
    assert line["hardware"].endswith("H200") or "H200" in line["hardware"]
    if row.padding_share is not None and "padding_share" in line:
        assert row.padding_share == line["padding_share"]
    if "mfu" not in line:
        return
    peak = {Compute.fp32: FP32_PEAK, Compute.fp8: FP8_PEAK}.get(row.compute, BF16_PEAK)
    useful = model_flops_utilization(row.tokens_per_second, flops_per_token(row.model, row.attended_length), peak)
    assert useful == pytest.approx(line["mfu"], rel=0.015)  # recorded with one to three digits


@pytest.mark.parametrize("row", SHORT_PASSES, ids=map(name_of, SHORT_PASSES))
def test_short_passes_are_recorded(row: ShortPass) -> None:
    file, name = row.source.split()
    lines = map(json.loads, (ROOT / file).read_text().splitlines())
    speeds = {line.get("tokens_per_second_per_gpu", line.get("tokens_per_second")) for line in lines
              if line["name"] == name and line.get("gpus", 1) in (1, 2)}  # fmt: skip
    assert row.tokens_per_second in speeds
    assert row.has_adapter is ("lora" in name)
    assert row.has_mask is (name == "sdpa")


@pytest.mark.parametrize("row", STRATEGY_SPEEDS, ids=map(name_of, STRATEGY_SPEEDS))
def test_what_several_reached_is_what_was_recorded(row: StrategySpeed) -> None:
    line = result(row.source)
    assert row.speed_per_gpu == line["tokens_per_second_per_gpu"]
    assert row.num_gpus == line["gpus"]
    assert 0 < row.lost_seconds < 2


def test_the_speeds_of_one_of_them_alone_are_recorded_too() -> None:
    single = result("benchmarks/results/h200_qwen05b_single.jsonl sdpa_rows_4096")["tokens_per_second_per_gpu"]
    big = {
        result(f"benchmarks/results/h200_speed.jsonl {name}")["tokens_per_second_per_gpu"]
        for name in ("packed_flash_attention_4", "packed_flash_attention_4_compiled", "padded_as_published")
    }
    for file in ("h200x4_speed", "h200x4_beside_peers"):
        big.add(result(f"benchmarks/results/{file}.jsonl compiled_8192")["tokens_per_second_per_gpu"])
    big.add(result("benchmarks/results/h200x4_selective.jsonl compiled_16384")["tokens_per_second_per_gpu"])
    (layers,) = (row for row in ONE_GPU_SPEEDS if row.model is LLAMA_8B_SLICE and row.compute is Compute.bf16)
    as_its_layers = layers.efficiency * BF16_PEAK * 1e12 / flops_per_token(LLAMA_8B, layers.attended_length)
    for row in STRATEGY_SPEEDS:
        if row.model is LLAMA_8B:
            assert row.one_gpu_speed == pytest.approx(as_its_layers, abs=0.5)
        else:
            assert row.one_gpu_speed in (big if row.model is QWEN_3B else {single})


def test_checkpointing_and_adapters_are_recorded() -> None:
    assert result(RECOMPUTED_SOURCE)["tokens_per_second_per_gpu"] == RECOMPUTED_SPEED
    assert any(row.tokens_per_second == STORED_SPEED for row in ONE_GPU_SPEEDS)
    for kept in (SELECTIVE, SELECTIVE_LORA):
        assert result(kept.source)["tokens_per_second_per_gpu"] == kept.again
        assert result(kept.source.removesuffix("_selective"))["tokens_per_second_per_gpu"] == kept.stored
    assert [round(kept.gain, 3) for kept in (SELECTIVE, SELECTIVE_LORA)] == [0.986, 0.972]
    # 0.801 of the speed with four thirds of the work
    assert pytest.approx(17_810 / 22_233 * 4 / 3, rel=1e-6) == RECOMPUTED_GAIN
    assert any(row.padding_share == USUAL_PADDING_SHARE for row in ONE_GPU_SPEEDS)
    for row in ADAPTER_SPEEDS:
        assert result(row.source)["tokens_per_second_per_gpu"] == row.adapter
        if row.model is LLAMA_8B:
            assert row.full in {row.one_gpu_speed for row in STRATEGY_SPEEDS if row.model is LLAMA_8B}
            continue
        full = next(
            spread.speed_per_gpu
            for spread in STRATEGY_SPEEDS
            if spread.strategy is row.strategy and spread.num_gpus == 2
        )
        assert row.full == full


def test_a_loss_by_hand() -> None:
    row = next(row for row in STRATEGY_SPEEDS if row.strategy is Strategy.zero3 and row.num_gpus == 8)
    # 8192 tokens: 1.0280 s at 7,969 a second, 0.3685 s at 22,233
    assert row.lost_seconds == pytest.approx(0.6595, abs=1e-4)


@pytest.mark.parametrize(("facts", "file"), [(QWEN_3B, "qwen25_3b"), (QWEN_05B, "qwen25_05b")])
def test_the_models_are_those_of_the_book(facts: Any, file: str) -> None:
    book = yaml.safe_load((ROOT / f"hydra_configs/model/{file}.yaml").read_text())["facts"]
    assert (facts.num_parameters, facts.num_layers, facts.hidden_size) == (
        book["num_parameters"],
        book["num_layers"],
        book["hidden_size"],
    )


def test_what_layers_with_experts_reach_follows_from_the_run() -> None:
    """A token took as long as its share of the 3B model's peak says, and its two layers with experts longer."""
    line = result(EXPERTS_SOURCE)
    in_layers, others = 113_779_200, 1_868_573_184 - 1_246_241_280  # of two layers what a token meets; both ends
    (dense,) = (row for row in ONE_GPU_SPEEDS if row.source.endswith("h200_speed_one_gpu.jsonl varlen_8192"))
    attention = 12 * 2 * 2048 * 1033 / 2
    at_the_share = (6 * (in_layers + others) + attention) / (dense.efficiency * BF16_PEAK * 1e12)
    longer = 1 / line["tokens_per_second_per_gpu"] - at_the_share
    of_the_layers = 6 * in_layers / (dense.efficiency * BF16_PEAK * 1e12)
    assert of_the_layers / (of_the_layers + longer) == pytest.approx(EXPERTS_SHARE, abs=0.01)


def test_what_the_same_bits_cost_is_what_was_recorded() -> None:
    name = DETERMINISTIC_SOURCE.rpartition(" ")[2]
    lines = map(json.loads, (ROOT / DETERMINISTIC_SOURCE.rpartition(" ")[0]).read_text().splitlines())
    speeds = {line["name"]: line["tokens_per_second_per_gpu"] for line in lines}
    assert DETERMINISTIC_SHARE == speeds[name] / speeds["qwen05b_single_sdpa_1-1"] == pytest.approx(0.34, abs=0.005)
