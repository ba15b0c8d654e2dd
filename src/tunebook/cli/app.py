"""The `tunebook` command: one function per command, one line of help each. Torch is imported where a command needs it.

`tunebook COMMAND [RECIPE] [DATA] [key=value ...]`. Exit codes are those of `tunebook.errors`; an error that Tunebook
raises on purpose is printed without a traceback.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from tunebook import __version__
from tunebook.cli.options import (
    Outputs,
    RecipesDir,
    RunFolder,
    Words,
    make_console,
    settings,
    split,
    task_names,
)
from tunebook.cli.records import records_app
from tunebook.config.unsafe_text import shown, without_secrets
from tunebook.errors import DoesNotFitError, RequestError, StoppedError, TunebookError, did_you_mean
from tunebook.hardware.disk import is_disk_full
from tunebook.processes import stop_when_input_ends
from tunebook.terminal import outlive_readers
from tunebook.train.other_launchers import refuse_inside_launcher

app = typer.Typer(
    name="tunebook",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_SETTING = re.compile(r"(run|model)=|[\w.]+=\S*$")  # among the words of a chat, where others are a question
_NO_COMMAND = re.compile(r"No such command '([^']+)'")  # of Typer, which suggests `sweep` for `serve`
_TYPER_INTERRUPTED = 130  # what typer makes of a KeyboardInterrupt, which it does not let through


def _print_version(is_typed: bool) -> None:
    if is_typed:
        print(f"tunebook {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A reproducible book of recipes for distributed fine-tuning of language models."""


@app.command()
def train(
    words: Words = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after printing plan and launch command.")] = False,
    run_folder: RunFolder = None,
    recipes_dir: RecipesDir = None,
) -> None:
    """Train a recipe, or your model on your data: compose, check, plan, prepare, launch, evaluate, report."""
    from tunebook.commands.job import plan_job
    from tunebook.processes import EarlyStart
    from tunebook.record.start_up import StartClock, process_begun

    clock = StartClock(process_begun())
    clock.passed("start_python")

    recipe, overrides = split(words, recipes_dir)
    console = make_console()
    if dry_run:
        from tunebook.commands.plan import plan_command

        raise typer.Exit(plan_command(recipe, overrides, recipes_dir or [], console, folder=run_folder))
    outlive_readers()
    with EarlyStart() as early:
        job = plan_job(recipe, overrides, recipes_dir or [], early)
        from tunebook.commands.train import run_job  # while the rank starts

        clock.passed("plan")
        code = run_job(job, console, folder=run_folder, clock=clock, early=early)
    raise typer.Exit(code)


@app.command()
def plan(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, also for an error.")] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the resolved configuration.")] = False,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Memory and speed by the values of a key, as a table.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Train two steps here and plan by what they took, now and later."),
    ] = False,
    longest: Annotated[
        bool, typer.Option("--longest", help="Print the longest row that fits, by estimate, instead of the plan.")
    ] = False,
    reasons: Annotated[bool, typer.Option("--all", help="Print the reasons for choices and time, too.")] = False,
    recipes_dir: RecipesDir = None,
) -> None:
    """Show whether a recipe fits, its batch, time, memory, choices and launch command. No GPU, no download."""
    from tunebook.commands.plan import plan_command

    recipe, overrides = split(words, recipes_dir)
    typed = {"--compare": bool(compare), "--yaml": as_yaml, "--json": as_json, "--measure": measure}
    options = [option for option, is_typed in (typed | {"--longest": longest}).items() if is_typed]
    if len(options) > 1 and (compare or as_yaml):
        raise RequestError(f"{' and '.join(options)} print different things; type one of them", problem_id="plan-form")
    if compare:
        from tunebook.plan.alternatives import compare_plans

        raise typer.Exit(compare_plans(recipe, overrides, recipes_dir or [], compare, make_console()))
    code = plan_command(
        recipe,
        overrides,
        recipes_dir or [],
        make_console(),
        as_json=as_json,
        as_yaml=as_yaml,
        is_measured=measure,
        is_longest=longest,
        with_reasons=reasons,
    )
    raise typer.Exit(code)


@app.command()
def doctor(outputs: Outputs = Path("outputs")) -> None:
    """Look at GPUs, driver, image, torch, links, NCCL, shared memory and disks; each with its fix."""
    from tunebook.commands.doctor import doctor_command

    raise typer.Exit(doctor_command(outputs, make_console()))


@app.command()
def data(
    words: Words = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="How many documents to show.")] = 3,
    page: Annotated[
        Path | None, typer.Option("--page", help="Write the samples to this HTML file, with their images.")
    ] = None,
    recipes_dir: RecipesDir = None,
) -> None:
    """Prepare a recipe's data and show samples, what is trained on, lengths, and what was cut or dropped and why."""
    from tunebook.commands.data import show_data

    recipe, overrides = split(words, recipes_dir)
    show_data(recipe, overrides, recipes_dir or [], samples, make_console(), page)


@app.command(name="eval")
def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[run=RUN | model=MODEL] [suite=NAME | tasks=a,b]",
            help="A run or checkpoint; or a model's ORG/NAME, folder or name in the book; other tasks than its own.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items per task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Examples before each item; if unset, the task's own.")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option("--batch-size", help="Requests computed at once, or auto: the most that fits.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Processes that share the requests; if unset, one for each GPU."),
    ] = None,
    outputs: Outputs = Path("outputs"),
) -> None:
    """Evaluate the newest finished run, or run=DIR, run=RECIPE, model=FOLDER; with suite=leaderboard on other tasks.

    Tasks whose data is not here are named first; `tunebook fetch` brings it.
    """
    from tunebook.evaluate.command import EvaluationRequest, evaluate_command

    typed = settings(words, ("run", "model", "suite", "tasks"))
    request = EvaluationRequest(
        run=typed.get("run"),
        model=typed.get("model"),
        suite=typed.get("suite"),
        tasks=task_names(typed),
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        processes=processes,
    )
    outlive_readers()
    evaluate_command(request, outputs, make_console())


@app.command()
def fetch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]... [suite=NAME | tasks=a,b]",
            help="A recipe: its model, data and tasks. A suite or tasks: what they need.",
        ),
    ] = None,
    recipes_dir: RecipesDir = None,
) -> None:
    """Download what a recipe, a suite or tasks need (models, data sets, resources), to work without a network later."""
    from tunebook.evaluate.fetch import fetch_command

    keys = ("suite", "tasks")
    own = [word for word in words or [] if word.partition("=")[0] in keys]
    typed = settings(own, keys)
    recipe, overrides = split([word for word in words or [] if word not in own], recipes_dir)
    fetch_command(
        recipe, overrides, recipes_dir or [], make_console(), suite=typed.get("suite"), tasks=task_names(typed)
    )


@app.command()
def chat(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[run=RUN | model=MODEL] [QUESTION]",
            help="A run, a recipe, a checkpoint, a model folder or a model's name; a question to answer once. `run=` "
            "may be left out before the name of a run or recipe, and before a path.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="In place of the run's system prompt; '' for none.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", help="A file or URL of an image to show with the first question; again for more."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="The longest answer, in tokens.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0: always the likeliest token; 0.7 is usual for variety.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed for a temperature above 0.")] = 0,
    outputs: Outputs = Path("outputs"),
) -> None:
    """Talk to the newest finished run, or to run=DIR, run=RECIPE or a model, with its own chat template.

    With a question, or one that is piped in, it prints one answer and ends.
    """
    from tunebook.evaluate.chat import Sampling, chat_command
    from tunebook.evaluate.target import names_model
    from tunebook.record.run_folder import LATEST
    from tunebook.train.requirements import refuse_wrong_image

    typed = settings([word for word in words or [] if _SETTING.match(word)], ("run", "model"))
    text = [word for word in words or [] if not _SETTING.match(word)]
    if text and not typed and names_model(text[0], outputs):
        typed["run"] = text.pop(0)
    target = next(iter(typed.values()), LATEST)
    question = " ".join(text) if text else None
    refuse_wrong_image()
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    chat_command(
        target,
        outputs,
        question=question,
        is_model="model" in typed,
        system=system,
        sampling=sampling,
        images=image or (),
    )


@app.command()
def sweep(
    words: Words = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the trials and stop.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            help="Trials at a time; if unset, 1, in a Slurm job array 8. On this machine the GPUs are divided evenly.",
        ),
    ] = None,
    num_trials: Annotated[
        int | None,
        typer.Option(
            "--num-trials",
            min=1,
            help="Search with this many trials instead of all combinations, with Optuna: key=interval(1e-6,1e-4), "
            "tag(log,interval(...)), int(interval(1,8)), range(8,65,8) or a,b,c.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="What ranks the trials: evaluation_score, validation_loss, final_loss, tokens_per_second_per_gpu or "
            "seconds; with method=dpo also those of its validation, such as validation_reward_accuracy. If unset, the "
            "first of these that they measure.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**31 - 1, help="Random seed of a search; if unset, 0.")
    ] = None,
    prune: Annotated[
        int | None,
        typer.Option(
            "--prune", min=1, help="From this step on, end trials that are worse than the median of 5 or more."
        ),
    ] = None,
    recipes_dir: RecipesDir = None,
) -> None:
    """Train a recipe once per combination of values (key=1,2 key=a,b), or search for the best, and rank the results.

    After an interruption the same command continues: finished trials are kept, the others resume from their
    checkpoints. training.resume=never starts from the beginning.
    """
    from tunebook.commands.sweep import SweepOptions, sweep_command

    recipe, overrides = split(words, recipes_dir)
    options = SweepOptions(jobs=jobs, num_trials=num_trials, metric=metric, seed=seed, prune=prune)
    outlive_readers()
    code = sweep_command(recipe, overrides, recipes_dir or [], make_console(), options=options, dry_run=dry_run)
    raise typer.Exit(code)


app.add_typer(records_app)


def _interrupt_on_request() -> None:
    """Let SIGTERM and the end of the terminal end this process as Ctrl-C does, but not the workers that it forks."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the shell and the kernel both send it: not again, while this process ends
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, interrupt)
            os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))


def _end_with(error: TunebookError, errors: Console) -> NoReturn:
    from tunebook.plan.rules import RULES

    # Values are repeated as they were typed; a terminal must not obey what is in them, nor a log keep a token.
    message = without_secrets("\n".join(map(shown, error.message.split("\n"))))
    errors.print(Text(f"error: {message}", style="red"))
    if error.problem_id in {rule.id for rule in RULES}:
        errors.print(Text(f"more: tunebook explain {error.problem_id}"))
    sys.exit(error.exit_code)


def _usage_error(error: Any) -> RequestError:
    """An error of Typer about the words of a command, in our style."""
    from tunebook.config.foreign import instead_of
    from tunebook.config.schema import GROUPS

    typed = (*GROUPS, "outputs")
    message = error.format_message().rstrip(".")
    unknown = _NO_COMMAND.match(message)
    if hasattr(error, "possibilities"):  # an unknown option
        setting = error.option_name.lstrip("-").replace("-", "_")
        instead = f"it is typed without dashes: {setting}=VALUE" if setting in typed else instead_of(setting)
        hint = did_you_mean(error.option_name, error.possibilities or []) if not instead else ""
        instead = instead or "a setting is typed without dashes, such as training.seed=1"
        message = f"there is no option '{error.option_name}'{f'.{hint}' if hint else f'; {instead}'}"
    elif unknown and (instead := instead_of(unknown[1].replace("-", "_"), missing=unknown[0])):
        message = instead
    elif error.ctx is not None and "Did you mean" not in message:
        message += f". Help: {error.ctx.command_path} --help"
    return RequestError(message[:1].lower() + message[1:], problem_id="usage")


def main() -> None:
    """Run the command line and end with the exit code of what happened."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    _interrupt_on_request()
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not kill Python's own end
    stop_when_input_ends()
    gc.set_threshold(20_000)  # imports make many objects and no garbage: those of torch take a quarter less time so
    try:
        refuse_inside_launcher(sys.argv[1:], os.environ)
        # The name decides which variable a shell asks for completions by; `python -m tunebook` has another.
        code = app(standalone_mode=False, prog_name="tunebook")
    except TunebookError as error:
        _end_with(error, errors)
    except typer.Abort:
        sys.exit(StoppedError.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and is_disk_full(error):
            errors.print(Text(f"error: no space is left to write: {error}", style="red"))
            sys.exit(DoesNotFitError.exit_code)
        if not hasattr(error, "format_message"):  # a usage error of Typer has it
            raise
        if error.format_message():
            _end_with(_usage_error(error), errors)
        sys.exit(RequestError.exit_code)  # of `tunebook` alone, which has printed its help
    if code == _TYPER_INTERRUPTED:
        errors.print(Text("interrupted", style="red"))
        sys.exit(StoppedError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
