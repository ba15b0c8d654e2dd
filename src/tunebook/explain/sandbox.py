"""The texts for errors of the sandbox, in which programs that a model wrote are executed, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

SANDBOX: dict[str, Explanation] = {
    "sandbox-missing": Explanation(
        summary="There is no sandbox to execute a model's programs in.",
        why="They could read your files and tokens, use the network, or take the machine's memory. They run in the "
        "`sandbox` service, or under bubblewrap where there is no Docker.",
        advice="`docker compose up -d --build sandbox`, or `apt install bubblewrap`. --confirm_run_unsafe_code, in a "
        "training evaluation.confirm_run_unsafe_code=true, runs them with limits on time and memory alone, and is "
        "recorded with the scores.",
    ),
    "sandbox-dead": Explanation(
        summary="The sandbox stopped working during an evaluation.",
        why="Its runner says every second that it is alive, and did not any more, or judged nothing for a long time.",
        advice="`docker compose logs sandbox` shows why; start it again and evaluate again.",
    ),
    "sandbox-version": Explanation(
        summary="The sandbox was built from other sources than those that evaluate.",
        why="How a program is judged may have changed in between, and the score would mean something else.",
        advice="Build it anew: `docker compose up -d --build sandbox`.",
    ),
    "sandbox-damaged": Explanation(
        summary="A file in the hand-over folder is not what the sandbox's runner writes.",
        why="It writes each file in one step, so something else wrote there.",
        advice="Give the folder to the sandbox alone, and evaluate again.",
    ),
    "sandbox-handover": Explanation(
        summary="The hand-over folder of the sandbox cannot be written to.",
        why="Programs go to the sandbox through it. It is open to one group only, so that no program can forge a "
        "result.",
        advice="`docker compose run --rm eval` has that group; elsewhere the user who evaluates must be in it.",
    ),
    "sandbox-broken": Explanation(
        summary="The sandbox fails for every program.",
        why="It could not even start them; that says nothing about the programs, so they are not counted as wrong.",
        advice="Correct what the message names; `docker compose logs sandbox` says more.",
    ),
    "sample-not-text": Explanation(
        summary="A sample is not text.",
        why="A program is text; an answer that was never generated is none.",
        advice="Generate the sample again.",
    ),
    "sample-without-test": Explanation(
        summary="A program has no test.",
        why="Without one every program would pass.",
        advice="Name the test in the task's file.",
    ),
    "sample-time-limit": Explanation(
        summary="The time limit of a program is no number of seconds above zero.",
        why="A program without a limit could keep the sandbox for ever.",
        advice="Take a number such as 3.0, as the harness does.",
    ),
    "code-sampling": Explanation(
        summary="How programs are sampled contradicts itself.",
        why="At temperature 0 a model always writes the likeliest token: every sample is the same, and top_p has "
        "nothing to choose from.",
        advice="Set evaluation.code.temperature, such as 0.8 for several samples, or ask for one.",
    ),
    "code-context": Explanation(
        summary="A program may be longer than what the model can read at once.",
        why="Problem and program share the context; the harness stops where nothing is left for the problem.",
        advice="Set evaluation.code.max_new_tokens well below the model's context.",
    ),
    "too-few-samples": Explanation(
        summary="pass@k with a k above the number of samples.",
        why="It is the chance that one of k samples is right, and cannot be estimated from fewer than k.",
        advice="Generate at least k samples of each problem, or ask for a smaller k.",
    ),
}
