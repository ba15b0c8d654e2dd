"""The commands about runs that were made, and about the book: list, init and explain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from tunebook.cli.options import Outputs, RecipesDir, Words, make_console, split
from tunebook.terminal import outlive_readers, print_text

records_app = typer.Typer()


def _typed_or_newest(runs: list[str] | None, outputs: Path) -> list[str]:
    """The runs that were typed, or the newest one, which is then printed."""
    from tunebook.record.run_folder import LATEST, resolve_run

    if runs:
        return runs
    newest = resolve_run(LATEST, outputs)
    print(f"the newest run: {newest}", file=sys.stderr)
    return [str(newest)]


@records_app.command()
def report(
    run: Annotated[
        str | None, typer.Argument(help="A run folder, or a recipe for its newest run; if unset, the newest run.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The HTML file to write.")] = None,
    outputs: Outputs = Path("outputs"),
) -> None:
    """Write one self-contained HTML page about a run."""
    from tunebook.record.report import write_report
    from tunebook.record.run_folder import resolve_run

    (typed,) = _typed_or_newest([run] if run else None, outputs)
    folder = resolve_run(typed, outputs)
    file = output or folder / "report.html"
    write_report(folder, file)
    print_text(f"written: {file}", make_console())


@records_app.command()
def verify(
    runs: Annotated[
        list[str] | None, typer.Argument(help="A run folder, or a recipe for its newest run; if unset, the newest run.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record evidence from two or more runs of the same recipe.")
    ] = False,
    label: Annotated[str | None, typer.Option("--label", help="With --record: the end of the file's name.")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", exists=True, dir_okay=False, help="One evidence file to compare with.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="METRIC<=VALUE[@STEPS]",
            help="A value to reach, quoted: 'loss<=2.1', 'validation_loss<=2.1@200' or 'TASK:METRIC>=0.7'. With "
            "--record every run must reach it and it is recorded; without, it replaces the recorded one.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    outputs: Outputs = Path("outputs"),
    recipes_dir: RecipesDir = None,
) -> None:
    """Compare a run with the recorded evidence of its recipe; exit 5 where it differs."""
    from tunebook.commands.verify import verify_command

    code = verify_command(
        _typed_or_newest(runs, outputs),
        outputs,
        recipes_dir or [],
        make_console(),
        record=record,
        label=label,
        against=against,
        target=target,
        as_json=as_json,
    )
    raise typer.Exit(code)


@records_app.command()
def reproduce(
    run: Annotated[str, typer.Argument(help="A run folder, a recipe (its newest run), or an evidence file.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what is different here; data is not read.")
    ] = False,
    outputs: Outputs = Path("outputs"),
    recipes_dir: RecipesDir = None,
) -> None:
    """Train again what a run or evidence says, after saying what is different here; exit 5 if the results differ."""
    from tunebook.commands.reproduce import reproduce_command

    outlive_readers()
    raise typer.Exit(reproduce_command(run, outputs, recipes_dir or [], make_console(), dry_run=dry_run))


@records_app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a recipe for its newest run.")],
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare it with.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    outputs: Outputs = Path("outputs"),
) -> None:
    """Show the settings and records that differ between two runs, and compare their results."""
    from tunebook.commands.diff import diff_command

    raise typer.Exit(diff_command((one, other), outputs, make_console(), as_json=as_json))


@records_app.command()
def export(
    run: Annotated[
        str | None, typer.Argument(help="A run folder, or a recipe for its newest run; if unset, the newest run.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="STEP",
            help="The checkpoint of this step; if unset, the trained model or the newest checkpoint.",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="The folder to make; if unset, exports/<name> in the run folder.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base model.")] = False,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(
            "--dtype", help="Number format of the weights; if unset, the base model's, or that of the adapter."
        ),
    ] = None,
    outputs: Outputs = Path("outputs"),
) -> None:
    """Write one plain Hugging Face folder from a run's model or any of its checkpoints, and check it. Needs no GPU."""
    console = make_console()
    (typed,) = _typed_or_newest([run] if run else None, outputs)
    with console.status(Text("loading libraries")):
        from tunebook.checkpoint.export.run import export_run

    export_run(
        typed,
        outputs,
        lambda line: print_text(line, console),
        checkpoint=checkpoint,
        to=to,
        merge=merge,
        dtype=dtype,
    )


@records_app.command(name="list")
def list_recipes(recipes_dir: RecipesDir = None) -> None:
    """List the recipes: title, strategy, reference hardware, evidence."""
    from tunebook.commands.list import recipes_table

    make_console().print(recipes_table(recipes_dir or []))


@records_app.command()
def init(
    name: Annotated[str | None, typer.Argument(help="The new recipe's name.")] = None,
    words: Words = None,
    recipes_dir: RecipesDir = None,
) -> None:
    """Write what you would train as a recipe of your own, to my_recipes or --recipes-dir; asks if nothing is typed."""
    from tunebook.commands.init import init_command

    if name is None and sys.stdin.isatty():
        name = typer.prompt("Name of the recipe")
        data, model = typer.prompt("Data (a file, a folder or a glob)"), typer.prompt("Model (ORG/NAME or a folder)")
        words = [data, f"model={model}"]
    base, overrides = split(words, recipes_dir)
    init_command(name, base, overrides, recipes_dir or [], make_console())


@records_app.command()
def explain(
    id: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A setting, a group, a choice or a rule (`all` lists groups and rules), or another tool's name.",
        ),
    ],
) -> None:
    """Say what a setting means, what a rule refuses and why, or what a key of another tool is here."""
    from tunebook.commands.explain import explain as text_of

    print_text(text_of(id), make_console())
