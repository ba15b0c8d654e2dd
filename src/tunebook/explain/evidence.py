"""The texts for errors about evidence, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

EVIDENCE: dict[str, Explanation] = {
    "no-evidence": Explanation(
        summary="There is no recorded run to compare with.",
        why="`tunebook verify` holds a run against the files in recipes/<name>/evidence, and this recipe has none, or "
        "the file named with --against is not there.",
        advice="Record some: train the recipe twice from a clean checkout, then name both runs with --record. Or name "
        "a file that is there.",
    ),
    "evidence-of-other-config": Explanation(
        summary="What is recorded was another configuration, other data or another model.",
        why="Numbers of different things cannot be compared. How a step is split over GPUs (micro batch, strategy, "
        "attention kernel, checkpointing) may differ: the loss does not depend on it. Everything else must be equal. "
        "A group that was changed since changes what the recipe means, and its evidence has to be recorded anew.",
        advice="Do what the message ends with: train with other words, or check out the commit of the evidence, or "
        "record it anew. --against compares with one file.",
    ),
    "evidence-broken": Explanation(
        summary="An evidence file cannot be used.",
        why="It is missing, was changed after it was written (its hash tells), or was written by a newer version.",
        advice="Take it back from git, or record two runs again. Evidence is never corrected by hand: what "
        "earlier versions said of its packages is corrected by `python -m tunebook.evidence.software FILE...`. What a "
        "newer version wrote is read by that version, or a later one.",
    ),
    "evidence-card": Explanation(
        summary="The recipe's card cannot show evidence, so none is written.",
        why="A recipe's card, recipes/<name>/README.md, has a section `## Evidence` with a table and a plot made from "
        "the files, so that a reader sees what is recorded.",
        advice="Add the heading `## Evidence` to the card, and record again.",
    ),
    "evidence-exists": Explanation(
        summary="Evidence of this name is recorded already.",
        why="A recorded claim is not overwritten by accident: others may rely on it.",
        advice="Choose another --label, or remove the file if the new one takes its place.",
    ),
    "evidence-label": Explanation(
        summary="`tunebook verify` was asked for two things at once, or a label cannot be used.",
        why="Without --record one run is compared; with it several are written down as one file, whose name ends with "
        "the label.",
        advice="tunebook verify RUN, or tunebook verify RUN RUN --record --label NAME.",
    ),
    "evidence-not-finite": Explanation(
        summary="A loss or score is not a finite number.",
        why="A claim that rests on NaN or infinity proves nothing.",
        advice="Find out why (tunebook explain loss-not-finite), and record a run that is sound.",
    ),
    "evidence-not-repeated": Explanation(
        summary="Evidence needs at least two runs of the same thing, by the same software on the same machines.",
        why="How far another run's numbers may lie from these is worked out from how far apart equal runs were. A copy "
        "of a run's folder repeats nothing; runs that split their steps otherwise, ran in other packages or go on from "
        "another run are apart for another reason.",
        advice="Train it again in the same environment with training.resume=never, and name both runs. `tunebook "
        "reproduce` needs a run that was trained from its first step, too.",
    ),
    "evidence-of-changed-code": Explanation(
        summary="The run was made by code, or of a recipe, that is in no commit or was changed since.",
        why="Evidence names the commit with which anyone can run the same again; changes beside it are lost. A recipe "
        "of your own, from --recipes-dir, counts where its repository has it as it is, and where it still comes to "
        "what the run was.",
        advice="Commit, and train again.",
    ),
    "evidence-without-recipe": Explanation(
        summary="The run has no recipe that the evidence could belong to.",
        why="Evidence lies beside the recipe whose claim it supports.",
        advice="Write what was typed into recipes/NAME.yaml, and train that.",
    ),
    "reproduces-otherwise": Explanation(
        summary="What would be run is not what the run was.",
        why="The same words are composed with today's book on this machine. A group, a data file or a tokenizer that "
        "was changed since, or a choice that `auto` makes otherwise here, would make another run, whose numbers say "
        "nothing about the first.",
        advice="Check out the commit that the manifest names, take the files back, or type the recorded values.",
    ),
    "run-changed": Explanation(
        summary="A run's run.yaml, manifest.json, metrics.jsonl or evaluation/after.json was changed after the run.",
        why="The manifest notes the recipe, the seed and the hash of run.yaml at the start, those of the numbers at "
        "the end. Where they no longer go together, one of the files tells of another training than was done.",
        advice="Take the files back from a copy, or train again. A run that differs is asked for by words on the "
        "command line, not by an edited run.yaml.",
    ),
    "run-without-words": Explanation(
        summary="The manifest does not say what was trained.",
        why="Earlier versions of `tunebook reproduce` noted their own command line, which has none of the words that "
        "were trained with.",
        advice="Name the run that it repeated, or train again.",
    ),
    "run-not-finished": Explanation(
        summary="The run has not come to its end, or its folder lacks a part.",
        why="Half a curve and no evaluation cannot be compared with a whole run.",
        advice="Let it go on with the command that it was started with, without training.resume=never, or name one "
        "that has finished.",
    ),
}
