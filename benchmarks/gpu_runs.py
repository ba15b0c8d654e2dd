"""Run recorded configurations again on a GPU machine, or new ones: one JSON line for each run.

    python benchmarks/gpu_runs.py FILE ... --output DIR [--gpus 2] [--series NAME ...] [--only NAME ...] [--list]
    python benchmarks/gpu_runs.py benchmarks/results/h200_memory.jsonl --output DIR --only 05b_2048
    python benchmarks/gpu_runs.py recipes/zero3_lora/evidence/hopper-2-random_weights.json --output DIR --repeats 2

A FILE has one configuration per line: `name`, `overrides` and, where needed, `recipe`, `series`, `gpus`, `model` (see
`gpu_models.py`), `layers`, `kind`, `resolved` (what `auto` had decided). Results are such files, and so is what
`gpu_draw.py` writes. A JSON file of a recipe's evidence is one configuration; record its repetitions with
`tunebook verify RUN RUN --record`. More keys: `timeout_s`, `warm_up_steps`; `against`, the run of its series that its
losses are compared with, else `single`; `unsaved`, to write no model; `images`, to write the model with a processor
(`gpu_image_models.py`).

Runs get ready together and are timed alone (`gpu_queue.py`). OUTPUT/results.jsonl holds for each what its plan says
(`planned_gib`, `planned_tokens_per_second`; before its data is known if it did not start) and what was measured;
`verdict` is `ok`, `refused` with the rules that refuse it, or `failed` with the reason. `--profile NAME` and
`--memory NAME` add a trace of one step (`gpu_turns/traces.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from gpu_models import model_words
from gpu_queue import WARM_UP_STEPS, GpuQueue, Job, require_gpus
from lines import Line, largest_difference, read_lines, write_lines

from tunebook.plan.draft import draft_run

_TRAIN = [sys.executable, "-m", "tunebook", "train"]
_BESIDE_TENSORS_GIB = 1.5  # of a GPU: CUDA's context and the libraries' own
PATIENT = "launcher.timeout_s=7200"  # ranks that are ready wait for their turn before they meet
_COPIED = ("series", "recipe", "overrides", "model", "images", "kind", "mode", "sizes", "layers", "accumulation",
           "seed", "weights", "data", "against", "unsaved", "warm_up_steps", "planned_then_gib",
           "planned_then_tokens_per_second")  # fmt: skip


def read_cases(files: list[Path]) -> Iterator[Line]:
    """The configurations of all files; of several with one name and series, the last.

    Lines without overrides are left out: other scripts measured them.
    """
    found: dict[tuple[str, str], Line] = {}
    for file in files:
        for line in [_evidence_case(file)] if file.suffix == ".json" else read_lines(file):
            if "overrides" in line and line.get("device") != "cpu":
                found[line.get("series", ""), line["name"]] = line
    yield from found.values()


def _evidence_case(file: Path) -> Line:
    evidence = json.loads(file.read_text())
    ran, gpus = evidence["ran"], evidence["hardware"]["gpus"]
    line = {key: ran[key] for key in ("recipe", "overrides", "weights", "data", "layers")}
    return line | {"name": f"{ran['recipe']}_{gpus}", "series": "evidence", "gpus": gpus}


def words_of(case: Line, models: Path, *, more: list[str] | None = None, has_weights: bool = False) -> list[str]:
    """The words after `tunebook train`; the last word for a key counts. Writes the model below `models`."""
    model = model_words(case, models, has_weights=has_weights)
    words = [*case["overrides"], *model, *case.get("resolved", ()), *(more or ())]
    last = {word.partition("=")[0]: word for word in words}
    return [*([case["recipe"]] if case.get("recipe") else []), *last.values()]


def planned(words: list[str]) -> Line:
    """Today's plan: peak memory in GiB, parameters and speed, or the rules that refuse the run."""
    recipe, overrides = (None, words) if "=" in words[0] else (words[0], words[1:])
    draft = draft_run(recipe, overrides, [])
    if draft.error is not None:
        return {"refused": [{"id": draft.error.problem_id or "", "message": str(draft.error)}]}
    if refused := [{"id": each.id, "message": each.message} for each in draft.problems if each.is_error]:
        return {"refused": refused}
    if draft.fits is False:
        return {"refused": [{"id": "does-not-fit", "message": draft.memory.verdict if draft.memory else ""}]}
    facts, peak_gib = draft.config.model.facts, draft.memory.allocated if draft.memory else None
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    found = {"planned_gib": round(peak_gib or 0, 3), "num_parameters": facts.num_parameters if facts else 0}
    return found | ({"planned_tokens_per_second": round(speed)} if speed else {})


def jobs_of(cases: list[Line], asked: argparse.Namespace) -> tuple[list[Job], list[Line]]:
    """The cases that may start, as jobs, and a line for each that the rules refuse or that lacks GPUs."""
    places = {size: cycle(range(0, asked.gpus - size + 1, size)) for size in range(1, asked.gpus + 1)}
    jobs: list[Job] = []
    refused: list[Line] = []
    for case in cases:
        gpus = case.get("gpus", 1)
        line = {"name": case["name"], "gpus": gpus} | {key: case[key] for key in _COPIED if key in case}
        if gpus > asked.gpus:
            refused.append(line | {"verdict": "refused", "refused": [{"id": "", "message": f"{gpus} GPUs are needed"}]})
            continue
        more = [*asked.more, *([PATIENT] if gpus > 1 else [])]
        words = words_of(case, asked.models, more=more, has_weights=not asked.list)
        plan = {} if asked.list else planned(words)
        if "refused" in plan:
            refused.append(line | plan | {"verdict": "refused"})
            continue
        for number in range(asked.repeats):
            first = next(places[gpus])
            name = f"{case['series']}-{case['name']}".replace(" ", "_") if "series" in case else case["name"]
            name += f"-{number + 1}" if asked.repeats > 1 else ""
            jobs.append(
                Job(
                    name=name, gpus=tuple(range(first, first + gpus)), line=line | plan,
                    command=[*_TRAIN, *words, "--run-folder", str(asked.runs / name)],
                    gpu_gib=_BESIDE_TENSORS_GIB + 1.05 * plan.get("planned_gib", 0),
                    host_gib=gpus * 4 * plan.get("num_parameters", 0) / 2**30,
                    timeout_s=case.get("timeout_s", asked.timeout_s),
                    warm_up_steps=case.get("warm_up_steps", WARM_UP_STEPS),
                    environment=_environment(case, name, asked),
                )
            )  # fmt: skip
    return jobs, refused


def _environment(case: Line, name: str, asked: argparse.Namespace) -> dict[str, str]:
    """The number of threads, and the settings of `gpu_turns` for the ranks of a run."""
    found = {"OMP_NUM_THREADS": str(asked.threads)}
    if case.get("unsaved"):
        found["TUNEBOOK_BENCH_UNSAVED"] = "1"
    for what, names in (("PROFILE", asked.profile), ("MEMORY", asked.memory)):
        if case["name"] in names:
            found[f"TUNEBOOK_BENCH_{what}"] = str(asked.output.resolve() / name)
    return found


def verdict(line: Line) -> str:
    """`ok` for a run that ended well with finite losses that fell; else `failed` with the reason."""
    losses = line.get("losses") or []
    if line["exit_code"] != 0:
        return f"failed: exit code {line['exit_code']}"
    if not losses or not all(map(math.isfinite, losses)):
        return f"failed: {sum(map(math.isfinite, losses))} of {len(losses)} losses are finite"
    if len(losses) >= 6 and sum(losses[-3:]) >= sum(losses[:3]):
        return f"failed: the loss did not fall ({losses[0]:.4f} to {losses[-1]:.4f})"
    return "ok"


def compare_series(lines: list[Line]) -> None:
    """Add to each line of a series how far its losses are from those of `against`, the series' run on one GPU."""
    references = {(line.get("series"), line["name"]): line.get("losses") for line in lines}
    for line in lines:
        name = line.get("against", "single")
        reference = references.get((line.get("series"), name))
        if reference and line.get("losses"):
            steps = min(len(reference), len(line["losses"]))
            difference = largest_difference(line["losses"][:steps], reference[:steps])
            line |= {"compared_with": name, "largest_difference": difference}


def run_parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--gpus", type=int, default=1, help="of the machine")
    parser.add_argument("--series", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only runs with these names")
    parser.add_argument("--more", nargs="*", default=[], metavar="WORD", help="overrides for every run")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=150, help="of one run on its GPUs")
    parser.add_argument("--deadline-s", type=float, default=500, help="of planning and all runs")
    parser.add_argument("--max-ranks", type=int, help="started at a time, 4 for each GPU if not given")
    parser.add_argument("--max-gpu-gib", type=float, default=134, help="planned by runs that share a GPU")
    parser.add_argument("--max-host-gib", type=float, default=120, help="of weights of runs that have not trained yet")
    parser.add_argument("--threads", type=int, default=8, help="of a rank; an optimizer on the host takes 16")
    parser.add_argument("--profile", nargs="*", default=[], metavar="NAME", help="trace the kernels of one step")
    parser.add_argument("--memory", nargs="*", default=[], metavar="NAME", help="trace the memory of the third step")
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"), help="where models are written")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/runs"), help="where run folders are made")
    return parser


def main(words: list[str] | None = None) -> int:
    """Run the cases. Exit code 1 where one failed or its time was up."""
    asked = run_parser().parse_args(words)
    started = time.monotonic()
    cases = [
        case
        for case in read_cases(asked.files)
        if (not asked.series or case.get("series") in asked.series) and (not asked.only or case["name"] in asked.only)
    ]
    if not asked.list:
        require_gpus(asked.gpus)
    jobs, refused = jobs_of(cases, asked)
    if asked.list:
        print("\n".join(json.dumps([job.name, job.gpus, *job.command]) for job in jobs))
        return 0
    lines = GpuQueue(
        jobs, asked.output, runs=asked.runs, deadline_s=started + asked.deadline_s - time.monotonic(),
        max_ranks=asked.max_ranks or 4 * asked.gpus, max_gpu_gib=asked.max_gpu_gib, max_host_gib=asked.max_host_gib,
    ).run()  # fmt: skip
    compare_series(lines)
    for line in lines:
        line["verdict"] = verdict(line)
    for line in refused:
        print(json.dumps(line))
    write_lines(asked.output / "results.jsonl", [*lines, *refused])  # again, with the verdicts
    return int(len(lines) < len(jobs) or any(line["verdict"] != "ok" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
