"""The texts for errors of what an evaluation is given: a model, its ties to its training, tasks and their data."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

EVALUATING: dict[str, Explanation] = {
    "run-and-model": Explanation(
        summary="An evaluation was told both a run and a model.",
        why="One evaluation scores one model. A run's own is run=RUN, one of its checkpoints run=FOLDER.",
        advice="Type run=RUN or model=FOLDER (or model=organisation/name). For both: two commands.",
    ),
    "evaluation-option": Explanation(
        summary="An option of `tunebook eval` that no evaluation can have.",
        why="A limit counts items and begins at 1; the number of examples begins at 0.",
        advice="Leave --limit out for all items, and --num-fewshot for the task's own number.",
    ),
    "unknown-mismatch": Explanation(
        summary="--allow-mismatch names what is not compared.",
        why="What ties a model to its training is its chat template, its tokenizer, its system prompt and, of an "
        "adapter, its base model.",
        advice="Type --allow-mismatch template, tokenizer, system_prompt or base, or several with commas between them.",
    ),
    "template-changed": Explanation(
        summary="The chat template is not the one that the run was trained with.",
        why="A model answers badly under another template. The manifest holds the template's hash.",
        advice="Put the template back as it was. To evaluate with this one all the same, which is recorded in the "
        "result: tunebook eval --allow-mismatch template.",
    ),
    "tokenizer-changed": Explanation(
        summary="The tokenizer is not the one that the run was trained with.",
        why="The same text would become other tokens than in training. The manifest holds the tokenizer's hash.",
        advice="Put the tokenizer's files back as they were; a newer version of the tokenizers package may also write "
        "it in another way, so use the locked one. To evaluate with this one all the same, which is recorded in the "
        "result: tunebook eval --allow-mismatch tokenizer.",
    ),
    "system-prompt-changed": Explanation(
        summary="The system prompt is not the one that the run was trained with.",
        why="dataset.system_prompt in run.yaml is put before every conversation, in training and in evaluation alike. "
        "The manifest holds its hash.",
        advice="Put it back as it was. To evaluate with this one all the same, which is recorded in the result: "
        "tunebook eval --allow-mismatch system_prompt.",
    ),
    "base-changed": Explanation(
        summary="The weights below an adapter are not those that it was trained on.",
        why="An adapter is a difference to one base model; added to other weights of the same shapes it loads without "
        "a word and answers wrongly. The manifest holds a fingerprint of the base's weights, if they lay in a folder.",
        advice="Put the weights back into the folder that model.path names, or train again on the new ones. To "
        "evaluate on these all the same, which is recorded in the result: tunebook eval --allow-mismatch base. To "
        "export the adapter alone, which needs no base: tunebook export without --merge.",
    ),
    "task-data-missing": Explanation(
        summary="Tasks need what is not on this machine: data sets, nltk's data or Python packages.",
        why="The harness downloads data from the hub as it loads a task, and some tasks more while they score. Out of "
        "reach of a network that is told before a model is loaded or trained, for all tasks at once.",
        advice="On a machine with a network type `tunebook fetch RECIPE`, suite=NAME or tasks=a,b, and bring its "
        "HF_HOME and TUNEBOOK_CACHE; or leave the tasks out: tasks=a,b, evaluation.tasks=[a,b].",
    ),
    "not-fetched": Explanation(
        summary="`tunebook fetch` could not get everything.",
        why="The hub is out of reach, or does not give a model or data set to this account. What could be fetched is "
        "kept, and is not fetched again.",
        advice="Do what the message says for each, and type the same again.",
    ),
    "nothing-to-fetch": Explanation(
        summary="`tunebook fetch` was not told what to fetch.",
        why="A recipe names a model, data and tasks; a suite or tasks need data of their own.",
        advice="Type tunebook fetch RECIPE, suite=leaderboard, or tasks=gsm8k,arc_easy.",
    ),
    "leaderboard-math-hard": Explanation(
        summary="MATH-hard of the Open LLM Leaderboard, which is left out here.",
        why="Its data set, competition_math, was taken down for legal reasons, so that the recipe that these "
        "evaluations follow skips it too. Its scorer reads formulas with sympy, which needs antlr4 4.11, and Hydra "
        "needs 4.9: both cannot be in one environment.",
        advice="suite=leaderboard is the other five tasks: leaderboard_bbh, leaderboard_gpqa, leaderboard_ifeval, "
        "leaderboard_mmlu_pro and leaderboard_musr. Do not compare an average over five with one over six.",
    ),
}
