"""The texts for errors around saving checkpoints and going on from them, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

CHECKPOINTS: dict[str, Explanation] = {
    "checkpoint-damaged": Explanation(
        summary="A checkpoint is not what was written.",
        why="Its record, complete.json, lists every file with its size and SHA-256, and one is missing, added, cut off "
        "or changed, so nothing of it is loaded. The record proves damage, not origin: who can change a file can write "
        "its hash anew.",
        advice="Name an older checkpoint, or restore this one from a copy. With training.resume=auto a run goes back "
        "to the newest that is whole, by itself.",
    ),
    "checkpoint-unsafe": Explanation(
        summary="A file of a checkpoint would run code when it is loaded.",
        why="The states of optimizers, of DeepSpeed and of torch.distributed.checkpoint are pickles, which are "
        "programs. Those of a run name a few classes, and this file names something else, so it is loaded no further "
        "and nothing of it has run. That its hash stands in complete.json proves that it was not damaged, and not who "
        "wrote it: whoever made the file can write its hash.",
        advice="Do not use this checkpoint, and ask where it comes from. Go on from one of your own with "
        "training.resume=FOLDER, or start anew with training.resume=never. If it was written by another version of "
        "DeepSpeed or torch, go on with that version.",
    ),
    "checkpoint-not-written": Explanation(
        summary="A checkpoint could not be written.",
        why="The folder may be read-only, or a library wrote nothing. The checkpoint before is still the newest one.",
        advice="Make the run folder writable and start the run again; it goes on after the last checkpoint.",
    ),
    "no-talk-beside-training": Explanation(
        summary="The ranks cannot talk to each other beside the training.",
        why="What completes a checkpoint in the background asks all ranks over gloo, in a thread of its own, since "
        "what training uses is busy with training. Gloo takes the network interface of the host's name, which may "
        "lead to the host alone.",
        advice="Name the network interface between the nodes with GLOO_SOCKET_IFNAME, or let training stand still for "
        "its saves: training.save_in_background=false.",
    ),
    "checkpoint-differs": Explanation(
        summary="A checkpoint was saved by a run with other settings, data, chat template or number of ranks.",
        why="Going on from it would give a result that belongs to neither run: the order of documents, the learning "
        "rate or the random numbers would change in the middle.",
        advice="Start with what the checkpoint was saved with, or name what may differ, such as "
        "'training.resume_anyway=[config]'; the words are config, data, template, world_size and best (see "
        "best-checkpoint-missing).",
    ),
    "best-checkpoint-missing": Explanation(
        summary="training.load_best_at_end=true, and there is no best checkpoint to load.",
        why="Only steps with both a validation loss and a checkpoint are ranked, and the best of them is kept. "
        "Something else removed or changed its folder, or no step had both. The last model is not taken in its place.",
        advice="Restore the folder from a copy and type the same command again. To take the best of the checkpoints "
        "that are left: 'training.resume_anyway=[best]'. To take one by its step: tunebook export RUN --checkpoint "
        "STEP.",
    ),
    "checkpoint-not-loaded": Explanation(
        summary="A checkpoint's weights do not fill the model, though every file is as it was written.",
        why="Libraries load weights by name and only warn about names that they do not find: the rest of the model "
        "would keep other weights. Versions of transformers differ in how some architectures are named.",
        advice="Resume with the versions of the packages that the checkpoint's complete.json names.",
    ),
    "checkpoint-of-another-run": Explanation(
        summary="A checkpoint of another model, strategy, optimizer or adapter, which cannot be loaded.",
        why="Each strategy saves its shards in its own way, an adapter fits its base and its own rank only, and each "
        "optimizer has a state of its own. ZeRO's shards can be cut anew for another number of ranks, but not what is "
        "kept on NVMe disks, which each rank saves as its files.",
        advice="Go on with the model, strategy and number of ranks that the message names; or export its weights with "
        "`tunebook export` and start from them: model.path=FOLDER.",
    ),
    "checkpoint-not-resharded": Explanation(
        summary="A ZeRO checkpoint cannot be cut anew for another number of ranks.",
        why="DeepSpeed makes a universal checkpoint of it first, of whole parameters, and does not know this one.",
        advice="Go on with the number of ranks that saved it; or export its weights with `tunebook export` and start "
        "from them, with a new optimizer: model.path=FOLDER.",
    ),
    "checkpoint-not-usable": Explanation(
        summary="The folder that training.resume names is no checkpoint that a run can go on from.",
        why="A checkpoint has a record, complete.json, written last. Without one nobody can tell whether it is whole. "
        "Checkpoints of other programs, and of Tunebook before it wrote records, have none.",
        advice="Name a run folder or one of its checkpoints. Where the folder holds weights as safetensors, start from "
        "them with a new optimizer: model.path=FOLDER.",
    ),
    "checkpoint-of-newer-version": Explanation(
        summary="A checkpoint was written by a later version of Tunebook.",
        why="Its record has a format that this version does not know, so it cannot be checked. Going back before it "
        "would lose the steps that it holds.",
        advice="Go on with the version that wrote it, or a later one; or start anew with training.resume=never.",
    ),
}
