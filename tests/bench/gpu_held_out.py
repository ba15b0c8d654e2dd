"""Hold the memory plan against configurations that chance drew: plan them here, then measure them on a GPU machine.

    python tests/bench/gpu_held_out.py draw --seed 1 --count 40 --cases CASES.jsonl [--architectures | --targets]
        [--edge GIB [--varied]]
    python tests/bench/gpu_held_out.py run --cases CASES.jsonl --output DIR [--gpus 2] [--deadline-s 500] [--list]

`draw` takes a model, a strategy, lengths, passes, an adapter, a precision, an optimizer and what is kept of the forward
pass by chance, asks today's plan, and writes those that it allows with what it says: nobody chose them for being easy.
Models are those of the book cut to whole layers, and the config.json of published ones that no formula was fitted to;
with --architectures those of `gpu_architectures.py`, of eighteen other kinds. With --targets they are of all three, and
each has an adapter on some of its linear layers, drawn by their names. With --edge they are made to fill a GPU of that
size as far as the plan allows: as many rows in a pass as are estimated to fit, on a host of 120 GiB. Those go on their
GPUs when the one before has ended, since even a run that saves its model holds memory there. With --varied their
documents are of lognormal lengths and the steps are more: hardly two passes are of the same size then, and pieces of
memory that fit nothing else become more.
`run` trains each for a few steps with random weights, where nothing else was drawn on documents of 256 tokens, so that
every row is exactly full.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from bisect import bisect_right
from pathlib import Path
from typing import Any

from gpu_architectures import APART, MODELS, TIED, sizes
from gpu_memory import DOCUMENT_TOKENS, STEPS, ZERO3_STEPS
from gpu_queue import Job, add_arguments, run_jobs
from gpu_recipes import facts_of, slice_words

from tunebook.plan.draft import draft_run
from tunebook.plan.memory import USABLE_SHARE, estimate_memory

_OF_ROWS = ("training.micro_batch_size=", "training.global_samples=", "hardware.memory_gib=")
_EDGE, _EDGE_HOST = "edge", "hardware.host_memory_gib=120"
_MOST_ROWS, _FILLED = 64, 0.94  # per pass; of what tensors may take of a GPU, at the edge
_VARIED_STEPS = 6  # the first two of up to nine had all that the allocator came to hold
LARGEST_GIB, LARGEST_SHARED_GIB = 110.0, 42.0  # of a plan; below the second, three runs share an H200
LARGEST_PARAMETERS = 4.2e9  # that one GPU's ranks draw on the host
BASE = [
    "model.weights=random", "hardware=hopper", "hardware.memory_gib=140.4", "dataset=synthetic",
    "dataset.synthetic.num_documents=2048", f"dataset.synthetic.min_tokens={DOCUMENT_TOKENS}",
    f"dataset.synthetic.max_tokens={DOCUMENT_TOKENS}", "schedule=constant", "training.save_every_steps=null",
    "training.log_every_steps=1", "evaluation=none", "launcher=local",
]  # fmt: skip
# transformers' model_type, and the sizes as published but for some numbers of layers
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("llama", sizes(2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED)),
    "Llama-3.2-3B, 14 layers": ("llama", sizes(3072, 8192, 14, 24, 8, 128256, head_dim=128, **TIED)),
    "SmolLM2-1.7B": ("llama", sizes(2048, 8192, 24, 32, 32, 49152, **TIED)),
    "Qwen2.5-1.5B": ("qwen2", sizes(1536, 8960, 28, 12, 2, 151936, **TIED)),
    "Qwen2.5-14B, 4 layers": ("qwen2", sizes(5120, 13824, 4, 40, 8, 152064, **APART)),
    "Qwen3-1.7B": ("qwen3", sizes(2048, 6144, 28, 16, 8, 151936, head_dim=128, **TIED)),
    "Qwen3-8B, 6 layers": ("qwen3", sizes(4096, 12288, 6, 32, 8, 151936, head_dim=128, **APART)),
    "OLMo-2-1B": ("olmo2", sizes(2048, 8192, 16, 16, 16, 100352, **APART)),
    "granite-3.1-8b, 8 layers": (
        "granite",
        sizes(4096, 12800, 8, 32, 8, 49155, attention_multiplier=0.0078125, embedding_multiplier=12.0,
               residual_multiplier=0.22, logits_scaling=16.0, **TIED),
    ),
    "Phi-4, 4 layers": ("phi3", sizes(5120, 17920, 4, 40, 10, 100352, sliding_window=None, **APART)),
}  # fmt: skip
# The same with fewer layers, for runs that are looked at and not drawn: what one layer has at work is most of them.
FEW_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B, 3 layers": ("llama", PUBLISHED["Llama-3.2-1B"][1] | {"num_hidden_layers": 3}),
    "OLMo-2-1B, 3 layers": ("olmo2", PUBLISHED["OLMo-2-1B"][1] | {"num_hidden_layers": 3}),
    "granite-3.1-8b, 2 layers": ("granite", PUBLISHED["granite-3.1-8b, 8 layers"][1] | {"num_hidden_layers": 2}),
    "Qwen3-8B, 2 layers": ("qwen3", PUBLISHED["Qwen3-8B, 6 layers"][1] | {"num_hidden_layers": 2}),
}
OTHER_KINDS = {f"{model} ({kind})": (kind, config) for kind, (model, config) in MODELS.items()}
OF_THE_BOOK = {"qwen25_05b": (24,), "qwen25_3b": (9, 15, 21, 36), "qwen25_7b": (3, 5, 8), "llama3_8b": (2, 5, 9)}
SPREAD = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op", "zero2_offload", "zero3_offload", "fsdp_offload")
LENGTHS = (1024, 1536, 2560, 3072, 5120, 7168, 9216, 12288, 15360, 20480)
KEEPS = {
    "as auto decides": [],
    "stored": ["activation=stored"],
    "checkpointing": ["activation=checkpointing"],
    "selective": ["activation=selective"],
    "offload": ["activation=stored", "activation.offload=true"],
}
ADAPTERS = [
    [], [], [], ["peft=lora"], ["peft=lora", "peft.rank=64"],
    ["peft=lora", "peft.target_modules=[q_proj,k_proj,v_proj,o_proj]"],
]  # fmt: skip
PRECISIONS = [
    [], [], [], ["precision.master_weights=bf16"], ["parallelism.mixed_precision=cast"],
    ["precision=fp32", "precision.tf32=disabled"],
]  # fmt: skip
OPTIMIZERS = [[], [], [], ["optimizer=adamw_8bit"]]
_VARLEN = "attention=varlen_attention"
BLOCKS = [[_VARLEN], [_VARLEN], [_VARLEN, "model.compile_layers=false"], ["attention=sdpa"]]
OTHER_BLOCKS = [*BLOCKS, ["attention=flex_attention"]]  # what caps its logits or keeps a sink has no other


def write_config(name: str, folder: Path) -> Path:
    """The config.json of a published model in a folder of its own under `folder`."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, published = (PUBLISHED | FEW_LAYERS | OTHER_KINDS)[name]
    config = AutoConfig.for_model(kind, **published)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.dtype = "bfloat16"
    model = folder / "-".join(name.translate(str.maketrans("", "", ",()")).split())
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config.to_dict()))
    return model


def drawn(
    chance: random.Random, names: list[str], blocks: list[list[str]], *, most_gpus: int = 2, has_targets: bool = False
) -> dict[str, Any]:
    """One configuration as chance has it, of one of the named models, whether or not it can be run.

    `has_targets`: without an adapter, which `with_targets` puts on.
    """
    gpus = chance.choice((1, 2, 2)) if most_gpus == 2 else 1
    strategy = chance.choice(SPREAD) if gpus == 2 else chance.choice(("single", "single", "single", "fsdp_offload"))
    length, micro, accumulation = chance.choice(LENGTHS), chance.choice((1, 1, 1, 2, 3)), chance.choice((1, 1, 2, 3))
    name = chance.choice(names)
    layers = chance.choice(OF_THE_BOOK[name]) if name in OF_THE_BOOK else None
    samples = gpus * micro * accumulation * length // DOCUMENT_TOKENS
    words = [
        *BASE, f"training.max_steps={ZERO3_STEPS if 'zero3' in strategy else STEPS}", f"parallelism={strategy}",
        f"hardware.gpus_per_node={gpus}", f"training.max_length={length}", f"packing.row_length={length}",
        f"training.global_samples={samples}", f"training.micro_batch_size={micro}",
        *KEEPS[chance.choice(list(KEEPS))], *chance.choice(blocks), *([] if has_targets else chance.choice(ADAPTERS)),
        *chance.choice(PRECISIONS), *chance.choice(OPTIMIZERS),
    ]  # fmt: skip
    return {"model": name, "layers": layers, "gpus": gpus, "accumulation": accumulation, "overrides": words}


def with_targets(chance: random.Random, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The case with LoRA on one to four of the linear layers that its model has, or on its experts, by their names."""
    draft = draft_run(None, [*words_of(case, folder), "peft=lora"], [])
    if draft.resolution is None:
        return case
    facts = draft.resolution.config.model.facts
    found = {*facts.measured.adapters, *facts.measured.expert_adapters}
    names = chance.sample(sorted(found), k=min(len(found), chance.randint(1, 4)))
    words = ["peft=lora", f"peft.rank={chance.choice((16, 64))}", f"peft.dropout={chance.choice((0.0, 0.05))}"]
    return case | {"overrides": [*case["overrides"], *words, f"peft.target_modules=[{','.join(names)}]"]}


def at_the_edge(case: dict[str, Any], folder: Path, memory_gib: float) -> dict[str, Any] | None:
    """The case with as many rows per pass as fit into a GPU of that size; None where that fills too little of it.

    None for a kernel with a mask too: of all tokens of a pass, which takes minutes for more than a few rows.
    """
    if "attention=sdpa" in case["overrides"]:
        return None
    words = [word for word in case["overrides"] if not word.startswith(_OF_ROWS)]
    length = next(int(word.partition("=")[2]) for word in words if word.startswith("packing.row_length="))
    usable = memory_gib * USABLE_SHARE

    def with_rows(micro: int) -> dict[str, Any]:
        samples = case["gpus"] * micro * case["accumulation"] * length // DOCUMENT_TOKENS
        rows = [f"training.micro_batch_size={micro}", f"training.global_samples={samples}", _EDGE_HOST]
        return case | {"overrides": [*words, f"hardware.memory_gib={memory_gib}", *rows]}

    def filled(micro: int) -> float:
        found = planned(with_rows(micro), folder)
        return math.inf if found is None else found["planned_gib"]

    most = bisect_right(range(1, _MOST_ROWS), usable, key=filled)
    return with_rows(most) if most and filled(most) > _FILLED * usable else None


def with_varied_lengths(case: dict[str, Any]) -> dict[str, Any]:
    """The case with documents as long as `dataset=synthetic` makes them, the longest of them a row."""
    words = dict(word.split("=", 1) for word in case["overrides"] if not word.startswith("dataset.synthetic."))
    samples, length = int(words.pop("training.global_samples")), words["packing.row_length"]
    words |= {"training.global_tokens": str(samples * DOCUMENT_TOKENS), "dataset.synthetic.max_tokens": length}
    words |= {"training.max_steps": str(_VARIED_STEPS)}
    return case | {"overrides": [f"{key}={value}" for key, value in words.items()]}


def words_of(case: dict[str, Any], folder: Path) -> list[str]:
    """What a case is trained by; the config.json of a published model is written below `folder`."""
    name, layers = case["model"], case["layers"]
    if name not in OF_THE_BOOK:
        return ["model=hub", f"model.path={write_config(name, folder)}", *case["overrides"]]
    sliced = slice_words(name, layers)[0] if layers != facts_of(name)["num_layers"] else []
    return [f"model={name}", "model.facts.dtype=bfloat16", *sliced, *case["overrides"]]


def planned(case: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What today's plan says of a case; None where it may not be run, or its model is too large to be drawn."""
    draft = draft_run(None, words_of(case, folder), [])
    if draft.error is not None or draft.resolution is None or any(problem.is_error for problem in draft.problems):
        return None
    if draft.host is not None and draft.host.fits is False:
        return None
    config = draft.resolution.config
    facts = config.model.facts
    if facts is None or facts.num_parameters > LARGEST_PARAMETERS:
        return None
    tensors_gib = estimate_memory(config, facts, accumulates=case["accumulation"] > 1).total_gib
    return {"planned_gib": round(tensors_gib, 3), "num_parameters": facts.num_parameters}


def draw(arguments: argparse.Namespace) -> None:
    """Write as many cases as were asked for, with what the plan says of each before anyone has measured it."""
    chance = random.Random(arguments.seed)
    names, blocks = ([*OTHER_KINDS], OTHER_BLOCKS) if arguments.architectures else ([*PUBLISHED, *OF_THE_BOOK], BLOCKS)
    if arguments.targets:
        names += [*OTHER_KINDS]
    marks = ((arguments.edge is not None, _EDGE), (arguments.architectures, "other"), (arguments.targets, "targets"))
    mark = next((name for is_so, name in marks if is_so), "drawn")
    seen: set[str] = set()
    tried = 0
    with arguments.cases.open("w") as file:
        while len(seen) < arguments.count:
            case = drawn(chance, names, blocks, most_gpus=arguments.most_gpus, has_targets=arguments.targets)
            if arguments.targets:
                case = with_targets(chance, case, arguments.configs)
            tried += 1
            if arguments.edge is not None:
                case = at_the_edge(case, arguments.configs, arguments.edge)
            if arguments.varied and case is not None:
                case = with_varied_lengths(case)
            found, said = planned(case, arguments.configs) if case is not None else None, json.dumps(case)
            if case is None or found is None or found["planned_gib"] > LARGEST_GIB or said in seen:
                continue
            seen.add(said)
            case |= {"name": f"{mark}_{arguments.seed}_{len(seen)}"} | found
            file.write(json.dumps(case) + "\n")
            file.flush()
            print(json.dumps(case), flush=True)
    print(f"{len(seen)} of {tried} that were drawn")


def _data_of(case: dict[str, Any]) -> str:
    are_equal = f"dataset.synthetic.min_tokens={DOCUMENT_TOKENS}" in case["overrides"]
    return f"generated documents of {f'{DOCUMENT_TOKENS} tokens' if are_equal else 'lognormal lengths'}"


def jobs_of(
    cases: list[dict[str, Any]],
    num_gpus: int,
    folder: Path,
    peaks: Path | None,
    largest_shared_gib: float = LARGEST_SHARED_GIB,
) -> list[Job]:
    """The cases, the large ones alone on their GPUs."""
    jobs: list[Job] = []
    loads = [0] * num_gpus
    for case in cases:
        first = loads.index(min(loads)) if case["gpus"] == 1 else 0
        gpus = tuple(range(first, first + case["gpus"]))
        for gpu in gpus:
            loads[gpu] += 1
        jobs.append(
            Job(
                name=case["name"], gpus=gpus, words=words_of(case, folder), priority=len(jobs), turn_timeout_s=150,
                line=case | {"weights": "random", "data": _data_of(case)},
                is_alone=case["planned_gib"] > largest_shared_gib,
                host_gib=case["gpus"] * 4 * case["num_parameters"] / 2**30,
                environment={"OMP_NUM_THREADS": "8", "TUNEBOOK_BENCH_WAITS_EARLY": "1"}
                | ({"TUNEBOOK_BENCH_KEEPS_GPUS": "1"} if case["name"].startswith(_EDGE) else {})
                | _recorder(case, peaks),
            )
        )  # fmt: skip
    return jobs


def _recorder(case: dict[str, Any], peaks: Path | None) -> dict[str, str]:
    """What has a run write down what fills its GPU at the peak, for `gpu_turns`; nothing without a folder for it.

    Runs at the edge are left as they are.
    """
    if peaks is None or case["name"].startswith(_EDGE):
        return {}
    words = case["overrides"]
    is_hard = "activation=checkpointing" in words and "model.compile_layers=false" not in words
    only_sizes = {"TUNEBOOK_BENCH_PEAK_SIZES": "1"} if is_hard else {}
    return {"TUNEBOOK_BENCH_PEAK": str(peaks / f"{case['name']}.json")} | only_sizes


def main() -> None:
    """Parse the arguments and draw or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, default=Path("/tmp/configs"), help="where config.json are written")
    ways = parser.add_subparsers(required=True, dest="way")
    drawing = ways.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, required=True)
    drawing.add_argument("--most-gpus", type=int, choices=(1, 2), default=2, help="of a case")
    drawing.add_argument("--edge", type=float, metavar="GIB", help="fill GPUs of this size")
    drawing.add_argument("--varied", action="store_true", help="with --edge: documents of many lengths, and more steps")
    kinds = drawing.add_mutually_exclusive_group()
    kinds.add_argument("--architectures", action="store_true", help="models of other kinds than the book's")
    kinds.add_argument("--targets", action="store_true", help="adapters on some of the layers of all models")
    running = ways.add_parser("run")
    add_arguments(running, deadline_s=500)
    running.add_argument("--gpus", type=int, default=2, help="of the machine")
    running.add_argument("--only", nargs="*", metavar="NAME")
    running.add_argument("--peaks", type=Path, help="a folder for what filled each GPU at its peak")
    help_ = "of a plan: larger runs have their GPUs to themselves; 24 on an H100"
    running.add_argument("--largest-shared-gib", type=float, default=LARGEST_SHARED_GIB, help=help_)
    for way in (drawing, running):
        way.add_argument("--cases", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.way == "draw":
        draw(arguments)
        return
    cases = [json.loads(line) for line in arguments.cases.read_text().splitlines()]
    cases = [case for case in cases if not arguments.only or case["name"] in arguments.only]
    if arguments.peaks:
        arguments.peaks.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(cases, arguments.gpus, arguments.configs, arguments.peaks, arguments.largest_shared_gib)
    run_jobs(jobs, arguments)


if __name__ == "__main__":
    main()
