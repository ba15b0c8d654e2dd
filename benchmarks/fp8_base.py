"""Adapters over a frozen base in fp8 against the same over bf16, on one GPU: one JSON line for each run and comparison.

    python recipes/smollm2_135m_boolq/make_inputs.py
    python benchmarks/fp8_base.py OUTPUT [--inputs inputs] [--only sizes_8b text boolq] [--seeds 42 1 2] [--layers 8]

    sizes_8b  200 steps of Llama 3.1 8B's sizes with fewer layers, random weights, on documents that can be learned
    text      200 steps of SmolLM2-135M on every token of BoolQ's passages
    boolq     SmolLM2-135M on BoolQ as in the recipe smollm2_135m_lora, for each seed: accuracy before and after

It needs torch, transformers and peft, not TRL: the loop is its own; blocks, attention and fp8 layers are Tunebook's.
Accuracy is that of the more likely first token of "yes" and "no": over the base in bf16 as in `tunebook eval`, and over
the base in fp8 as in training.
`--device cpu --small` tries it without a GPU. Lines go to OUTPUT/fp8_base.jsonl; finished runs are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lines import Line, add_line, largest_difference, read_lines, surroundings

BASES = ("bf16", "fp8")
PACKAGES = ("torch", "transformers", "peft")
KINDS = ("sizes_8b", "text", "boolq")
SIZES_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 512}  # fmt: skip
Document = tuple[list[int], list[int]]  # tokens, and labels: -100 for those that no loss counts


def build(kind: str, asked: argparse.Namespace) -> Any:
    """The frozen model of a kind in bf16, with adapters in fp32 on all linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunebook.config.choices import Attention
    from tunebook.model.varlen_attention import register

    if asked.device == "cuda":
        register(Attention.varlen_attention)
    attention = "varlen_attention" if asked.device == "cuda" else "sdpa"
    options: Any = {"dtype": torch.bfloat16, "attn_implementation": attention}
    if kind == "sizes_8b":
        sizes = SIZES_8B | {"num_hidden_layers": asked.layers} | (SMALL if asked.small else {})
        torch.manual_seed(0)
        with torch.device(asked.device):
            base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), **options)
    else:
        base = AutoModelForCausalLM.from_pretrained(asked.inputs / "smollm2_135m", **options)
    settings = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(base.to(asked.device), settings)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.enable_input_require_grads()
    return model


def convert(model: Any, asked: argparse.Namespace) -> Line:
    """Convert the base to fp8; GiB before, at the peak and after, which should all be near the model's size."""
    import torch

    from tunebook.model.fp8 import convert_frozen_to_fp8

    if asked.device != "cuda":
        return {"fp8_layers": len(convert_frozen_to_fp8(model.get_base_model()))}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layers = len(convert_frozen_to_fp8(model.get_base_model()))
    sizes = (before, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    return {"fp8_layers": layers, "converting_gib": [round(size / 2**30, 3) for size in sizes]}


def row_of(documents: list[Document], device: str) -> tuple[Any, dict[str, Any]]:
    """The labels (T,) and the inputs of a packed row, filled up to a multiple of 16 tokens."""
    import torch

    fill = -sum(len(tokens) for tokens, _ in documents) % 16
    if fill:
        documents = [*documents, ([0] * fill, [-100] * fill)]
    lengths = torch.tensor([len(tokens) for tokens, _ in documents])
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([list(itertools.chain(*(tokens for tokens, _ in documents)))], device=device),
        "position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None].to(device),
        "use_cache": False,
    }
    if device == "cuda":
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        longest = int(lengths.max())
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    labels = torch.tensor(list(itertools.chain(*(labels for _, labels in documents))), device=device)
    labels[
        torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    ] = -100  # nothing predicts a first token
    return labels, inputs


def train(model: Any, steps: list[list[Document]], learning_rate: float, device: str) -> Line:
    """Train the adapters; losses, seconds, speed and memory."""
    import torch

    base, parameters = model.get_base_model(), [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    warm_up = max(1, round(0.05 * len(steps)))
    model.train()
    losses, seconds, tokens = [], [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step, documents in enumerate(steps):
        started = time.monotonic()
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warm_up) / max(1, len(steps) - warm_up)))
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, (step + 1) / warm_up) * cosine
        labels, inputs = row_of(documents, device)
        with torch.autocast(device, torch.bfloat16):
            hidden = base.model(**inputs).last_hidden_state[0]
            places = (labels[1:] != -100).nonzero()[:, 0]
            logits = base.lm_head(hidden[places])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[1:][places])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.monotonic() - started)
        tokens.append(len(labels))
    late = len(steps) // 5
    found: Line = {"losses": [round(loss, 6) for loss in losses], "training_s": round(sum(seconds), 1)}
    found["tokens_per_second"] = round(sum(tokens[late:]) / sum(seconds[late:]))
    if device == "cuda":
        found["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def accuracy(model: Any, questions: list[tuple[list[int], bool]], words: dict[bool, int], device: str) -> float:
    """The share of questions whose right answer begins with the more likely of two tokens."""
    import torch

    base, right = model.get_base_model(), 0
    model.eval()
    for start in range(0, len(questions), 64):
        batch = questions[start : start + 64]
        _, inputs = row_of([(tokens, [-100] * len(tokens)) for tokens, _ in batch], device)
        ends = list(itertools.accumulate(len(tokens) for tokens, _ in batch))
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            logits = base.lm_head(base.model(**inputs).last_hidden_state[0, [end - 1 for end in ends]]).float()
        is_yes = (logits[:, words[True]] > logits[:, words[False]]).tolist()
        right += sum(found == answer for found, (_, answer) in zip(is_yes, batch, strict=True))
    return right / len(questions)


def questions_of(part: str, tokenizer: Any, asked: argparse.Namespace) -> list[tuple[list[int], bool]]:
    """The tokens of BoolQ's questions up to the answer, as the recipe's templates write them, and the answers."""
    found = []
    for record in read_lines(asked.inputs / "boolq" / f"{part}.jsonl")[: 6 if asked.small else None]:
        text = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
        turns = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        found.append((tokenizer(prompt, add_special_tokens=False).input_ids, bool(record["answer"])))
    return found


def walks(vocab_size: int, length: int) -> list[Document]:
    """Documents in which a token mostly follows from the one before it, among 64."""
    import torch

    draw = torch.Generator().manual_seed(1)
    used = torch.randperm(vocab_size, generator=draw)[:64]
    following = torch.randperm(64, generator=draw).tolist()
    documents = []
    for _ in range(1024):
        jumps = (torch.rand(length, generator=draw) < 0.3).tolist()
        places = torch.randint(64, (length,), generator=draw).tolist()
        for place in range(1, length):
            places[place] = places[place] if jumps[place] else following[places[place - 1]]
        tokens = used[places].tolist()
        documents.append((tokens, list(tokens)))
    return documents


def steps_of(documents: list[Document], per_step: int, num_steps: int, seed: int) -> list[list[Document]]:
    """The documents of each step, in an order of each seed, epoch after epoch."""
    import torch

    draw, steps = torch.Generator().manual_seed(seed), list[list[Document]]()
    while len(steps) < num_steps:
        order = torch.randperm(len(documents), generator=draw).tolist()
        for start in range(0, len(order) - per_step + 1, per_step):
            steps.append([documents[number] for number in order[start : start + per_step]])
    return steps[:num_steps]


def losses_of(kind: str, base: str, seed: int, asked: argparse.Namespace) -> Line:
    """200 steps on every token."""
    model = build(kind, asked)
    if kind == "sizes_8b":
        documents, per_step = walks(model.config.vocab_size, 32 if asked.small else 512), 16
    else:
        questions = questions_of("train", load_tokenizer(asked), asked)
        documents, per_step = [(tokens, list(tokens)) for tokens, _ in questions], asked.per_step
    found = prepare(model, base, asked)
    steps = steps_of(documents, per_step, 4 if asked.small else 200, seed)
    return found | train(model, steps, 2e-4, asked.device)


def scores_of(kind: str, base: str, seed: int, asked: argparse.Namespace) -> Line:
    """Two epochs of BoolQ, and the accuracy on its validation part before and after."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tokenizer, model = load_tokenizer(asked), build(kind, asked)
    answers = {True: tokenizer("yes").input_ids, False: tokenizer("no").input_ids}
    words = {answer: tokens[0] for answer, tokens in answers.items()}
    held_out = questions_of("validation", tokenizer, asked)
    documents = []
    for tokens, answer in questions_of("train", tokenizer, asked):
        ending = [*answers[answer], tokenizer.eos_token_id]
        documents.append(([*tokens, *ending], [-100] * len(tokens) + ending))
    found: Line = {"questions": len(held_out), "accuracy_before": accuracy(model, held_out, words, asked.device)}
    found |= prepare(model, base, asked)
    steps = steps_of(documents, asked.per_step, 2 * (len(documents) // asked.per_step), seed)
    found |= train(model, steps, 1e-3, asked.device)
    found["accuracy_as_trained"] = accuracy(model, held_out, words, asked.device)
    evaluated = build(kind, asked)
    set_peft_model_state_dict(evaluated, get_peft_model_state_dict(model))
    return found | {"accuracy": accuracy(evaluated, held_out, words, asked.device)}


def load_tokenizer(asked: argparse.Namespace) -> Any:
    """SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(asked.inputs / "smollm2_135m")


def prepare(model: Any, base: str, asked: argparse.Namespace) -> Line:
    """Convert the base where asked, and compile the blocks on a GPU."""
    from tunebook.model.blocks import compile_layers

    found = convert(model, asked) if base == "fp8" else {}
    if asked.device == "cuda":
        compile_layers(model.get_base_model())
    return found


def compare(lines: list[Line]) -> Iterator[Line]:
    """How far fp8 is from bf16: losses step by step, and mean accuracies of all seeds."""
    done = {(line["kind"], line["base"], line["seed"]): line for line in lines if "base" in line}
    for (kind, base, seed), line in done.items():
        reference = done.get((kind, "bf16", seed))
        if base == "fp8" and kind != "boolq" and reference is not None:
            largest = largest_difference(line["losses"], reference["losses"])
            mean = statistics.mean(line["losses"]) / statistics.mean(reference["losses"]) - 1
            found = {"largest_difference": largest, "difference_of_means": mean, "is_within": largest <= 0.01}
            yield {"compared": kind, "seed": seed} | found
    scored = [line for line in done.values() if line["kind"] == "boolq"]
    scores = {base: [line["accuracy"] for line in scored if line["base"] == base] for base in BASES}
    if scored and len(scores["fp8"]) == len(scores["bf16"]):
        mean = statistics.mean(scores["bf16"])
        difference, error = statistics.mean(scores["fp8"]) - mean, math.sqrt(mean * (1 - mean) / scored[0]["questions"])
        found = {"difference": difference, "standard_error": error, "is_within": abs(difference) <= error}
        yield {"compared": "boolq"} | scores | found


def main(words: list[str] | None = None) -> int:
    """Run and compare; each run is written when it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--inputs", type=Path, default=Path("inputs"), help="the folder that make_inputs.py wrote")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2], help="of boolq; the others take the first")
    parser.add_argument("--layers", type=int, default=8, help="of sizes_8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few steps and questions, small sizes")
    asked = parser.parse_args(words)
    asked.per_step = 2 if asked.small else 64
    file = asked.output / "fp8_base.jsonl"
    lines = read_lines(file) if file.is_file() else []
    done = {(line["kind"], line["base"], line["seed"]) for line in lines if "base" in line}
    for kind in asked.only:
        for seed, base in itertools.product(asked.seeds if kind == "boolq" else asked.seeds[:1], BASES):
            if (kind, base, seed) in done:
                continue
            started = time.monotonic()
            line = {"kind": kind, "base": base, "seed": seed} | measure(kind, base, seed, asked)
            line |= {"total_s": round(time.monotonic() - started, 1)} | surroundings(PACKAGES)
            add_line(line, file)
            lines.append(line)
    for line in compare(lines):
        add_line(line, file)
    return 0


def measure(kind: str, base: str, seed: int, asked: argparse.Namespace) -> Line:
    """One run, after what earlier ones have left."""
    import gc

    import torch

    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(seed)
    if asked.device == "cuda":
        torch.cuda.empty_cache()
    found = (scores_of if kind == "boolq" else losses_of)(kind, base, seed, asked)
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    return found | {"device": device} | ({"layers": asked.layers} if kind == "sizes_8b" else {})


if __name__ == "__main__":
    sys.exit(main())
