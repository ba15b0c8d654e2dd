"""Run recorded configurations again on a GPU machine, or new ones: one JSON line for each run.

    python tests/bench/gpu_runs.py FILE ... --output DIR [--gpus 2] [--series NAME ...] [--only NAME ...] [--list]
    python tests/bench/gpu_runs.py tests/bench/results/h200_memory.jsonl --output DIR --only 05b_2048
    python tests/bench/gpu_runs.py recipes/zero3_lora/evidence/hopper-2-random_weights.json --output DIR --repeats 2
    python tests/bench/gpu_runs.py tests/bench/cases/FILE --output DIR --plan tests/bench/cases/FILE

A FILE has one configuration per line: `name`, `overrides` and, where needed, `recipe`, `series`, `gpus`, `model` (see
`gpu_models.py`), `layers`, `kind`, `sizes`, `accumulation`, `resolved` (what `auto` had decided). Recorded results are
such files, and so is what `gpu_draw.py` writes. A line with `variant` measures speed: its words follow `SPEED`. A JSON
file of a recipe's evidence is one configuration; record its repetitions with `tunebook verify RUN RUN --record`.
A line with `script` is another program of this folder, with its arguments, which prints its own results. More keys:
`timeout_s`, `warm_up_steps`; `first_gpu`, where it runs if not on the next; `against`, the run of its series that its
losses are compared with; `allows`, ids of rules that are not checked, as what they refuse is measured; `unsaved`, to
write no model.

Each run has its GPUs to itself, except those whose plan is below `--shared-gib`. A line of the results holds what the
plan says today (`planned_gib`, `planned_tokens_per_second`), what was measured, and a verdict: `ok`, `refused` with the
rules that refuse it, or `failed` with the reason. In a series with a run called `single`, losses are compared with
those of that run. `--plan` writes the lines with what the plan says as `planned_then_gib`, before they run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from gpu_models import write_case_model
from gpu_queue import WARM_UP_STEPS, Job, add_arguments, require_gpus, run_jobs
from losses import compare_losses

from tunebook.plan.draft import draft_run

Line = dict[str, Any]

NVME = Path("/tmp/nvme")
PATIENT = "launcher.start_timeout_s=7200"  # ranks that are ready wait for their turn before they meet
# Qwen2.5-3B on generated documents of lognormal(5.8, 0.9) tokens, all of which count; 32,768 tokens per GPU and step.
SPEED = [
    "model=qwen25_3b", "model.liger_kernel=true", "model.compile_layers=false", "model.weights=random",
    "dataset=synthetic", "dataset.train_on=everything", "training.max_length=4096", "training.global_samples=null",
    "evaluation=none", "optimizer.learning_rate=3e-5", "schedule.warmup_steps=3", "parallelism=single",
    "training.save_every_steps=null", "training.evaluate_every_steps=null", "training.log_every_steps=1",
]  # fmt: skip
TOKENS_PER_STEP, DOCUMENTS_PER_GPU = 32_768, 4000
# What `auto` chose before a date, so that older lines run as they ran.
DEFAULTS_THEN = (
    ("model.compile_layers", "false", "2026-11-22"),
    ("model.one_pass_head", "false", "2026-11-22"),
    ("precision.master_weights", "fp32", "2026-11-24"),
)
_COPIED = ("series", "recipe", "overrides", "variant", "script", "environment", "model", "kind", "mode", "way", "sizes",
           "layers", "layers_of_the_model", "accumulation", "seed", "weights", "data", "against", "allows", "unsaved",
           "warm_up_steps", "planned_then_gib", "planned_then_tokens_per_second")  # fmt: skip


def read_cases(files: list[Path]) -> Iterator[Line]:
    """The configurations of all files, as lines; of several with one name and series, the last.

    Lines without overrides or of a CPU are left out: other programs measured them.
    """
    found: dict[tuple[str, str], Line] = {}
    for file in files:
        for line in map(json.loads, [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()):
            if "ran" in line:
                ran, gpus = line["ran"], line["hardware"]["gpus"]
                line = {key: ran[key] for key in ("recipe", "overrides", "weights", "data", "layers")}
                line |= {"name": f"{ran['recipe']}_{gpus}", "series": "evidence", "gpus": gpus}
            if not {"overrides", "variant", "script"} & set(line) or line.get("device") == "cpu":
                continue
            found[(line.get("series", ""), line.setdefault("name", f"{line.get('kind')}_{line.get('way')}"))] = line
    yield from found.values()


def words_of(case: Line, folder: Path, *, more: list[str], has_weights: bool = True) -> list[str]:
    """The words after `tunebook train`; the last word for a key counts. Writes the model below `folder`."""
    if "script" in case:
        return list(case["script"])
    if "variant" in case:
        words = [*SPEED, f"training.global_tokens={TOKENS_PER_STEP * case['gpus']}",
                 f"training.max_steps={case.get('steps', 40)}", f"hardware.gpus_per_node={case['gpus']}",
                 f"dataset.synthetic.num_documents={DOCUMENTS_PER_GPU * case['gpus']}", *case["variant"]]  # fmt: skip
        recipe = "qwen3b_zero2"
    else:
        words, recipe = list(case["overrides"]), case.get("recipe") or ""
        if case.get("series") in ("quantised", "adapters"):
            recipe = "quickstart"
        words += write_case_model(case, folder, has_weights=has_weights)
    then = [f"{key}={value}" for key, value, since in DEFAULTS_THEN if case.get("date", since) < since]
    last = {word.split("=")[0]: word for word in [*then, *words, *case.get("resolved", ()), *more]}
    return [*([recipe] if recipe else []), *last.values()]


def planned(words: list[str], allows: Iterable[str] = ()) -> Line:
    """Today's plan: peak memory in GiB, parameters and speed, or the rules that refuse the run.

    Numbers are zero if the plan has none, as where one of the rules `allows` refuses the run.
    """
    recipe, overrides = (None, words) if "=" in words[0] else (words[0], words[1:])
    draft = draft_run(recipe, overrides, [])
    if draft.error is not None:
        return {"refused": [{"id": draft.error.problem_id or "", "message": str(draft.error)}]}
    broken = [each for each in draft.problems if each.is_error]
    if refused := [{"id": each.id, "message": each.message} for each in broken if each.id not in allows]:
        return {"refused": refused}
    if draft.fits is False and draft.error is None and not broken:
        return {"refused": [{"id": "does-not-fit", "message": draft.memory.verdict if draft.memory else ""}]}
    assert draft.resolution is not None
    facts, peak_gib = draft.resolution.config.model.facts, draft.memory.memory.allocated if draft.memory else None
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    found = {"planned_gib": round(peak_gib or 0, 3), "num_parameters": facts.num_parameters if facts else 0}
    return found | ({"planned_tokens_per_second": round(speed)} if speed else {})


def write_planned(cases: list[Line], file: Path, models: Path) -> None:
    """Write the cases, each with what the plan says of it before it runs."""
    lines = []
    for case in cases:
        if "script" not in case:
            plan = planned(words_of(case, models, more=[], has_weights=False), case.get("allows", ()))
            if "refused" in plan:
                sys.exit(f"{case['name']}: {plan['refused'][0]['message']}")
            case |= {"planned_then_gib": plan["planned_gib"] or None}
            case |= {"planned_then_tokens_per_second": plan.get("planned_tokens_per_second")}
        lines.append(json.dumps(case) + "\n")
    file.write_text("".join(lines))


def jobs_of(cases: list[Line], arguments: argparse.Namespace) -> tuple[list[Job], list[Line]]:
    """The cases that may start, as jobs, and a line for each that the rules refuse or that lacks GPUs."""
    places = {size: cycle(range(0, arguments.gpus - size + 1, size)) for size in range(1, arguments.gpus + 1)}
    jobs: list[Job] = []
    refused: list[Line] = []
    for case in cases:
        gpus = case.setdefault("gpus", 1)
        line = {"name": case["name"], "gpus": gpus} | {key: case[key] for key in _COPIED if key in case}
        if gpus > arguments.gpus:
            refused.append(line | {"verdict": "refused", "refused": [{"id": "", "message": f"{gpus} GPUs are needed"}]})
            continue
        more = [*arguments.more, *([PATIENT] if gpus > 1 else [])]
        words = words_of(case, arguments.models, more=more, has_weights=not arguments.list)
        plan: Line = {"planned_gib": 0.0, "num_parameters": 0}
        if not arguments.list and "script" not in case:
            plan = planned(words, case.get("allows", ()))
        if "refused" in plan:
            refused.append(line | plan | {"verdict": "refused"})
            continue
        for number in range(arguments.repeats):
            first = case["first_gpu"] if "first_gpu" in case else next(places[gpus])
            name = f"{case['series']}-{case['name']}".replace(" ", "_") if "series" in case else case["name"]
            name += f"-{number + 1}" if arguments.repeats > 1 else ""
            jobs.append(
                Job(
                    name=name, gpus=tuple(range(first, first + gpus)), words=words, line=line | plan,
                    priority=len(jobs), is_alone=not 0 < plan["planned_gib"] <= arguments.shared_gib,
                    host_gib=gpus * 4 * plan["num_parameters"] / 2**30, is_script="script" in case,
                    turn_timeout_s=case.get("timeout_s", arguments.timeout_s),
                    warm_up_steps=case.get("warm_up_steps", WARM_UP_STEPS),
                    needs="async_io" if any("zero3_nvme" in word for word in words) else None,
                    environment=environment_of(case, name, arguments),
                )
            )  # fmt: skip
    return jobs, refused


def environment_of(case: Line, name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """The number of threads, and the settings of `gpu_turns` for the ranks of a run."""
    found = {"OMP_NUM_THREADS": str(arguments.threads)} | case.get("environment", {})
    if case.get("series") in ("edge", "evidence"):
        found["TUNEBOOK_BENCH_KEEPS_GPUS"] = "1"
    if case["name"] in arguments.profile:
        found["TUNEBOOK_BENCH_PROFILE"] = str(arguments.output.resolve() / f"{name}.profile.json")
    if case["name"] in arguments.peak:
        found["TUNEBOOK_BENCH_PEAK"] = str(arguments.output.resolve() / f"{name}.peak.json")
    if case.get("unsaved"):
        found["TUNEBOOK_BENCH_UNSAVED"] = "1"
        # A strategy that holds the weights frees them when the run ends.
        if not any(word == "parallelism=single" for word in case["overrides"]):
            found["TUNEBOOK_BENCH_KEEPS_GPUS"] = "1"
    if case.get("allows"):
        found["TUNEBOOK_BENCH_ALLOWS"] = ",".join(case["allows"])
    if case.get("variant") or "script" in case:
        return found
    is_drawn = case["gpus"] == 1 and case.get("unsaved") and "parallelism=zero3" not in case["overrides"]
    return found | {f"TUNEBOOK_BENCH_WAITS_{'DRAWN' if is_drawn else 'EARLY'}": "1"}


def verdict(line: Line) -> str:
    """`ok` for a run that ended well with finite losses that fell; else `failed` with the reason."""
    losses = line.get("losses") or []
    if "script" in line and line["exit_code"] == 0:
        return line.get("verdict", "failed: no results")
    if line["exit_code"] != 0:
        return f"failed: exit code {line['exit_code']}"
    if not losses or not all(map(math.isfinite, losses)):
        return f"failed: {sum(map(math.isfinite, losses))} of {len(losses)} losses are finite"
    if len(losses) >= 6 and sum(losses[-3:]) >= sum(losses[:3]):
        return f"failed: the loss did not fall ({losses[0]:.4f} to {losses[-1]:.4f})"
    return "ok"


def compare_series(lines: list[Line]) -> None:
    """Add to each line of a series how far its losses are from those of the series' run on one GPU.

    A series on fewer GPUs (`fp32_fewer`) is compared with the run of the series that it completes.
    """
    references = {(line.get("series"), line["name"]): line.get("losses") for line in lines}
    for line in lines:
        series, name = line.get("series", "").removesuffix("_fewer"), line.get("against", "single")
        reference = references.get((series, name))
        if reference and line.get("losses"):
            found = compare_losses(line["losses"], reference[: len(line["losses"])])
            line |= {"compared_with": name, "largest_difference": found.largest, "at_step": found.at_step}


def start_building() -> dict[str, subprocess.Popen[bytes]]:
    """Compile DeepSpeed's reader of NVMe disks before the first run that needs it has its turn."""
    NVME.mkdir(exist_ok=True)
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
    return {"async_io": subprocess.Popen([sys.executable, "-c", build], stdout=subprocess.DEVNULL)}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    add_arguments(parser, deadline_s=500)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="write the lines with their plan, and run nothing")
    parser.add_argument("--gpus", type=int, default=1, help="of the machine")
    parser.add_argument("--series", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only runs with these names")
    parser.add_argument("--more", nargs="*", default=[], metavar="WORD", help="overrides for every run")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--shared-gib", type=float, default=0, help="of a plan: smaller runs share their GPUs")
    parser.add_argument("--timeout-s", type=float, default=150, help="of one run on its GPUs")
    parser.add_argument("--threads", type=int, default=8, help="of a rank; an optimizer on the host takes 16")
    parser.add_argument("--profile", nargs="*", default=[], metavar="NAME", help="record the kernels of one step")
    parser.add_argument("--peak", nargs="*", default=[], metavar="NAME", help="record what fills a GPU at its peak")
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"), help="where models are written")
    return parser.parse_args(words)


def main() -> int:
    """Run the cases. Exit code 1 where one failed or its time was up."""
    arguments = parse()
    cases = [
        case
        for case in read_cases(arguments.files)
        if (not arguments.series or case.get("series") in arguments.series)
        and (not arguments.only or case["name"] in arguments.only)
    ]
    if arguments.plan is not None:
        write_planned(cases, arguments.plan, arguments.models)
        return 0
    if not arguments.list:
        require_gpus(arguments.gpus)
    if not arguments.shared_gib:  # more runs that get ready would disturb those that are timed
        arguments.max_ranks = min(arguments.max_ranks, 2 * arguments.gpus)
    jobs, refused = jobs_of(cases, arguments)
    lines = run_jobs(jobs, arguments, start_building if any(job.needs for job in jobs) else dict)
    if arguments.list:
        return 0
    compare_series(lines)
    for line in lines:
        line["verdict"] = verdict(line)
    finished = {(line.get("series"), line["name"]) for line in lines}
    cut = [job.line for job in jobs if (job.line.get("series"), job.line["name"]) not in finished]
    lines += [*refused, *(line | {"verdict": "failed: the time was up"} for line in cut)]
    (arguments.output / "judged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(f"{line['name']:40} {line['verdict']:20} {line.get('largest_difference', '')}")
    return int(any(line["verdict"].startswith("failed") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
