"""Write the quickstart's data and model folder; the same bytes each time.

    python recipes/quickstart/make_data.py            write the files
    python recipes/quickstart/make_data.py --check    exit 1 if the files on disk are not what would be written

Both modes finish in seconds and need neither a GPU nor a network.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conversations import Item, build_heldout_items, build_train_items
from model_files import write_model_files

FOLDER = Path(__file__).resolve().parent
SEED = 20
NUM_TRAIN_ITEMS = 15_000
NUM_HELDOUT_ITEMS_PER_TASK = 32


def write_train(path: Path, items: Sequence[Item]) -> None:
    """Plain ShareGPT: each line has `conversations` and nothing else."""
    lines = (json.dumps({"conversations": item.turns()}) + "\n" for item in items)
    path.write_text("".join(lines), encoding="utf-8")


def write_heldout(path: Path, items: Sequence[Item]) -> None:
    """ShareGPT with the name of the task beside it; the last turn is the answer to be checked."""
    lines = (json.dumps({"conversations": item.turns(), "task": item.task}) + "\n" for item in items)
    path.write_text("".join(lines), encoding="utf-8")


def write_all(folder: Path) -> list[Path]:
    """Write every generated file below the folder and return their paths, relative to it."""
    data, model = folder / "data", folder / "model"
    data.mkdir(parents=True, exist_ok=True)
    train_items = build_train_items(NUM_TRAIN_ITEMS, SEED)
    write_train(data / "train.jsonl", train_items)
    write_heldout(data / "heldout.jsonl", build_heldout_items(NUM_HELDOUT_ITEMS_PER_TASK, SEED))
    roles = ["system\n", "user\n", "assistant\n"]
    write_model_files(model, roles + [value for item in train_items for _, value in item.conversations])
    return sorted(path.relative_to(folder) for path in (*data.iterdir(), *model.iterdir()))


def find_differences(folder: Path) -> list[str]:
    """What is wrong with the generated files below the folder, one line for each file."""
    problems = []
    with tempfile.TemporaryDirectory() as fresh:
        for path in write_all(Path(fresh)):
            if not (folder / path).is_file():
                problems.append(f"{folder / path} is missing")
            elif (folder / path).read_bytes() != (Path(fresh) / path).read_bytes():
                problems.append(f"{folder / path} differs from what make_data.py writes")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description="Write the quickstart's data and model folder.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the files on disk differ")
    if not parser.parse_args(arguments).check:
        print("\n".join(f"wrote {FOLDER / path}" for path in write_all(FOLDER)))
        return 0
    problems = find_differences(FOLDER)
    for problem in problems:
        print(f"{problem}; run: python {Path(__file__).name}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
