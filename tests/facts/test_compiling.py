"""What the terminal says of compilations that take long in silence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.config.choices import Generation
from tunebook.facts.compiling import COMPILE_SECONDS, compilation_notice, largest_gain

from ..plan.plans import resolved


def test_a_run_that_compiles_nothing_says_nothing():
    assert compilation_notice(resolved("quickstart")) is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.compile_layers=true", "torch.compile the model's blocks (8 to 98 s on an H200, longer on a CPU)"),
        ("attention=flash_attention_4", "flash-attn 4 a kernel for each new shape"),
        ("attention=flex_attention", "torch.compile the attention"),
    ],
)
def test_what_is_compiled_is_named(override, said):
    notice = compilation_notice(resolved("quickstart", override))
    assert notice.startswith(f"the first steps compile, without output: {said}")


def test_kernels_of_packages_are_compiled_on_gpus():
    config = resolved("quickstart")
    config.model.facts.measured = replace(config.model.facts.measured, packing_packages=["fla-core"])
    assert compilation_notice(config) is None, "a CPU calls none of them"
    config.hardware.generation = Generation.hopper
    assert "Triton the kernels of fla-core" in compilation_notice(config)


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def recorded(file):
    return {line["name"]: line for line in map(json.loads, (RESULTS / file).read_text().splitlines())}


def test_what_compiling_costs_and_gains_is_what_was_recorded():
    runs = recorded("h100_smollm2.jsonl")
    empty, full = (
        runs[f"smollm2_135m_boolq-seed-42{again}"]["training_s"]
        + runs[f"smollm2_135m_boolq-seed-42{again}"]["start_up"]["rank"]["checks"]
        for again in ("", "-again")
    )
    assert empty - full == pytest.approx(COMPILE_SECONDS, abs=0.05)
    by_name = recorded("h200x2_architectures.jsonl")
    pairs = [(line, by_name.get(name.replace("_compiled_lora", "_lora").replace("_compiled", "_plain")))
             for name, line in by_name.items() if "_compiled" in name]  # fmt: skip
    ratios = [other["seconds_per_step"] / line["seconds_per_step"] for line, other in pairs if other is not None
              and line.get("seconds_per_step") and other.get("seconds_per_step")]  # fmt: skip
    assert len(ratios) > 10
    assert max(ratios) == pytest.approx(largest_gain(494_032_768), abs=0.005)
    lines = [json.loads(line) for line in (RESULTS / "h100_hopper_image.jsonl").read_text().splitlines()]
    compiled = [line["tokens_per_second"] for line in lines if line["name"].startswith("smollm2_135m_boolq-")]
    plain = [line["tokens_per_second"] for line in lines if line["name"] == "boolq-uncompiled"]
    assert max(compiled) / min(plain) == pytest.approx(largest_gain(134_515_008), abs=0.05)
