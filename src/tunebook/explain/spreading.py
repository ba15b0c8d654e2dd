"""The texts for errors about how a model is spread over its ranks, what its rows let through, and its losses."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

SPREADING: dict[str, Explanation] = {
    "weights-file-missing": Explanation(
        summary="A file with weights is not where its index, or its configuration, says.",
        why="model.safetensors.index.json says which file holds which weight, and an adapter's weights belong beside "
        "its adapter_config.json. What is in a missing file would be random numbers.",
        advice="Copy the missing files, or download again: `hf download NAME --local-dir DIR` fetches what is missing.",
    ),
    "weights-file-damaged": Explanation(
        summary="A file with weights, or the index of such files, cannot be read.",
        why="Its header says how long it must be, and it is shorter, or is no header at all: a download or a copy "
        "broke off, or Git LFS left its pointer in place of the file.",
        advice="Remove the file and download it again; `git lfs pull` replaces pointers by files.",
    ),
    "other-parallelism": Explanation(
        summary="The model was not wrapped as parallelism says.",
        why="Libraries replace a strategy that they cannot do by another without a word, and what is measured then is "
        "something else than what was asked for. So every rank looks at its wrapped model before the first step.",
        advice="Choose a strategy that works here, such as parallelism=ddp. If the installed packages are not those of "
        "the lock, install them first.",
    ),
    "not-in-fp8": Explanation(
        summary="A run in fp8 whose linear layers do not multiply in fp8.",
        why="Something put ordinary layers back after they were converted, and the run would train in bf16 without a "
        "word. So every rank counts its layers in the wrapped model before the first step; the number is in "
        "manifest.json under parallelism_found.",
        advice="Use precision=bf16. If the installed packages are not those of the lock, install them first.",
    ),
    "leak-not-seen": Explanation(
        summary="The leak probe cannot tell whether packed documents see each other.",
        why="Before its first step a run changes one document of a packed row and looks whether the logits of the "
        "other move. In this model they hardly would even if it saw all of the first, so that nothing is proven.",
        advice="Type packing=padded: rows of one document each need no proof.",
    ),
    "leak": Explanation(
        summary="Documents that share a packed row see each other.",
        why="Then the model learns to continue a document from a stranger's, and no loss curve shows it. Before the "
        "first step every rank sends two documents through its own model and kernels: the second one's logits may not "
        "move when the first changes, and the row's loss must be the sum of the two. What was measured is in "
        "manifest.json under leak_probe.",
        advice="packing=padded is always right. Faster: another attention that isolates this model, such as "
        "attention=sdpa. If the installed packages are not those of the lock, install them first.",
    ),
    "varlen-attention-not-possible": Explanation(
        summary="The model asks for more than attention that goes document by document can compute.",
        why="varlen_attention, varlen_attention_4 and sdpa_by_document have no attention dropout, no cap on the logits "
        "and no attention sinks, and compute packed rows only. Leaving one of them out without a word would "
        "train another model.",
        advice="Take attention=sdpa, or eager, which computes all of them, where the model has no sdpa.",
    ),
    "fp8-nothing-to-convert": Explanation(
        summary="precision=fp8, and no linear layer of the model would be faster for it.",
        why="Turning a layer's tensors into fp8 costs time, too: small layers lose more than they gain and stay in "
        "bf16, as do the embeddings and the head. This model has nothing else.",
        advice="Use precision=bf16.",
    ),
    "no-layers-to-compile": Explanation(
        summary="model.compile_layers, and transformers does not say what the model's blocks are.",
        why="Blocks are found by the class that the architecture names as not to be split; each is compiled by itself.",
        advice="Leave model.compile_layers off for this architecture.",
    ),
    "units-too-large": Explanation(
        summary="FSDP's units by size would be larger than any part of the model.",
        why="Without units FSDP gathers the whole model at once, which saves nothing.",
        advice="Lower parallelism.wrap_min_num_parameters to what the message names, or make a unit of each block with "
        "parallelism.wrap_policy=transformer.",
    ),
    "libaio-missing": Explanation(
        summary="Offload to NVMe without the library that reads and writes there.",
        why="DeepSpeed builds its reader on first use, from libaio's header and library.",
        advice="`apt install libaio-dev g++`, or offload to host memory with parallelism=zero3_offload.",
    ),
    "parity-request": Explanation(
        summary="What parity should compare cannot be listed, or not compared step by step.",
        why="--over takes key=value,value, --gpus takes numbers, and there must be at least two configurations that "
        "can run; the first is what the others are compared with. All take --steps steps, a tolerance is a number from "
        "0, and each run's command must be at work until the run has ended.",
        advice="Such as `tunebook parity quickstart --over parallelism=ddp,zero2 --gpus 1,2`.",
    ),
}
