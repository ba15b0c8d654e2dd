"""Seconds and memory of preparing conversations for training, compared with TRL: one JSON line per measurement.

    python benchmarks/preparation.py --output FILE [--sizes 10000 30000 100000] [--repeats 3] [--only tunebook trl]

Conversations of about 400 tokens and a tokenizer of 40,960 entries are made on the spot (`preparation_data.py`). Each
measurement is a fresh process with an empty cache, in turn:

    tunebook   `tunebook.data.prepare`: JSON lines on disk -> tokens, labels and hash on disk; then the rows of every
               optimizer step of an epoch, of 32,768 tokens each (`data.batch`, `data.sampler`)
    trl        `datasets.load_dataset("json")`, then `trl.SFTTrainer(...)` as `trl sft` builds it, over a model of
               almost no weights: packing=True (bfd), assistant_only_loss=True, dataset_num_proc = cores. Its
               constructor prepares; what it takes without any documents to speak of (8) is taken off

`prepare_s` leaves out the imports of the measured process, which `wall_s` counts; `cpu_s` is the time that all its
processes had on a core, imports included. `peak_mib` is the memory of the tree of processes, sampled every 0.2 s: a
page that several share counts once. `same_ids` is whether both gave the first 200 conversations the same tokens and
labels. Ratios are of pairs run one after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from lines import Line, add_line, surroundings

METHODS = ("tunebook", "trl")
ROW_LENGTH, STEP_TOKENS = 4096, 32_768
CORES = len(os.sched_getaffinity(0))
_COMPARED = 200  # conversations whose tokens are compared
_SAMPLE_EVERY_S = 0.2
_PACKAGES = ("trl", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")

Document = tuple[list[int], list[int]]  # input_ids and labels


def prepare_by_tunebook(folder: Path, documents: Path) -> Line:
    """Prepare in this process."""
    from tunebook.config.compose import compose
    from tunebook.data.batch import schedule_of, solve_batch
    from tunebook.data.prepare import prepare

    words = [
        f"model={folder.parent / 'model'}", "model.weights=random", "dataset=file",
        f"dataset.path={documents}", f"training.max_length={ROW_LENGTH}", f"training.global_tokens={STEP_TOKENS}",
        "packing=isolated", "hardware.gpus_per_node=1", "optimizer.learning_rate=1e-4", "training.seed=42",
    ]  # fmt: skip
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
        "tokenize_s": tokenized - started,
        "pack_s": packed - tokenized,
        "documents": prepared.train.counts.num_documents,
        "tokens": prepared.train.counts.num_tokens,
        "rows": len(rows),
        "ids": hash_documents(zip(first["input_ids"], first["labels"], strict=True)),
    }


def prepare_by_trl(folder: Path, documents: Path) -> Line:
    """Prepare in this process and its workers."""
    import datasets
    import transformers
    import trl

    architecture = transformers.AutoConfig.from_pretrained(folder.parent / "model")
    model = transformers.AutoModelForCausalLM.from_config(architecture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.parent / "model")

    def build(num_documents: int | None, **settings: Any) -> tuple[Any, float]:
        file = documents
        if num_documents is not None:
            file = folder / f"{num_documents}.jsonl"
            with documents.open() as stream:
                file.write_text("".join(islice(stream, num_documents)))
        arguments = trl.SFTConfig(
            output_dir=str(folder / "outputs"), packing_strategy="bfd", max_length=ROW_LENGTH, use_cpu=True, bf16=False,
            assistant_only_loss=True, report_to="none", **settings,
        )  # fmt: skip
        started = time.perf_counter()
        loaded = datasets.load_dataset("json", data_files=str(file), split="train")
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=loaded, processing_class=tokenizer)
        return trainer.train_dataset, time.perf_counter() - started

    _, overhead = build(8, packing=True)
    rows, seconds = build(None, packing=True, dataset_num_proc=CORES)
    lengths = rows.with_format("numpy")["seq_lengths"][:]
    first = build(_COMPARED, packing=False)[0][:]  # in their order
    return {
        "prepare_s": seconds - overhead,
        "overhead_s": overhead,
        "documents": sum(map(len, lengths)),
        "tokens": int(sum(each.sum() for each in lengths)),
        "rows": len(rows),
        "ids": hash_documents(zip(first["input_ids"], first["labels"], strict=True)),
    }


def hash_documents(documents: Iterable[Document]) -> str:
    """A hash of tokens and labels. The first label is left out: Tunebook's is -100, and nothing predicts that token."""
    text = json.dumps([[list(ids), list(labels)[1:]] for ids, labels in documents])
    return hashlib.sha256(text.encode()).hexdigest()


def measure(method: str, number: int, scratch: Path) -> Line:
    """One measurement in a process of its own, with memory watched from here."""
    folder = Path(tempfile.mkdtemp(prefix=f"{method}-", dir=scratch))
    environment = os.environ | {
        "TUNEBOOK_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder),
    }  # fmt: skip
    started, peak = time.perf_counter(), 0.0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--method", method, str(folder), str(scratch / f"{number}.jsonl")]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, tree_mib(process.pid))
            time.sleep(_SAMPLE_EVERY_S)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{method} of {number} documents failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    found = json.loads((folder / "found.json").read_text())
    shutil.rmtree(folder)
    found |= {"wall_s": wall, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}
    found = {key: round(value, 2) if key.endswith("_s") else value for key, value in found.items()}
    return {"method": method, "samples": number, **found, "peak_mib": round(peak), "cores": CORES}


def tree_mib(root: int) -> float:
    """The memory of a process and all that it started, each shared page once."""
    import psutil

    total = 0
    for process in [*psutil.Process(root).children(recursive=True), psutil.Process(root)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            continue
    return total / 2**20


def compared(lines: list[Line]) -> Line:
    """How many times Tunebook's time TRL's is, pair by pair, of the lines of one size."""
    ours, theirs = ([line for line in lines if line["method"] == method] for method in METHODS)
    pairs = list(zip(ours, theirs, strict=True))
    found: Line = {"samples": lines[0]["samples"], "compared_with": "trl"}
    for key in ("prepare_s", "cpu_s"):
        ratios = [other[key] / own[key] for own, other in pairs]
        found |= {f"{key}_ratio": round(statistics.median(ratios), 2)}
        found |= {f"{key}_ratios": [round(ratio, 2) for ratio in ratios]}
    return found | {f"same_{key}": len({line[key] for line in lines}) == 1 for key in ("ids", "tokens")}


def main(words: list[str] | None = None) -> int:
    """Make data and tokenizer, measure each size, print and write the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--method", nargs=3, help=argparse.SUPPRESS)  # what a measured process is started with
    asked = parser.parse_args(words)
    if asked.method:
        method, folder, documents = asked.method[0], Path(asked.method[1]), Path(asked.method[2])
        prepare = prepare_by_tunebook if method == "tunebook" else prepare_by_trl
        (folder / "found.json").write_text(json.dumps(prepare(folder, documents)))
        return 0
    from preparation_data import write_conversations, write_model

    with tempfile.TemporaryDirectory(prefix="preparation-") as temporary:
        scratch = Path(temporary)
        tokens_per_word = write_model(scratch / "model")
        for number in asked.sizes:
            write_conversations(scratch / f"{number}.jsonl", number, tokens_per_word)
            lines = []
            for method in METHODS * asked.repeats:
                if method in asked.only:
                    lines.append(measure(method, number, scratch))
                    add_line(lines[-1] | surroundings(_PACKAGES), asked.output)
            if set(asked.only) == set(METHODS):
                add_line(compared(lines) | surroundings(_PACKAGES), asked.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
