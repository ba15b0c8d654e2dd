"""Seconds and memory of looking for evaluation items in training documents: prints one JSON object.

    python tests/bench/contamination.py [--documents 100000] [--items 10000] [--repeats 3]

Conversations of two turns and about 300 words (words drawn with Zipf's frequencies, lengths lognormal), and a task of
questions about passages of about 120 words, are written to a temporary folder as JSON lines. One item in a hundred is
put into a document as a whole, and of one in a hundred 20 words of the passage: `found` must be these. Each repeat is a
process of its own, which does what the check before a training does: it reads the files, indexes the items and reads
every document once.
`search_s` leaves out reading the files. `peak_mib` is the most memory that the process had, libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUM_WORDS = 80_000
SEED = 5
_CHUNK = 1000  # texts drawn at once
_EVERY = 100  # of how many items one is put into a document


def draw_texts(random: np.random.Generator, number: int, mean: int) -> Iterator[str]:
    """Texts of `mean` words on average."""
    shares = 1 / (np.arange(NUM_WORDS) + 2.7)
    cumulative = np.cumsum(shares / shares.sum())
    names = np.array([f"{'aeiou'[place % 5]}{place:x}" for place in range(NUM_WORDS)], dtype=object)
    for start in range(0, number, _CHUNK):
        lengths = np.maximum(8, random.lognormal(np.log(mean) - 0.18, 0.6, min(_CHUNK, number - start))).astype(int)
        drawn = names[np.searchsorted(cumulative, random.random(lengths.sum()))]
        for text in np.split(drawn, np.cumsum(lengths)[:-1]):
            yield " ".join(text)


def write_data(folder: Path, num_documents: int, num_items: int) -> None:
    """Write `train.jsonl` and `items.jsonl`."""
    random = np.random.default_rng(SEED)
    passages, questions = draw_texts(random, num_items, 120), draw_texts(random, num_items, 14)
    items = [{"passage": one, "question": other} for one, other in zip(passages, questions, strict=True)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    whole = [f"{item['passage']}\n{item['question']}?" for item in items[::_EVERY]]
    part = [" ".join(item["passage"].split()[:20]) for item in items[1::_EVERY]]
    texts = whole + part
    planted = {place * num_documents // len(texts): text for place, text in enumerate(texts)}
    asked, answered = draw_texts(random, num_documents, 90), draw_texts(random, num_documents, 210)
    with (folder / "train.jsonl").open("w") as file:
        for number, (user, assistant) in enumerate(zip(asked, answered, strict=True)):
            content = f"{user} {planted[number]}" if number in planted else user
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": assistant}]
            file.write(json.dumps({"messages": turns}) + "\n")


def measure(folder: Path) -> None:
    """Look for the items, and print what it took."""
    from tunebook.config.schema import DatasetConfig, ModelConfig, RunConfig
    from tunebook.evaluate.contamination.check import open_documents
    from tunebook.evaluate.contamination.index import build_index
    from tunebook.evaluate.contamination.items import Item, ItemGroup
    from tunebook.evaluate.contamination.result import group_results
    from tunebook.evaluate.contamination.search import Search

    model = ModelConfig(path=str(folder / "no_model"))
    config = RunConfig(dataset=DatasetConfig(path=str(folder / "train.jsonl")), model=model)
    started = time.perf_counter()
    rows = [json.loads(line) for line in (folder / "items.jsonl").open()]
    items = [Item(number=n, question=(row["passage"], row["question"])) for n, row in enumerate(rows)]
    group = ItemGroup(name="items", items=items, num_all=len(items))
    with open_documents(config, None) as documents:
        read = time.perf_counter()
        search = Search(build_index([group]))
        for batch in documents.batches():
            search.add(batch)
        [result] = group_results([group], search.finish(), documents.origin)
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kinds = ("exact", "overlapping", "shared_passage", "clean")
    found = {kind: result[f"num_{kind}"] for kind in kinds}
    print(json.dumps({"s": ended - started, "search_s": ended - read, "peak_mib": peak, "found": found}))


def main() -> None:
    """Measure in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    request = parser.parse_args()
    if request.measure is not None:
        measure(request.measure)
        return
    with tempfile.TemporaryDirectory(prefix="contamination-") as name:
        folder = Path(name)
        write_data(folder, request.documents, request.items)
        environment = os.environ | {"TUNEBOOK_CACHE": str(folder / "cache")}
        command = [sys.executable, __file__, "--measure", name]
        runs: list[dict[str, Any]] = []
        for _ in range(request.repeats):
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    record = {
        "documents": request.documents,
        "items": request.items,
        "cores": len(os.sched_getaffinity(0)),
        **{key: round(statistics.median(run[key] for run in runs), 1) for key in ("s", "search_s", "peak_mib")},
        "found": runs[0]["found"],
        "runs": [round(run["s"], 1) for run in runs],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
