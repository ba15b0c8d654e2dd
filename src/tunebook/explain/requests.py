"""The texts for errors about what was asked for: composing, models, tokenizers and chat templates, by `problem_id`."""

from __future__ import annotations

from tunebook.config.interpolation import ALLOWED
from tunebook.plan.rules.frame import Explanation

COMPOSING: dict[str, Explanation] = {
    "interpolation-refused": Explanation(
        summary="A value takes its text from where a configuration may not read.",
        why="`${...}` may name another key, and `${oc.env:NAME}` a few variables of the environment: "
        f"{ALLOWED}. What is read is written to run.yaml, manifest.json and the report, which are there to be shared; "
        "a recipe of somebody else could take a token there. The clock and the machine are in no record, so a run that "
        "reads them could not be repeated.",
        advice="Type the value itself, or let the shell put a variable in: `training.seed=$SEED`. Tokens are read from "
        "the environment where they are needed (HF_TOKEN, WANDB_API_KEY).",
    ),
    "variable-not-set": Explanation(
        summary="A value takes its text from an environment variable that is not set here.",
        why="`${oc.env:NAME}` stands for the value of NAME where the command is typed.",
        advice="Set the variable before the command (`export NAME=VALUE`), type the key's value itself, or state a "
        "default in the recipe: `${oc.env:NAME,VALUE}`.",
    ),
    "secret-in-configuration": Explanation(
        summary="A value of the configuration holds a token or a password.",
        why="It equals the value of a variable whose name says that it is secret (such as HF_TOKEN or DB_PASSWORD), or "
        "has the form of an access token. Every value of a configuration is written to run.yaml, manifest.json and the "
        "report, which are there to be shared, and the command line is recorded as well.",
        advice="Leave it out. HF_TOKEN and WANDB_API_KEY are taken from the environment and reach the ranks, also on "
        "other nodes and in containers. Set other secrets in the environment of the machines that the ranks run on.",
    ),
    "unknown-key": Explanation(
        summary="A key that the configuration does not have.",
        why="The configuration is closed: a misspelt key would otherwise be ignored in silence, and the run would "
        "use the default instead of what was meant.",
        advice="Take the spelling that the message suggests. Some keys exist only with certain choices, such as "
        "nvme_path with a ZeRO strategy.",
    ),
    "unknown-choice": Explanation(
        summary="A config group has no file of that name.",
        why="hydra_configs/<group>/ has one file for each answer; the message lists them.",
        advice="Choose one of those listed, or add a file (see CONTRIBUTING.md).",
    ),
    "unknown-group": Explanation(
        summary="A recipe overrides a config group that does not exist.",
        why="The groups are the folders of hydra_configs/, fixed by the schema.",
        advice="Take the group that the message suggests; plain keys go into the recipe's body, not into its defaults.",
    ),
    "unknown-recipe": Explanation(
        summary="There is no recipe of that name.",
        why="Recipes are the <name>.yaml files of recipes/ and of the folders given with --recipes-dir or "
        "TUNEBOOK_RECIPES.",
        advice="`tunebook list` shows them all.",
    ),
    "recipe-name-taken": Explanation(
        summary="Two folders of recipes hold one of the same name.",
        why="One would hide the other, and which one is used would depend on the order of the folders.",
        advice="Rename one of the two files.",
    ),
    "recipe-name-form": Explanation(
        summary="The name of a recipe's file is none that Hydra reads as a name.",
        why="A recipe is chosen by its name in Hydra's words, where =, brackets, quotes and letters beyond a-z have "
        "other meanings or none, and a number, true, false and null are no text.",
        advice="Rename the file: letters a-z, digits, _ - and dots.",
    ),
    "recipe-circle": Explanation(
        summary="A recipe builds on itself, directly or through others.",
        why="The settings of a recipe are those of its parents and its own on top; in a circle there is no beginning.",
        advice="Remove one of the entries that the message shows from its file's defaults.",
    ),
    "recipe-defaults": Explanation(
        summary="An entry of a recipe's defaults that Hydra would misread.",
        why="Groups already have a choice in hydra_configs/config.yaml; a recipe replaces it with `- override "
        "/group: choice`.",
        advice="Write the entry as the message says.",
    ),
    "recipe-not-yaml": Explanation(
        summary="A recipe's file is not a YAML mapping.",
        why="A recipe is a mapping of keys to values with an optional list of defaults.",
        advice="Correct the file at the line that the message names; indentation and colons are the usual causes.",
    ),
    "recipes-dir-not-found": Explanation(
        summary="The folder given for recipes does not exist.",
        why="It comes from --recipes-dir or from TUNEBOOK_RECIPES.",
        advice="Correct the path; relative ones start at the working directory.",
    ),
    "path-too-long": Explanation(
        summary="A path is longer than one of any file.",
        why="Linux takes names of 255 bytes and paths of 4095, so there can be no such file or folder; most often text "
        "was pasted where a path belongs.",
        advice="Correct the path. A folder that is deep in others can have a link with a shorter path: `ln -s`.",
    ),
    "book-not-found": Explanation(
        summary="Tunebook's own hydra_configs/ and recipes/ are not where they should be.",
        why="They are looked up in $TUNEBOOK_HOME, then in the checkout that the code lies in, then inside the "
        "installed package.",
        advice="Set TUNEBOOK_HOME to a checkout, or unset it, or install the package again.",
    ),
    "override-form": Explanation(
        summary="A word on the command line is no override that can be read.",
        why="Overrides are key=value. Keys cannot be added or removed (+key, ~key), because the configuration is "
        "closed, and a recipe's name stands first.",
        advice="Write key=value as the message shows; put quotes round values with special characters.",
    ),
    "missing-value": Explanation(
        summary="A value that nobody has set.",
        why="Some values have no sensible default, such as the path of your own data.",
        advice="Set every key that the message lists.",
    ),
    "wrong-type": Explanation(
        summary="A value of the wrong type.",
        why="Every key has a type: a whole number, a number, true or false, a text, a list, or one of a few words.",
        advice="Give a value of the type that the message names.",
    ),
    "cannot-compose": Explanation(
        summary="Hydra could not put the configuration together.",
        why="The message is Hydra's own; it is nearly always about the last override or recipe that was changed.",
        advice="Take overrides away until it composes, then add them again one by one.",
    ),
    "compare-form": Explanation(
        summary="--compare is not given one key with several values.",
        why="It plans the recipe once for each value and prints a table with a row for each.",
        advice="Such as `tunebook plan qwen3b_zero2 --compare parallelism=ddp,zero1,zero2,zero3,fsdp`.",
    ),
    "does-not-fit": Explanation(
        summary="The plan needs more memory than each GPU or rank has.",
        why="The estimate adds up weights, gradients, optimizer state, activations and buffers. It says no only where "
        "the first three alone are more than there is, or all of it is by more than 15%; what else a run needs, such "
        "as CUDA's context, comes on top.",
        advice="Divide more among the GPUs (parallelism=zero3 or fsdp, which auto takes where nothing faster fits), "
        "offload (parallelism=zero3_offload), recompute (activation=checkpointing), train an adapter (peft=lora), or "
        "take more GPUs or larger ones.",
    ),
    "host-memory-too-small": Explanation(
        summary="The plan needs more host memory than a node has.",
        why="The processes of a node, offloaded weights, gradients, optimizer states and activations, a model that is "
        "being loaded and one that is gathered to be written are in the host's memory. Where it is full the system "
        "ends the ranks without a word of theirs. It is refused only where what is offloaded is more than there is, "
        "or the peak is by more than 15%.",
        advice="The message names the largest part and what is estimated to need less, which depends on that part: "
        "fewer GPUs of each node spare processes, more nodes share what is offloaded, and a disk "
        "(parallelism=zero3_nvme) needs buffers that can be more than what it takes. hardware.host_memory_gib says "
        "what a node has, where it is not this machine.",
    ),
    "image-file-broken": Explanation(
        summary="The file that says what this container image is made of cannot be used.",
        why="The image's generation, driver and packages are read from it before a run starts, and written into its "
        "manifest. It is written when the image is built.",
        advice="Build the image again with `make image`. Outside of a container unset TUNEBOOK_IMAGE_FILE.",
    ),
    "unknown-id": Explanation(
        summary="There is no rule or error of that id.",
        why="Ids stand at the end of messages, after `tunebook explain`.",
        advice="`tunebook explain all` lists every id.",
    ),
}

MODELS: dict[str, Explanation] = {
    "model-config": Explanation(
        summary="The model's config.json cannot be used.",
        why="It is cut off, is not JSON, names no architecture, or states sizes that no model has: zero, a fraction, "
        "heads that do not divide. Planning reads the sizes from it, or builds the model from it without its weights.",
        advice="Copy or download the model again, or correct the file.",
    ),
    "model-facts": Explanation(
        summary="The model is not the one that was planned with.",
        why="The facts in hydra_configs/model are compared with the real config.json, because plans made with wrong "
        "sizes are wrong.",
        advice="Correct the group's file, or set model.facts=null to read them from the model.",
    ),
    "model-without-weights": Explanation(
        summary="A model folder without weights.",
        why="Weights are *.safetensors files beside config.json. A sharded checkpoint of ZeRO or FSDP is no whole "
        "model.",
        advice="Add the files, export the checkpoint, or train from scratch with model.weights=random.",
    ),
    "weights-incomplete": Explanation(
        summary="The weights do not fill the model.",
        why="A weight that is missing or of another shape would silently stay random.",
        advice="Name a complete checkpoint of this very architecture.",
    ),
    "unknown-architecture": Explanation(
        summary="An architecture that the installed transformers does not have.",
        why="Models are built by transformers from the class that their config.json names.",
        advice="Correct the name, use a newer transformers, or set model.trust_remote_code=true where the model "
        "brings its own code.",
    ),
    "remote-code-refused": Explanation(
        summary="The tokenizer or model wants to run code from its own repository.",
        why="Such code runs with your rights, on your files and tokens.",
        advice="Read the code; if you trust it, type model.trust_remote_code=true and pin model.revision.",
    ),
    "tokenizer-not-found": Explanation(
        summary="There is no tokenizer where one is looked for.",
        why="A tokenizer is a folder with tokenizer.json or the older vocabulary files; by default the model's own.",
        advice="Copy the files there, or name another with model.tokenizer=DIR.",
    ),
    "tokenizer-broken": Explanation(
        summary="The tokenizer's files cannot be read.",
        why="They are cut off, not JSON, or written by a version that the installed tokenizers cannot read.",
        advice="Copy or download them again.",
    ),
    "tokenizer-not-fast": Explanation(
        summary="The tokenizer exists in Python only.",
        why="Finding the assistant's tokens needs to know which characters a token came from, which only the Rust "
        "tokenizers say.",
        advice="Name one that has a tokenizer.json.",
    ),
    "tokenizer-no-eos": Explanation(
        summary="The tokenizer has no end-of-sequence token.",
        why="Without one the model never learns to stop.",
        advice="Set model.eos_token to the token that ends an answer in this vocabulary.",
    ),
    "tokenizer-no-pad": Explanation(
        summary="The tokenizer has no padding token, and rows are padded.",
        why="Rows of a batch must be equally long.",
        advice="Set model.pad_token to a token of the vocabulary, or pack: packing.mode=isolated.",
    ),
    "tokenizer-no-template": Explanation(
        summary="The tokenizer has no chat template, and the documents are conversations.",
        why="A chat template writes turns as text. Another model's template would teach other marks.",
        advice="Name one with model.chat_template=FILE, or use the instruction-tuned version's tokenizer.",
    ),
    "token-not-in-vocabulary": Explanation(
        summary="A special token that is not in the vocabulary.",
        why="A new token would need a new, random row in the embedding.",
        advice="Name a token that exists; the message lists the special ones.",
    ),
    "token-outside-vocabulary": Explanation(
        summary="Pre-tokenised documents hold ids beyond the model's vocabulary.",
        why="They were made with another tokenizer, so every id would mean another word.",
        advice="Tokenise them again with this model's tokenizer.",
    ),
    "chat-template-broken": Explanation(
        summary="The chat template is not valid Jinja.",
        why="It cannot write any conversation.",
        advice="Correct it at the line that the message names.",
    ),
    "chat-template-refuses": Explanation(
        summary="The chat template refuses a conversation.",
        why="Many templates demand that roles alternate, or know no system turn.",
        advice="Change the conversation, or name a template that takes it.",
    ),
    "assistant-not-found": Explanation(
        summary="The assistant's words cannot be found in what the template writes.",
        why="Only they are trained on, so their place must be certain. A template that rewrites earlier turns hides "
        "it.",
        advice="Use a template with {% generation %} marks, or dataset.train_on=everything.",
    ),
    "eos-not-trained": Explanation(
        summary="No token that generation stops at is among the trained ones.",
        why="The model would answer well and never stop.",
        advice="Set model.eos_token to the token with which the template ends an answer.",
    ),
    "bos-doubled": Explanation(
        summary="Documents would begin with two BOS tokens.",
        why="The template writes one and the tokenizer adds another; no model was pretrained on that.",
        advice="Take it out of one of the two places, as the message says.",
    ),
}
