"""What `gpu_evaluation` evaluates: model folders with random weights of real architectures, and tasks with their data.

    python tests/bench/gpu_evaluation_subjects.py FOLDER [--small]
    python tests/bench/gpu_evaluation_subjects.py FOLDER --trained RUN

The first writes models and tasks; the second the model of a trained run twice more, in fp32 and in bf16. The tokenizer
is the quickstart's, whose words the tasks are made of; the vocabulary of the models is that of the real ones.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
CONTEXT_TOKENS = 32_768

# Qwen2.5-0.5B, and the same with 4 of its 24 layers; tied embeddings.
WHOLE: dict[str, int] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
FOUR_LAYERS = WHOLE | {"num_hidden_layers": 4}
SMALL = {
    "vocab_size": 1_024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

LONG_WORDS, SHORT_WORDS = 2_600, 120
NUM_ITEMS = 64


def write_subjects(folder: Path, *, is_small: bool) -> None:
    """Models in fp32, `whole` also in fp16 as `half`, and tasks whose prompts are long or short."""
    write_tasks(folder / "tasks", long_words=300 if is_small else LONG_WORDS)
    for name, sizes, dtype in (
        ("whole", WHOLE, "float32"),
        ("half", WHOLE, "float16"),
        ("four_layers", FOUR_LAYERS, "float32"),
    ):
        write_model(folder / name, SMALL if is_small else sizes, dtype)


def write_model(folder: Path, sizes: dict[str, int], dtype: str) -> None:
    """A Qwen2 with weights drawn from a fixed seed and rounded to a format, and a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    options: dict[str, Any] = dict(sizes)
    config = Qwen2Config(
        **options,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = Qwen2ForCausalLM(config)
    model.to("cpu", getattr(torch, dtype)).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(QUICKSTART / "model" / name, folder / name)


def write_trained(folder: Path, run: Path) -> None:
    """The run's model outside of the run: as it was saved, in fp32, and rounded to bf16."""
    import torch
    from safetensors.torch import load_file, save_file

    for name, dtype in (("trained_fp32", torch.float32), ("trained_bf16", torch.bfloat16)):
        shutil.copytree(run / "model", folder / name)
        file = folder / name / "model.safetensors"
        weights = {key: weight.to(dtype) for key, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        config = json.loads((folder / name / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / name / "config.json").write_text(json.dumps(config, indent=2))
        # What says which run it comes from: this is another model now.
        (folder / name / "tunebook.json").unlink(missing_ok=True)


def write_tasks(folder: Path, *, long_words: int) -> None:
    """One task of each kind of request on short prompts, and two on long ones."""
    folder.mkdir(parents=True, exist_ok=True)
    words, draw = _words(), random.Random(0)
    for length, count in (("short", SHORT_WORDS), ("long", long_words)):
        items = []
        for number in range(NUM_ITEMS):
            # Of different lengths: batches are made of sorted requests and padded.
            text = " ".join(draw.choices(words, k=count - number * count // (4 * NUM_ITEMS)))
            # Of several tokens each, or the harness would compute them together.
            choices = [" ".join(draw.choices(words, k=3)) for _ in range(4)]
            items.append({"text": text, "choices": choices, "right": number % 4, "answer": choices[0]})
        data = folder / f"{length}.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items))
        for kind, keys in KINDS.items():
            task = {"task": f"{length}_{kind}", **_shared(data), **keys}
            (folder / f"{length}_{kind}.yaml").write_text(json.dumps(task, indent=2))  # JSON is YAML


KINDS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
}


def _shared(data: Path) -> dict[str, Any]:
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent / "cache")},
        "test_split": "test",
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }


def _words() -> list[str]:
    """The words of the quickstart's held-out conversations, in a fixed order."""
    lines = (QUICKSTART / "data" / "heldout.jsonl").read_text().splitlines()
    found = {word for line in lines for turn in json.loads(line)["conversations"] for word in turn["value"].split()}
    return sorted(found)


def main() -> None:
    """Write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny models and shorter prompts, for a CPU")
    parser.add_argument("--trained", type=Path, help="a finished run")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.trained is None:
        write_subjects(arguments.folder, is_small=arguments.small)
    else:
        write_trained(arguments.folder, arguments.trained)


if __name__ == "__main__":
    main()
