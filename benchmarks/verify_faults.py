"""Train a recipe with one planted fault after the other: does `tunebook verify` find each, and pass clean repetitions?

    python benchmarks/verify_faults.py [OVERRIDE ...] --output FILE [--recipe NAME] [--steps 300] [--only NAME ...]

Two clean runs, on a CPU of different instructions, are recorded as evidence. Clean repetitions with other sums, and
runs with one fault each, are then compared with it. A fault is planted from outside, as a bug of a library or a damaged
file would be: run.yaml says what the evidence says. One JSON line per run has the exit code of `tunebook verify` and
what it judged. Runs are forked from this process, which has imported the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lines import Line, add_line, surroundings

ROOT = Path(__file__).resolve().parents[1]
# Instructions of MKL, as of another processor (MKL_CBWR), and further overrides.
EVIDENCE = {"recorded-1": ("AUTO", ""), "recorded-2": ("AVX2", "")}
CLEAN = {
    "same": ("AUTO", ""),
    "other-instructions": ("COMPATIBLE", ""),
    "eager": ("AUTO", "attention=eager"),
    "short-rows": ("AUTO", "packing.row_length=128"),
}


def replaced(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` returns for an attribute in its place; `module` may end with a class."""
    path, _, of_class = module.partition(":")
    holder: Any = import_module(path)
    holder = getattr(holder, of_class) if of_class else holder
    setattr(holder, name, make(getattr(holder, name)))


def argument(name: str, change: Callable[[Any], Any]) -> None:
    """Change an argument of the Trainer."""

    def make(arguments_of: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> dict[str, Any]:
            arguments: dict[str, Any] = arguments_of(*args, **kwargs)
            return arguments | {name: change(arguments[name])}

        return changed

    replaced("tunebook.train.build", "trainer_arguments", make)


def learning_rate() -> None:
    """The learning rate is 10% higher."""
    argument("learning_rate", lambda value: 1.1 * value)


def slightly_higher_learning_rate() -> None:
    """The learning rate is 1% higher."""
    argument("learning_rate", lambda value: 1.01 * value)


def weight_decay() -> None:
    """The weight decay is 10% higher."""
    argument("weight_decay", lambda value: 1.1 * value)


def decayed_norms() -> None:
    """Norms and biases decay, too."""
    replaced(
        "transformers:Trainer", "get_decay_parameter_names",
        lambda _: lambda self, model: [name for name, _ in model.named_parameters()],
    )  # fmt: skip


def warmup() -> None:
    """The warm-up is one step longer."""
    argument("warmup_steps", lambda value: value + 1)


def beta2() -> None:
    """Adam's beta2 is 0.999, its default."""
    argument("adam_beta2", lambda _: 0.999)


def no_clipping() -> None:
    """Gradients are not clipped."""
    argument("max_grad_norm", lambda _: 0.0)


def data_seed() -> None:
    """The documents come in the order of another seed."""
    replaced(
        "tunebook.data.sampler", "epoch_order",
        lambda order: lambda num_documents, seed, epoch: order(num_documents, (seed or 0) + 1, epoch),
    )  # fmt: skip


def missing_document() -> None:
    """One document of the 29th step is left out."""

    def make(rows_of_step: Any) -> Any:
        steps = iter(range(10**9))
        return lambda self, documents: rows_of_step(self, documents[1:] if next(steps) == 28 else documents)

    replaced("tunebook.data.sampler:Schedule", "rows_of_step", make)


def prompt_token() -> None:
    """In each row, one token of one prompt is trained."""

    def make(get: Any) -> Any:
        def changed(self: Any, row: Any) -> dict[str, Any]:
            found: dict[str, Any] = get(self, row)
            first = int((found["labels"] != -100).argmax())
            found["labels"] = found["labels"].copy()
            found["labels"][first - 1] = found["input_ids"][first - 1]
            return found

        return changed

    replaced("tunebook.data.sampler:DocumentRows", "__getitem__", make)


def leaking_rows() -> None:
    """Documents of a row attend to each other, and the leak probe is off."""
    replaced("tunebook.train.leak_probe:LeakProbe", "on_train_begin", lambda _: lambda self, *args, **kwargs: None)

    def make(collate: Any) -> Any:
        def changed(self: Any, examples: Any) -> dict[str, Any]:
            import torch

            batch: dict[str, Any] = collate(self, examples)
            return batch | {"position_ids": torch.arange(batch["input_ids"].numel())[None]}

        return changed

    replaced("trl.trainer.sft_trainer:DataCollatorForLanguageModeling", "torch_call", make)


def dropout() -> None:
    """The first layer drops 5% of its feed-forward network's output."""

    def make(build: Any) -> Any:
        def changed(*args: Any) -> Any:
            import torch

            trainer = build(*args)
            network = trainer.model.model.layers[0].mlp
            network.register_forward_hook(lambda self, _, out: torch.nn.functional.dropout(out, 0.05, self.training))
            return trainer

        return changed

    replaced("tunebook.train.run", "build_trainer", make)


def mean_of_passes() -> None:
    """A step's loss is the mean of its passes' means, not of its tokens."""

    def make(compute_loss: Any) -> Any:
        def changed(
            self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            own = (inputs["labels"] != -100).sum()
            return compute_loss(self, model, inputs, return_outputs, own) / self.current_gradient_accumulation_steps

        return changed

    replaced("tunebook.train.methods.sft:RecipeTrainer", "compute_loss", make)


def chat_template() -> None:
    """The chat template that comes with the model ends a turn with two line breaks."""

    def make(load: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            tokenizer = load(*args, **kwargs)
            tokenizer.chat_template = tokenizer.chat_template.replace("\\n", "\\n\\n")
            return tokenizer

        return changed

    replaced("tunebook.model.tokenizer", "load_tokenizer", make)


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    fault.__name__: (fault, overrides)
    for fault, overrides in (
        (learning_rate, ""), (slightly_higher_learning_rate, ""), (weight_decay, ""), (decayed_norms, ""), (warmup, ""),
        (beta2, ""), (no_clipping, ""), (data_seed, ""), (missing_document, ""), (prompt_token, ""),
        (leaking_rows, ""), (dropout, ""), (mean_of_passes, "packing.row_length=128"), (chat_template, ""),
    )
}  # fmt: skip


def in_child(log: Path, work: Callable[[], Any]) -> int:
    """Run a function in a forked process, whose output goes to a file; returns its exit code."""
    from forked import fork

    def logged() -> Any:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        return work()

    return os.waitstatus_to_exitcode(os.waitpid(fork(logged), 0)[1])


def train(outputs: Path, words: Sequence[str], instructions: str, plant: Callable[[], None] | None) -> None:
    """Train a recipe, in a process of its own."""
    from forked import run_command

    os.environ["MKL_CBWR"] = instructions
    os.environ["TUNEBOOK_CACHE"] = str(outputs / "cache")  # what a fault prepares is not another run's
    if plant is not None:
        plant()
    run_command(["tunebook", "train", *words, "evaluation=none", f"outputs={outputs}"])


def verify(run: Path, evidence: Path) -> None:
    """Compare a run with the evidence, in a process of its own."""
    from forked import run_command

    run_command(["tunebook", "verify", str(run), "--against", str(evidence), "--json"])


def judged(log: Path, exit_code: int) -> Line:
    """What `tunebook verify` said."""
    text = log.read_text()
    if exit_code not in (0, 5):
        return {"said": " ".join(text.split())}
    rows = json.loads(text[text.index("{") :])["rows"]
    return {"rows": [row for row in rows if row["name"] == "loss" or row["verdict"] == "DIFFERENT"]}


def loss_curve_differences(run: Path, recorded: Path) -> list[float]:
    """How far each of 20 windows of a run's losses is from a recorded run's, relative."""
    from tunebook.evidence.gather import read_finished
    from tunebook.evidence.tolerances import loss_differences

    found = loss_differences(*(read_finished(folder).results.losses for folder in (run, recorded)))
    return [float(f"{difference:.2g}") for difference in found]


def run_all(chosen: argparse.Namespace, words: Sequence[str], folder: Path) -> None:
    """Train and record the evidence, then train and compare each run."""
    from tunebook.commands.verify import evidence_of
    from tunebook.evidence.gather import read_finished
    from tunebook.evidence.schema import write_evidence

    def trained(name: str, instructions: str, overrides: str, plant: Callable[[], None] | None = None) -> Path:
        outputs = folder / name
        run = outputs / str(words[0]) / "latest"
        if not run.exists():
            outputs.mkdir(parents=True)
            work = partial(train, outputs, [*words, *overrides.split()], instructions, plant)
            if code := in_child(outputs / "train.log", work):
                raise SystemExit(f"{name} ended with {code}: {outputs / 'train.log'}")
        return run.resolve()

    recorded = [trained(name, *how) for name, how in EVIDENCE.items()]
    facts = [read_finished(run) for run in recorded]
    evidence = write_evidence(evidence_of(facts, "faults", []), Path(tempfile.mkdtemp(dir=folder)))
    for name in chosen.only:
        plant, overrides = FAULTS.get(name, (None, ""))
        instructions, overrides = CLEAN.get(name, ("AUTO", overrides))
        run = trained(name, instructions, overrides, plant)
        code = in_child(folder / name / "verify.log", partial(verify, run, evidence))
        what = plant.__doc__ if plant is not None else overrides or f"MKL_CBWR={instructions}"
        line = {"name": name, "is_fault": plant is not None, "what": what, "words": [*words], "exit_code": code}
        line |= judged(folder / name / "verify.log", code)
        line |= {"windows": loss_curve_differences(run, recorded[0])}
        add_line(line | surroundings(), chosen.output)


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, import the libraries and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, which is added to")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where the run folders are kept; left out: a temporary one")
    parser.add_argument("--only", nargs="+", default=[*CLEAN, *FAULTS], choices=[*CLEAN, *FAULTS], metavar="NAME")
    chosen, overrides = parser.parse_known_args(arguments)
    sys.path.insert(0, str(ROOT / "tests" / "system"))
    for module in ("tunebook.commands.train", "tunebook.train.run", "tunebook.plan.draft", "tunebook.record.report"):
        import_module(module)
    with tempfile.TemporaryDirectory() as temporary:
        machine = [] if any(word.startswith("hardware=") for word in overrides) else ["hardware=cpu"]
        words = [chosen.recipe, *machine, f"training.max_steps={chosen.steps}", *overrides]
        run_all(chosen, words, (chosen.folder or Path(temporary)).resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
