"""Seconds and memory of preparing conversations for training, compared with TRL: one JSON line per measurement.

    python tests/bench/preparation.py --output FILE [--sizes 10000 30000 100000] [--repeats 3] [--only tunebook trl]

Conversations of about 400 tokens and a tokenizer of 40,960 entries are made on the spot (`preparation_data.py`). Each
measurement is a fresh process with an empty cache, in turn:

    tunebook   `tunebook.data.prepare`: JSON lines on disk -> tokens, labels and hash on disk; then the rows of every
               optimizer step of an epoch, of 32,768 tokens each (`data.batch`, `data.sampler`)
    tunebook_tools  the same with tools, calls and results in every conversation, of the same words; TRL's template for
               Qwen 2.5 writes them
    trl        `datasets.load_dataset("json")`, then `trl.SFTTrainer(...)` as `trl sft` builds it, over a model of
               almost no weights: packing=True (bfd), assistant_only_loss=True, dataset_num_proc = cores. Its
               constructor prepares; what it takes without any documents to speak of (8) is taken off
    trl_plain  the same with the loss on every token, TRL's default, which finds no answers: for comparison only

`prepare_s` leaves out the imports of the measured process, which `wall_s` counts; `cpu_s` is the time that all its
processes had on a core, imports included. Memory is of the whole tree of
processes, sampled every 0.2 s: `peak_mib` is the sum of proportional set sizes (a page that two processes share counts
once, mapped files count as far as they are in memory), `peak_anonymous_mib` what of it no file backs. `same_ids` is
whether both gave the first 200 conversations the same tokens and labels. Ratios are of pairs run one after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from preparation_data import write_conversations, write_model

METHODS = ("tunebook", "tunebook_tools", "trl", "trl_plain")
ROW_LENGTH, STEP_TOKENS = 4096, 32_768
CORES = len(os.sched_getaffinity(0))
_COMPARED = 200  # conversations whose tokens are compared
_SAMPLE_EVERY_S = 0.2
_PATIENCE_S = 3600.0

Document = tuple[list[int], list[int]]  # input_ids and labels


# ---- what a measured process does


def run_method(method: str, folder: Path, documents: Path) -> None:
    """Prepare and write `found.json`: seconds of each stage and the hash of the first conversations' tokens."""
    if method.startswith("tunebook"):
        found = _tunebook(folder, documents, has_tools=method == "tunebook_tools")
    else:
        found = _trl(folder, documents, method == "trl")
    (folder / "found.json").write_text(json.dumps(found))


def _tunebook(folder: Path, documents: Path, *, has_tools: bool) -> dict[str, Any]:
    from tunebook.config.compose import compose
    from tunebook.data.batch import schedule_of, solve_batch
    from tunebook.data.prepare import prepare

    words = [
        *["model=hub", f"model.path={folder.parent / 'model'}", "model.weights=random"],
        *["dataset=jsonl", f"dataset.path={documents}", f"training.max_length={ROW_LENGTH}"],
        *[f"training.global_tokens={STEP_TOKENS}", "packing=isolated", "hardware.gpus_per_node=1"],
        *["optimizer.learning_rate=1e-4", "training.seed=42"],
        *(["model.chat_template=trl:qwen2_5_training"] if has_tools else []),
    ]
    config = compose(None, words).config
    started = time.perf_counter()
    prepared = prepare(config)
    tokenized = time.perf_counter()
    lengths = prepared.train.load_lengths().astype("int64")
    schedule = schedule_of(config, solve_batch(config, lengths), lengths)
    rows = [row for step in schedule.steps_of_epoch(0) for row in schedule.rows_of_step(step)]
    packed = time.perf_counter()
    first = prepared.train.load()[:_COMPARED]
    return {
        "prepare_s": packed - started,
        "tokenise_s": tokenized - started,
        "pack_s": packed - tokenized,
        "documents": prepared.train.counts.num_documents,
        "tokens": prepared.train.counts.num_tokens,
        "rows": len(rows),
        "content_sha256": prepared.content_sha256,
        "ids": hash_documents(zip(first["input_ids"], first["labels"], strict=True)),
    }


def _trl(folder: Path, documents: Path, is_masked: bool) -> dict[str, Any]:
    import datasets
    import transformers
    import trl

    architecture = transformers.AutoConfig.from_pretrained(folder.parent / "model")
    model = transformers.AutoModelForCausalLM.from_config(architecture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.parent / "model")
    arguments = trl.SFTConfig(
        output_dir=str(folder / "outputs"), packing=True, packing_strategy="bfd", max_length=ROW_LENGTH,
        assistant_only_loss=is_masked, dataset_num_proc=CORES, report_to="none", use_cpu=True, bf16=False,
    )  # fmt: skip
    few = folder / "few.jsonl"
    with documents.open() as stream:
        few.write_text("".join(islice(stream, 8)))

    def build(file: Path) -> tuple[Any, float]:
        started = time.perf_counter()
        loaded = datasets.load_dataset("json", data_files=str(file), split="train")
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=loaded, processing_class=tokenizer)
        return trainer.train_dataset, time.perf_counter() - started

    arguments.dataset_num_proc = None  # or processes would be started for eight documents, and taken off
    _, overhead = build(few)
    arguments.dataset_num_proc = CORES
    rows, seconds = build(documents)
    lengths = rows.with_format("numpy")["seq_lengths"][:]
    return {
        "prepare_s": seconds - overhead,
        "overhead_s": overhead,
        "documents": sum(map(len, lengths)),
        "tokens": int(sum(each.sum() for each in lengths)),
        "rows": len(rows),
        "ids": _ids_by_trl(trl, arguments, documents, folder, model, tokenizer),
    }


def _ids_by_trl(trl: Any, arguments: Any, documents: Path, folder: Path, model: Any, tokenizer: Any) -> str:
    """The first conversations as TRL prepares them when it does not pack, which keeps their order."""
    import datasets

    few = folder / "compared.jsonl"
    with documents.open() as stream:
        few.write_text("".join(islice(stream, _COMPARED)))
    arguments.packing, arguments.dataset_num_proc = False, None
    loaded = datasets.load_dataset("json", data_files=str(few), split="train")
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=loaded, processing_class=tokenizer)
    whole = trainer.train_dataset[:]
    return hash_documents(zip(whole["input_ids"], whole["labels"], strict=True))


def hash_documents(documents: Iterator[Document] | zip[Any]) -> str:
    """A hash of tokens and labels. The first label is left out: Tunebook's is -100, and nothing predicts that token."""
    told = json.dumps([[list(ids), list(labels)[1:]] for ids, labels in documents])
    return hashlib.sha256(told.encode()).hexdigest()


# ---- what is measured of it from outside


def measure(method: str, number: int, scratch: Path, repeat: int) -> dict[str, Any]:
    """One measurement in a process of its own, with memory watched from here."""
    folder = scratch / f"{method}-{number}-{repeat}"
    folder.mkdir()
    environment = os.environ | {
        "TUNEBOOK_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder),
    }  # fmt: skip
    load, started, peak = os.getloadavg()[0], time.perf_counter(), Peak()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--method", method, str(folder), str(scratch / file_of(method, number))],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None:
                peak.look(process.pid)
                if time.perf_counter() - started > _PATIENCE_S:
                    raise SystemExit(f"{method} of {number} documents took more than {_PATIENCE_S:,.0f} s")
                time.sleep(_SAMPLE_EVERY_S)
        finally:
            process.kill()
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{method} of {number} documents failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    found = json.loads((folder / "found.json").read_text())
    shutil.rmtree(folder)
    seconds = {name: round(value, 2) for name, value in found.items() if name.endswith("_s")}
    seconds["wall_s"] = round(wall, 2)
    seconds["cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)
    memory = {"peak_mib": round(peak.whole), "peak_anonymous_mib": round(peak.anonymous)}
    return {"method": method, "samples": number, **found, **seconds, **memory, "load_before": round(load, 1)}


def file_of(method: str, number: int) -> str:
    """The name of the file that a method prepares."""
    return f"{number}.tools.jsonl" if method == "tunebook_tools" else f"{number}.jsonl"


class Peak:
    """The most memory that a tree of processes was seen to have, in MiB."""

    def __init__(self) -> None:
        self.whole = self.anonymous = 0.0

    def look(self, root: int) -> None:
        """Add up the tree as it is now."""
        told = [text for process in tree(root) if (text := _read(Path(f"/proc/{process}/smaps_rollup")))]
        self.whole = max(self.whole, sum(field_mib(text, "Pss") for text in told))
        self.anonymous = max(self.anonymous, sum(field_mib(text, "Pss_Anon") for text in told))


def tree(root: int) -> list[int]:
    """A process and all that it started, directly or not, that still run."""
    found = [root]
    for process in found:
        children = (_read(file) for file in Path(f"/proc/{process}/task").glob("*/children"))
        found += [int(child) for text in children for child in text.split()]
    return found


def field_mib(text: str, name: str) -> float:
    """A field of smaps_rollup in MiB; 0 where it is not there."""
    lines = (line.split() for line in text.splitlines())
    return next((int(words[1]) / 1024 for words in lines if words and words[0] == f"{name}:"), 0.0)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""


def summarize(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every size that several methods ran at: how many times Tunebook's time theirs is, pair by pair."""
    found = []
    for number in sorted({line["samples"] for line in lines}):
        ours, *others = (
            [one for one in lines if (one["method"], one["samples"]) == (name, number)] for name in METHODS
        )  # with tools the tokens are others
        for theirs in others:
            pairs = list(zip(ours, theirs, strict=False))
            if not pairs:
                continue
            compared = {"samples": number, "compared_with": theirs[0]["method"]}
            for key in ("prepare_s", "cpu_s"):
                ratios = [other[key] / own[key] for own, other in pairs]
                compared |= {f"{key}_ratio": round(statistics.median(ratios), 2)}
                compared |= {f"{key}_ratios": [round(ratio, 2) for ratio in ratios]}
            for key in ("ids", "tokens"):
                compared[f"same_{key}"] = len({one[key] for pair in pairs for one in pair}) == 1
            found.append(compared)
    return found


def _surroundings() -> dict[str, Any]:
    names = ("trl", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")
    machine = {"date": date.today().isoformat(), "machine": platform.machine(), "cores": CORES}
    return machine | {"python": platform.python_version(), "versions": {name: version(name) for name in names}}


def main() -> int:
    """Make data and tokenizer, measure each size, print and write the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=["tunebook", "trl"])
    parser.add_argument("--method", nargs=3, help=argparse.SUPPRESS)  # what a measured process is started with
    arguments = parser.parse_args()
    if arguments.method:
        method, folder, documents = arguments.method
        run_method(method, Path(folder), Path(documents))
        return 0
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="preparation-") as temporary:
        scratch = Path(temporary)
        tokens_per_word = write_model(scratch / "model")
        for number in arguments.sizes:
            for method in {file_of(method, number): method for method in arguments.only}.values():
                has_tools = method == "tunebook_tools"
                write_conversations(scratch / file_of(method, number), number, tokens_per_word, has_tools=has_tools)
            for repeat in range(arguments.repeats):
                for method in arguments.only:
                    lines.append(measure(method, number, scratch, repeat))
                    _tell(lines[-1], arguments.output)
            for method in arguments.only:
                (scratch / file_of(method, number)).unlink(missing_ok=True)
    for line in summarize(lines):
        _tell(line, arguments.output)
    return 0


def _tell(line: dict[str, Any], output: Path | None) -> None:
    text = json.dumps(line | _surroundings())
    print(text, flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
