"""The texts for errors of `tunebook export`, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

EXPORTING: dict[str, Explanation] = {
    "export-no-checkpoint": Explanation(
        summary="There is nothing to export, or not what --checkpoint names.",
        why="A run has its model/ folder once it has finished, and checkpoints as often as training.save_every_steps "
        "says. A checkpoint of another run has other settings and perhaps another tokenizer, so it is exported from "
        "its own run.",
        advice="Name one of the steps that the message lists, name the run that the checkpoint is of, or go on with "
        "the run until it has saved.",
    ),
    "export-no-weights": Explanation(
        summary="A folder without weights in a form that can be exported.",
        why="Known are safetensors (whole or an adapter's), FSDP's sharded checkpoints and ZeRO's partitions, by the "
        "names that accelerate, DeepSpeed and transformers give them.",
        advice="Name another checkpoint of the run with --checkpoint STEP.",
    ),
    "export-pickled": Explanation(
        summary="Pickled weights are not read.",
        why="A pickle is a program: loading one from elsewhere can run any code with your rights. No checkpoint of "
        "Tunebook holds its weights in that form alone.",
        advice="If you trust where the file comes from, load it with the program that wrote it and save it as "
        "safetensors.",
    ),
    "export-link": Explanation(
        summary="A link or an index in a checkpoint leads out of its folder.",
        why="What is behind it was not written with the checkpoint, and the record of the checkpoint does not vouch "
        "for it.",
        advice="Put the file itself in the place of the link, if it belongs there.",
    ),
    "export-target": Explanation(
        summary="The folder for the export exists, or cannot be made.",
        why="An export never writes over anything: a folder with parts of two models would load without a word. It "
        "writes beside its place and renames at the end.",
        advice="Name a new folder with --to FOLDER, or remove the old one.",
    ),
    "export-weights": Explanation(
        summary="Tensors of a checkpoint are empty, missing, misshapen, not finite, or not this model's.",
        why="Empty tensors are what ZeRO-3 leaves where nobody gathered them; a missing one would be filled with "
        "random numbers on loading; a number that is not finite makes every answer one. fp16 ends at 65,504, so larger "
        "weights do not fit into it.",
        advice="Name an older checkpoint with --checkpoint STEP; of weights too large for fp16, export with --dtype "
        "bf16 or fp32.",
    ),
    "export-differs": Explanation(
        summary="What was exported, loaded again, does not answer as the checkpoint does.",
        why="Both compute the logits of the same tokens. They must be equal bit for bit in the same number format; "
        "where weights were cast or merged, also equal to the checkpoint's own up to that format's rounding.",
        advice="Nothing of the export was kept. Export in the format that the run was trained in (--dtype), or another "
        "checkpoint; then please report it.",
    ),
    "export-merge": Explanation(
        summary="--merge where it cannot be done.",
        why="Only an adapter can be merged. One that was trained over a base quantised by bitsandbytes (QLoRA) is "
        "merged into that base rounded to 4 bits and back, which takes bitsandbytes.",
        advice="Leave --merge out, or install bitsandbytes; a CPU is enough for it.",
    ),
    "upload-failed": Explanation(
        summary="The export is whole, but was not uploaded.",
        why="The hub refused it or was lost on the way: no right to write there, a full quota, a broken connection.",
        advice="Type the `hf upload` command of the message again; what the hub has already is not sent twice.",
    ),
}
