"""The texts for errors of sweeps, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

SWEEPING: dict[str, Explanation] = {
    "sweep-form": Explanation(
        summary="The words of a sweep cannot be read, or would not do what they say.",
        why="Values to try are separated by commas: key=a,b. Hydra itself would accept a key that is given twice, a "
        "value that is listed twice, an order that changes each time, and launchers that this sweep does not use.",
        advice="Write it as the message shows.",
    ),
    "sweep-without-values": Explanation(
        summary="A sweep with nothing to vary.",
        why="At least one override needs several values, key=a,b, or for a search a range, key=interval(low,high).",
        advice="Add one, or use `tunebook train` for a single run.",
    ),
    "sweep-option": Explanation(
        summary="An option of `tunebook sweep` is wrong, or does not go with the others.",
        why="--launcher says what starts the trials, --jobs how many at a time; --search, --num-trials, --seed and "
        "--prune belong together. A trial must still be at work when its process is, or nobody would see how it ended.",
        advice="Type what the message names; `tunebook sweep --help` lists the choices.",
    ),
    "sweep-jobs": Explanation(
        summary="More trials at a time than this machine has GPUs or cores for.",
        why="GPUs, and on a CPU cores, are divided among the trials and never shared: two trials on one GPU would take "
        "each other's memory and time, and their speeds would mean nothing.",
        advice="Lower --jobs, or give each trial fewer: hardware.gpus_per_node=1. Without --jobs as many run as fit. "
        "With parallelism=auto and no hardware.gpus_per_node the GPUs are divided evenly among --jobs trials.",
    ),
    "sweep-range": Explanation(
        summary="A range that a search cannot choose from.",
        why="interval(low,high) and range(start,stop,step) go up, and tag(log,...) is for intervals above 0: it "
        "spreads the trials evenly over the magnitudes, as learning rates want it.",
        advice="Write it as the message shows.",
    ),
    "sweep-metric": Explanation(
        summary="The metric of a sweep is not one that its trials measure.",
        why="evaluation_score needs an evaluation after the training, validation_loss a validation part; without them "
        "every trial would count as failed. Whether a task's score is better low is known once it has been evaluated.",
        advice="Choose a metric that the message lists, or add what measures it.",
    ),
    "sweep-package": Explanation(
        summary="A package that this kind of sweep needs is not installed.",
        why="The locks hold it; this environment was made in another way.",
        advice="Install it as the message says, or run `make setup`.",
    ),
    "sweep-is-running": Explanation(
        summary="Another process is at work on the same sweep.",
        why="The same command goes on with an interrupted sweep in its folder; two at once would run its trials twice.",
        advice="Wait for it or stop it; training.resume=never starts another sweep in a folder of its own.",
    ),
}
