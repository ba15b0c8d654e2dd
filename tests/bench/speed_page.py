"""All speeds that were measured and recorded here, drawn as one page: `python tests/bench/speed_page.py FILE.html`.

Reads `tests/bench/results/`: one GPU beside TRL and others in the same samples, the same spread over several GPUs,
Llama 3 8B, fp32, what a step's time is spent in, and the preparation of data. Runs of few steps are left out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunebook.files import atomic_write_text
from tunebook.record.page.numbers import Unit, format_value
from tunebook.record.report import render_page

RESULTS = Path(__file__).parent / "results"
LEAST_STEPS = 10  # timed, to be drawn
PEAK_TFLOPS = 989  # of an H200 in bf16
KINDS = {
    "products": "matrix products", "attention": "attention", "compiled": "compiled elementwise kernels",
    "elementwise": "other elementwise kernels", "copies": "copies and casts", "loss": "loss", "optimizer": "optimizer",
    "other": "other kernels",
}  # fmt: skip
_TWO, _FOUR, _BESIDE_PEERS = "h200_speed_spread", "h200x4_speed", "h200x4_beside_peers"
_ONE_PASS, _FLASH_4 = "h200_one_pass_head", "h200_flash_attention_4"
_SELECTIVE, _SELECTIVE_TWO, _SELECTIVE_FOUR = "h200_selective", "h200x2_selective", "h200x4_selective"
_WITH_8B = (_TWO, _FOUR, _BESIDE_PEERS, _ONE_PASS, _FLASH_4, _SELECTIVE, _SELECTIVE_TWO, _SELECTIVE_FOUR)
_TITAN = "torchtitan"
_SUPERSEDED = "_sizes_open"  # a head's size was open to the compiler
_VOLTA = {
    "volta_padded": "padded, as the source of the 3B recipe",
    "volta_sdpa": "packed, attention=sdpa: under the mask of a whole row",
    "volta_by_document": "packed, attention=sdpa_by_document: what auto takes",
}
_SETTINGS_OF_ALL = ("activation=stored", "model.liger_kernel=false")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measurement: what was run, and its value as a share of the section's longest."""

    name: str
    detail: str
    value: float
    text: str
    is_ours: bool = True


@dataclass(frozen=True, kw_only=True)
class Section:
    """Measurements of one kind, which may be compared with each other."""

    key: str
    title: str
    note: str
    bars: list[Bar] = field(default_factory=list)

    @property
    def longest(self) -> float:
        """The value that fills the width."""
        return max((bar.value for bar in self.bars), default=1.0)


def read(name: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    return [json.loads(line) for line in (results / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def is_timed(line: dict[str, Any]) -> bool:
    """Whether a line is of a run whose median speed rests on enough steps."""
    return "tokens_per_second_per_gpu" in line and line.get("timed_steps", LEAST_STEPS) >= LEAST_STEPS


def one_gpu(results: Path = RESULTS) -> Section:
    """Ours and TRL's, in one model and the same samples."""
    lines = [line for line in read("h200_speed_one_gpu", results) if is_timed(line)]
    # Of a token's work, which is the same in all.
    flops_share = next(line["mfu"] / line["tokens_per_second_per_gpu"] for line in lines)
    bars = [_speed_bar(line, _typed(line)) for line in lines]
    for line in read("h200_peer_trl", results):
        share = {"mfu": line["tokens_per_second_per_gpu"] * flops_share}
        bars.append(_speed_bar(line | share, "TRL 1.16: " + (_said(line["settings"]) or "its defaults"), is_ours=False))
    return Section(
        key="one-gpu",
        title="One GPU",
        note="Qwen2.5-3B, full fine-tune, one H200, 32,768 real tokens a step; documents of lognormal(5.8, 0.9) "
        "tokens, 16 to 4,096. Random weights. The share is of 989 TFLOP/s in bf16.",
        bars=sorted(bars, key=lambda bar: bar.value),
    )


def spread(file: str, title: str, results: Path = RESULTS, *, row_length: int = 8192) -> Section:
    """Strategies over the GPUs of one machine in rows of some tokens, and the same on one of them."""
    newest = {line["name"]: line for line in read(file, results) if is_timed(line)}
    words = {f"packing.row_length={row_length}", "activation=stored"}
    lines = [line for line in newest.values() if line["model"] == "qwen25_3b" and words <= {*line["variant"]}]
    alone = next(line["tokens_per_second_per_gpu"] for line in lines if line["gpus"] == 1)
    bars = []
    for line in sorted(lines, key=lambda line: -line["tokens_per_second_per_gpu"]):
        share = format_value(line["tokens_per_second_per_gpu"] / alone, Unit.share)
        name = "one GPU" if line["gpus"] == 1 else f"{line['name']}, {line['gpus']} GPUs"
        bars.append(_speed_bar(line, name, more=f"; {share} of one GPU"))
    return Section(
        key=file,
        title=title,
        note=f"The same model with compiled blocks in rows of {row_length:,} tokens; tokens per second of each GPU.",
        bars=bars,
    )


def eight_billion(results: Path = RESULTS) -> Section:
    """Llama 3 8B, all of it and by LoRA."""
    lines = [line for file in _WITH_8B for line in read(file, results)]
    bars = [
        _speed_bar(line, f"{line['gpus']} x H200, {_named(line)}", is_ours="peer" not in line)
        for line in sorted(lines, key=lambda line: line.get("tokens_per_second_per_gpu") or 0.0)
        if line["model"] == "llama3_8b" and is_timed(line) and not line["name"].endswith(_SUPERSEDED)
        if not any(word.startswith("model.facts.") for word in line.get("variant", []))  # all of its layers
    ]
    note = "Tokens per second of each GPU. The share is of 989 TFLOP/s, in fp8 of 1,979; LoRA's counts no products for "
    return Section(key="llama", title="Llama 3 8B", note=note + "gradients of frozen weights.", bars=bars)


def beside_peers(results: Path = RESULTS) -> Section:
    """Ours and torchtitan in the same minutes, each length of row on a GPU of its own; others on another machine."""
    others = [line for line in read(_BESIDE_PEERS, results) if line.get("peer", _TITAN) != _TITAN]
    lines = [line for line in [*others, *read(_FLASH_4, results)] if line["model"] == "qwen25_3b"]
    note = (
        "Qwen2.5-3B, full fine-tune in bf16 with fp32 master weights; the share is of 989 TFLOP/s. Rows of one length "
        "ran on one GPU in turn, LLaMA-Factory on another machine."
    )
    return Section(key="beside-peers", title="Beside other trainers", note=note, bars=_ranked(lines))


def computed_again(results: Path = RESULTS) -> Section:
    """What compiled blocks keep of the forward pass, and torchtitan beside the least of it in the longest rows."""
    lines = [line for line in read(_SELECTIVE, results) if line["model"] == "qwen25_3b"]
    note = (
        "Qwen2.5-3B, full fine-tune; the share is of 989 TFLOP/s, in fp8 of 1,979. Speeds of one GPU can be compared "
        "with each other: every line names its machine and GPU."
    )
    return Section(key="computed-again", title="Keeping less of the forward pass", note=note, bars=_ranked(lines))


def architectures(results: Path = RESULTS) -> Section:
    """What compiling the blocks gains for models of several architectures."""
    runs = {(line["model"], line["mode"]): line for line in read("h200x2_architectures", results) if "losses" in line}
    bars = []
    for model in dict.fromkeys(model for model, mode in runs if mode == "compiled"):
        plain, compiled, selective = (runs[model, mode] for mode in ("plain", "compiled", "selective"))
        faster = compiled["tokens_per_second_per_gpu"] / plain["tokens_per_second_per_gpu"]
        peaks = (format_value(max(line["memory_gib"]), Unit.gib) for line in (plain, compiled, selective))
        detail = f"{plain['sizes']['num_hidden_layers']} layers; {' / '.join(peaks)} as they are / compiled / selective"
        text = f"{compiled['tokens_per_second_per_gpu']:,.0f} tokens/s, {faster:.2f} x"
        bars.append(Bar(name=model, detail=detail, value=faster, text=text))
    return Section(
        key="architectures",
        title="Other architectures",
        note="Slices of some layers with compiled blocks, and how many times as fast that is as blocks as they are; "
        "attention=varlen_attention in both. Random weights, one row of 8,192 tokens a step, 7 steps timed, one H200.",
        bars=sorted(bars, key=lambda bar: bar.value),
    )


def without_bf16(results: Path = RESULTS) -> Section:
    """fp32 without TF32, as GPUs before Ampere compute."""
    found = {line["name"]: line for line in read(_FOUR, results) if line["name"] in _VOLTA}
    bars = [_speed_bar(found[name], said) for name, said in _VOLTA.items()]
    return Section(
        key="volta",
        title="In fp32, as a V100 computes",
        note="Qwen2.5-3B on one H200 without TF32, 4,096 tokens a step. The share is of 67 TFLOP/s.",
        bars=bars,
    )


def products(results: Path = RESULTS) -> Section:
    """A block's matrix products by themselves, in several ways: what a step could be at best, and what limits it."""
    ways = {
        "cublas": "cuBLAS, as torch calls it", "cublaslt": "cuBLASLt", "triton": "Triton's fastest, searched by torch",
        "zeros": "cuBLAS with nothing but zeros",
    }  # fmt: skip
    bars = []
    for way, name in ways.items():
        lines = [line for line in read("h200_products", results) if line["way"] == way]
        seconds = sum(line["in_a_block"] * line["ms"] for line in lines) / 1000
        rows, inner, columns = zip(*(line["sizes"] for line in lines), strict=True)
        done = sum(
            2 * line["in_a_block"] * m * k * n for line, m, k, n in zip(lines, rows, inner, columns, strict=True)
        )
        tflops = done / seconds / 1e12
        large = [line for line in lines if line["name"].startswith(("gate_up", "down"))]
        clocks = f"{min(line['sm_mhz'] for line in large):,} to {max(line['sm_mhz'] for line in large):,} MHz"
        text = f"{tflops:,.0f} TFLOP/s, {format_value(tflops / PEAK_TFLOPS, Unit.share)}"
        bars.append(
            Bar(name=name, detail=f"the feed-forward's at {clocks}, {lines[0]['date']}", value=tflops, text=text)
        )
    return Section(
        key="products",
        title="Matrix products by themselves",
        note="All of a block of Qwen2.5-3B, forward and backward, in bf16 on one H200, 16,384 tokens a pass. Zeros "
        "flip no bits: what they are faster by, at a higher clock, is what a limit of 700 W costs. A step of "
        "nothing but such products is the most that any trainer reaches.",
        bars=sorted(bars, key=lambda bar: bar.value),
    )


def step_times(results: Path = RESULTS) -> list[Section]:
    """What one optimizer step's time is spent in, for each run that was looked into."""
    sections = []
    for line in [
        line
        for file in ("h200_speed_one_gpu", _FOUR, _BESIDE_PEERS, _ONE_PASS, _FLASH_4)
        for line in read(file, results)
    ]:
        if "profile" not in line:
            continue
        profile = line["profile"]
        kernels = {KINDS[kind]: value for kind, value in profile["by_kind_ms"].items() if kind != "communication"}
        computed, waited = profile.get("computing_ms", profile["kernels_ms"]), profile.get("only_communicating_ms", 0.0)
        at_once = sum(kernels.values()) / computed  # what ran at the same time shares it
        spent = {name: value / at_once for name, value in kernels.items()}
        if waited:
            spent["messages between GPUs and nothing else"] = waited
        spent["no kernel at work"] = profile["step_ms"] - computed - waited
        bars = [
            Bar(
                name=name,
                detail="",
                value=value,
                text=f"{value:,.0f} ms, {format_value(value / profile['step_ms'], Unit.share)}",
            )
            for name, value in sorted(spent.items(), key=lambda item: -item[1])
        ]
        title = f"A step of {_typed(line)}" + (f", {line['gpus']} GPUs" if line["gpus"] > 1 else "")
        note = f"{profile['step_ms']:,.0f} ms in all, under the profiler."
        note += f" Note: {line['note']}." if line.get("note") else ""
        if waited:
            sent = profile["by_kind_ms"]["communication"]
            note += f" Messages took {sent:,.0f} ms, most of it while something was computed."
        sections.append(Section(key=line["name"], title=title, note=note, bars=bars))
    return sections


def preparation(results: Path = RESULTS) -> Section:
    """Preparing data: seconds on a quiet machine, TRL's beside ours."""
    newest = {(line["method"], line["samples"]): line for line in read("preparation", results) if "method" in line}
    quiet = [(key, line) for key, line in newest.items() if line["load_before"] < 2]  # nobody else was at work
    bars = [_preparation_bar(line, *key) for key, line in quiet]
    return Section(
        key="preparation",
        title="Preparing data",
        note="Conversations tokenized, masked and packed per second; the same tokens come out of both.",
        bars=sorted(bars, key=lambda bar: bar.value),
    )


def _preparation_bar(line: dict[str, Any], method: str, samples: int) -> Bar:
    is_ours, speed = method == "tunebook", samples / line["prepare_s"]
    return Bar(
        name=f"{'Tunebook' if is_ours else 'TRL 1.16'}, {samples:,} conversations",
        detail=f"{line['tokens']:,} tokens, {line['peak_mib']:,} MiB at most, {line['cores']} cores, {line['date']}",
        value=speed,
        text=f"{speed:,.0f} /s, {format_value(line['prepare_s'], Unit.seconds)}",
        is_ours=is_ours,
    )


def _ranked(lines: list[dict[str, Any]]) -> list[Bar]:
    """Ours and others', the fastest last."""
    bars = [_speed_bar(line, _named(line), is_ours="peer" not in line) for line in lines]
    return sorted(bars, key=lambda bar: bar.value)


def _speed_bar(line: dict[str, Any], name: str, *, more: str = "", is_ours: bool = True) -> Bar:
    memory = line["memory_gib"]
    peak = max(memory) if isinstance(memory, list) else memory
    of_what = "reserved" if line.get("peer") == "torchtitan" else "of tensors"  # which it logs
    detail = f"{format_value(peak, Unit.gib)} {of_what}, {line['timed_steps']} steps timed, {line['date']}"
    detail += f"; {line['note']}" if line.get("note") else ""
    speed = line["tokens_per_second_per_gpu"]
    text = f"{speed:,.0f} tokens/s, {format_value(line['mfu'], Unit.share)}{more}"
    return Bar(name=name, detail=detail, value=speed, text=text, is_ours=is_ours)


def _typed(line: dict[str, Any]) -> str:
    """What was typed for a variant, of two words for one key the later, what the run decided, and its environment."""
    words = [*line["variant"], *line.get("resolved", [])]
    last = {word.split("=")[0]: word for word in words if word not in _SETTINGS_OF_ALL}
    environment = [f"{key}={value}" for key, value in line.get("environment", {}).items()]
    return " ".join([*environment, *last.values()])


def _named(line: dict[str, Any]) -> str:
    """What was typed, or which trainer it was and by which of its variants in tests/bench."""
    if "peer" not in line:
        return _typed(line)
    peer = line["peer"]
    return f"{peer} {line['machine'][peer]}: {line['name'].removeprefix(peer + '_')}"


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def page(results: Path = RESULTS) -> str:
    """The page as HTML of one file."""
    two, four = spread(_TWO, "Spread over two GPUs", results), spread(_FOUR, "Spread over four GPUs", results)
    longer = spread(_SELECTIVE_FOUR, "Spread over four GPUs, in longer rows", results, row_length=16384)
    others = [eight_billion(results), without_bf16(results)]
    alone = [one_gpu(results), beside_peers(results), computed_again(results), architectures(results)]
    sections = [*alone, two, four, longer, *others, products(results), *step_times(results), preparation(results)]
    return render_page("speed.html.jinja", beside=Path(__file__).parent, sections=sections)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="to be written, such as speed.html")
    file = parser.parse_args().file
    atomic_write_text(file, page())
    print(f"written: {file.resolve()}")


if __name__ == "__main__":
    main()
