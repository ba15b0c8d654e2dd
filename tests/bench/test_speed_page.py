"""The page of measured speeds, from the recorded results and from made ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from speed_page import (
    architectures,
    beside_peers,
    computed_again,
    eight_billion,
    is_timed,
    one_gpu,
    page,
    preparation,
    products,
    spread,
    step_times,
    without_bf16,
)


def test_ours_and_trls_stand_in_one_section_by_their_speed() -> None:
    section = one_gpu()
    assert [bar.value for bar in section.bars] == sorted(bar.value for bar in section.bars)
    assert section.bars[0].name == "TRL 1.16: its defaults"
    assert section.bars[0].text == "3,920 tokens/s, 7.5 %"
    best = [bar for bar in section.bars if "master_weights" not in bar.name][-1]
    assert best.is_ours
    assert best.text == "26,356 tokens/s, 50.5 %"
    assert "model.compile_layers=true packing.row_length=16384" in best.name


def test_a_strategy_is_drawn_by_its_newest_run_beside_one_gpu() -> None:
    bars = {bar.name: bar for bar in spread("h200_speed_spread", "two").bars}
    assert bars["one GPU"].text.endswith("; 100.0 % of one GPU")
    assert bars["ddp, 2 GPUs"].value == 24_100.0
    assert bars["ddp, 2 GPUs"].text.endswith("; 94.8 % of one GPU")


def test_four_gpus_are_drawn_beside_one_of_their_own_machine() -> None:
    bars = {bar.name: bar.text for bar in spread("h200x4_speed", "four").bars}
    assert bars["ddp, 4 GPUs"] == "24,138 tokens/s, 46.3 %; 96.2 % of one GPU"
    assert bars["fsdp, 4 GPUs"] == "21,467 tokens/s, 41.2 %; 85.6 % of one GPU"
    assert not any("16384" in name or "volta" in name for name in bars)
    longer = spread("h200x4_selective", "longer", row_length=16384)
    bars = {bar.name: bar.text for bar in longer.bars}
    assert bars["ddp_16384, 4 GPUs"] == "26,206 tokens/s, 50.3 %; 95.7 % of one GPU"
    assert bars["fsdp_16384, 4 GPUs"] == "25,394 tokens/s, 48.7 %; 92.7 % of one GPU"
    assert len(bars) == 3


def test_products_are_limited_by_power_and_no_other_kernel_is_faster() -> None:
    """A block's twelve kinds by hand: 7.58e12 operations in 11.28 ms, and in 9.56 ms where nothing flips a bit."""
    bars = {bar.name: bar for bar in products().bars}
    usual, zeros = bars["cuBLAS, as torch calls it"], bars["cuBLAS with nothing but zeros"]
    assert usual.text == "672 TFLOP/s, 67.9 %"
    assert zeros.value > 1.15 * usual.value
    assert max(bar.value for bar in bars.values() if bar is not zeros) < 1.01 * usual.value


def test_an_architecture_is_drawn_by_what_compiling_gains() -> None:
    bars = {bar.name: bar for bar in architectures().bars}
    assert len(bars) == 15
    assert bars["Qwen3-4B"].text == "67,281 tokens/s, 1.38 x"
    assert bars["Qwen3-4B"].detail == "8 layers; 30.7 GiB / 25.7 GiB / 22.4 GiB as they are / compiled / selective"
    assert min(bars, key=lambda name: bars[name].value) == "Qwen3-30B-A3B"  # a mixture of experts


def test_llama_and_fp32_have_sections_of_their_own() -> None:
    bars = {bar.name: bar for bar in eight_billion().bars}
    assert sum("precision=fp8" in name for name in bars) == 4
    assert not any("num_layers" in name for name in bars), "a slice is no Llama 3 8B"
    (ours,) = [bar for name, bar in bars.items() if name.endswith("parallelism=fsdp attention=varlen_attention "
               "model.compile_layers=true packing.row_length=16384")]  # fmt: skip
    theirs = bars["4 x H200, torchtitan 0.2.2: llama8b_compiled_by_document_16384"]
    assert (ours.is_ours, theirs.is_ours) == (True, False)
    assert theirs.value / ours.value == pytest.approx(1.013, abs=0.001)
    padded, packed, by_document = without_bf16().bars
    assert by_document.value / padded.value == pytest.approx(1.95, abs=0.005)
    assert by_document.value / packed.value == pytest.approx(1.48, abs=0.005)


def test_peers_stand_beside_our_runs_of_the_same_minutes() -> None:
    bars = beside_peers().bars
    assert [bar.is_ours for bar in bars] == [False, True, False, True, True, False, True]
    assert bars[0].name == "llamafactory 0.9.5: packing"
    assert bars[-1].text == "27,851 tokens/s, 53.4 %"
    assert "attention=varlen_attention_4 model.one_pass_head=true" in bars[-1].name
    assert bars[-2].text == "27,058 tokens/s, 51.9 %"
    assert "114 GiB reserved" in bars[-2].detail
    assert all("the first GPU" in bar.detail for bar in bars[-2:])


def test_what_is_kept_of_the_forward_pass_has_a_section() -> None:
    bars = {bar.name: bar for bar in computed_again().bars if bar.is_ours}
    compiled = "attention=varlen_attention model.compile_layers=true"
    rows = {
        kept: bars[f"{compiled} activation={kept} packing.row_length=16384 model.one_pass_head=true"].text
        for kept in ("selective", "checkpointing")
    }
    assert rows == {"selective": "27,114 tokens/s, 52.0 %", "checkpointing": "22,693 tokens/s, 43.5 %"}
    titan = [bar for bar in computed_again().bars if not bar.is_ours]
    assert [bar.text for bar in titan] == ["26,461 tokens/s, 50.7 %", "28,100 tokens/s, 53.9 %"]
    assert all("another machine" in bar.detail for bar in titan)


def test_runs_that_differ_in_what_was_decided_are_told_apart() -> None:
    """LoRA on one GPU, before the head's gradients were made in the forward pass by default and since."""
    words = ("peft=lora", "attention=varlen_attention ")
    lora = [bar for bar in eight_billion().bars if all(word in bar.name for word in words)]
    with_it = [bar.text for bar in lora if bar.name.endswith("model.one_pass_head=true")]
    # In rows of 8,192 tokens, with parts of the blocks computed again and without; with bf16 weights in 16,384.
    assert with_it == [
        f"{speed} tokens/s, {share} %" for speed, share in (("14,712", 49.1), ("15,135", 50.5), ("15,528", 51.8))
    ]
    assert len(lora) >= 3


def test_the_parts_of_a_step_add_up_to_it() -> None:
    sections = step_times()
    assert len({(section.title, section.note) for section in sections}) == len(sections), "they can be told apart"
    for section in sections:
        whole = float(section.note.partition(" ms")[0].replace(",", ""))
        assert sum(bar.value for bar in section.bars) == pytest.approx(whole, abs=1)


def test_only_preparations_of_a_quiet_machine_are_drawn() -> None:
    bars = preparation().bars
    assert [bar.name.partition(",")[0] for bar in bars] == ["TRL 1.16", "Tunebook", "Tunebook"]
    assert bars[1].value / bars[0].value == pytest.approx(2.87, abs=0.01)


@pytest.mark.parametrize(
    ("line", "is_drawn"),
    [
        ({"exit_code": "cut short"}, False),
        ({"tokens_per_second_per_gpu": 1.0, "timed_steps": 9}, False),
        ({"tokens_per_second_per_gpu": 1.0, "timed_steps": 10}, True),
    ],
)
def test_a_run_of_few_steps_is_left_out(line: dict[str, object], is_drawn: bool) -> None:
    assert is_timed(line) is is_drawn


def test_the_page_escapes_what_results_say(tmp_path: Path) -> None:
    results = Path(__file__).parent / "results"
    for file in results.glob("*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    lines = [json.loads(line) for line in (results / "h200_speed_spread.jsonl").read_text().splitlines()]
    lines[0]["note"] = "<script>alert(1)</script>"
    (tmp_path / "h200_speed_spread.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(tmp_path)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    spreads = (
        spread("h200_speed_spread", "two"),
        spread("h200x4_speed", "four"),
        spread("h200x4_selective", "longer", row_length=16384),
    )
    sections = (
        one_gpu(),
        beside_peers(),
        computed_again(),
        architectures(),
        *spreads,
        eight_billion(),
        without_bf16(),
        products(),
        preparation(),
        *step_times(),
    )
    assert text.count('class="run"') == sum(len(section.bars) for section in sections)
