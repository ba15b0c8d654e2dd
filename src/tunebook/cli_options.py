"""The arguments and options of the command line that several commands share or that take many words to explain."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, then Hydra overrides.")
]
RecipesDir = Annotated[
    list[Path] | None,
    typer.Option("--recipes-dir", help="A folder with recipes of your own; may be given again. Also TUNEBOOK_RECIPES."),
]
RunFolder = Annotated[
    Path | None, typer.Option("--run-folder", help="Make the run here instead of in outputs/<recipe>/<time>.")
]
Outputs = Annotated[Path, typer.Option("--outputs", help="The folder that holds the run folders.")]

# Of an evaluation.
NumFewshot = Annotated[
    int | None, typer.Option("--num-fewshot", help="Examples before each item; if unset, the task's own.")
]
BatchSize = Annotated[
    str | None,
    typer.Option("--batch-size", help="Requests computed at once, or auto: the most that the memory takes."),
]
AllowMismatch = Annotated[
    str,
    typer.Option(
        "--allow-mismatch",
        help="What may differ from the training: template, tokenizer, system_prompt, base, with commas; recorded.",
    ),
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="That share the requests; if unset, one for each GPU.")
]
UnsafeCode = Annotated[
    bool,
    typer.Option("--confirm_run_unsafe_code", help="Run programs that a model wrote without a sandbox; recorded."),
]


# Of an export.
class ExportFormat(StrEnum):
    """The number formats that weights can be exported in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


# Of a sweep.
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="basic: one trial after the other; joblib: several at a time on this machine, each on GPUs or cores of "
        "its own; slurm: each a Slurm job, with the keys launcher.partition=... of launcher=slurm.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        help="Trials at a time; if unset, as many as fit, in Slurm 8. GPUs are divided evenly among them where "
        "parallelism and hardware.gpus_per_node are left open.",
    ),
]
Search = Annotated[
    str | None,
    typer.Option(
        "--search",
        help="optuna: let it choose from key=interval(1e-6,1e-4), tag(log,interval(...)), int(interval(1,8)), "
        "range(8,65,8) or a,b,c.",
    ),
]
NumTrials = Annotated[int | None, typer.Option("--num-trials", help="How many trials a search takes.")]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="What counts: evaluation_score, validation_loss, final_loss, tokens_per_second_per_gpu or seconds; if "
        "unset, the first of these that the trials measure.",
    ),
]
Direction = Annotated[
    str | None, typer.Option("--direction", help="minimize or maximize, where the metric does not say it.")
]
SearchSeed = Annotated[int | None, typer.Option("--seed", help="Of a search's proposals; if unset, 0.")]
Prune = Annotated[
    int | None,
    typer.Option(
        "--prune", help="End trials of a search that, from this step on, are worse than the median of 5 or more."
    ),
]
