"""What can go wrong while a model answers the tasks of an evaluation."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

ANSWERING: dict[str, Explanation] = {
    "evaluation-incomplete": Explanation(
        summary="Some tasks of an evaluation failed; the others were evaluated.",
        why="A task that fails does not take the others with it: their results are written, and each of them is kept.",
        advice="Correct what the message says, and type the command that it names: only what failed is evaluated. A "
        "task that cannot run here is left out with tasks=a,b.",
    ),
    "evaluation-helper": Explanation(
        summary="One of the processes that share the requests of an evaluation failed or died.",
        why="Each has a copy of the model on a GPU of its own; one that is killed is mostly the system's doing, which "
        "ran out of memory. The task it worked on cannot be scored.",
        advice="Type the same command again (a training without training.resume=never), which goes on with the tasks "
        "that are not finished; with fewer processes where the host's memory is too small for all copies: "
        "--processes 1.",
    ),
    "batch-does-not-fit": Explanation(
        summary="The requests of one batch do not fit into the memory beside the model.",
        why="Activations, the cache of keys and values and the logits grow with the number of requests that are "
        "computed at once, and with their length.",
        advice="--batch-size auto finds the largest that fits; the scores do not depend on it. Where a single request "
        "does not fit, more GPUs or shorter prompts help: --num-fewshot 0.",
    ),
    "batch-size": Explanation(
        summary="The batch size of an evaluation is neither a count nor auto.",
        why="It is how many requests are computed at once.",
        advice="Type --batch-size 16, or --batch-size auto; in a configuration, evaluation.batch_size=16 or null.",
    ),
    "score-not-finite": Explanation(
        summary="The score of a task is not a finite number.",
        why="The model's logits hold infinities or no numbers at all: the training diverged, or the numbers are too "
        "large for the format that they are computed in.",
        advice="Look at the losses in the run's report; evaluate an earlier checkpoint, or compute in bf16 or fp32.",
    ),
    "more-processes-than-gpus": Explanation(
        summary="An evaluation was asked to use more processes than there are GPUs.",
        why="Each process needs a GPU of its own for its copy of the model.",
        advice="Leave --processes out for one on each GPU that is visible.",
    ),
}
