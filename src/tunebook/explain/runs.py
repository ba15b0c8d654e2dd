"""The texts for errors that are found while data is read, or a run trained and evaluated, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

DATA: dict[str, Explanation] = {
    "hub-not-found": Explanation(
        summary="The hub has no such data set, revision or file, or it may not be read.",
        why="The name may be misspelt, the repository private or gated, or the local folder missing.",
        advice="Correct the name; for a gated one ask for access on its page and run `hf auth login`.",
    ),
    "hub-out-of-reach": Explanation(
        summary="The hub cannot be reached, and what is needed is not in its cache.",
        why="The machine has no network, or HF_HUB_OFFLINE is set.",
        advice="Download on another machine with `hf download`, bring the folder here and name it; or use "
        "dataset=synthetic and model.weights=random to try without.",
    ),
    "hub-cannot-load": Explanation(
        summary="Something of that name on the hub cannot be loaded.",
        why="It is gated, private, misspelt, or the revision does not exist.",
        advice="Check the name and the revision; run `hf auth login` with an account that may read it.",
    ),
    "hub-unknown-split": Explanation(
        summary="The data set has no such split or subset.",
        why="Names differ between data sets: train, train_sft, default.",
        advice="Take one of those that the message lists.",
    ),
    "tokens-differ": Explanation(
        summary="Two ways to tokenise a text gave different tokens.",
        why="Conversations are cut into words and known words looked up, which is faster than the tokenizer and must "
        "say the same; one text of a hundred is given to both. A difference is a defect of Tunebook.",
        advice="Type TUNEBOOK_TOKENIZE_BY_LIBRARY=1 before the command: every text then goes to the tokenizer. Please "
        "report the text and the tokenizer's name.",
    ),
    "data-repeated-key": Explanation(
        summary="A JSON object, or the header of a table, has one key twice.",
        why="Programs differ in which of the two values they take, so which one is meant cannot be known.",
        advice="Keep one of the values.",
    ),
    "data-key-not-supported": Explanation(
        summary="Documents have a key that means something, and training would leave it out.",
        why="Tool calls, reasoning, images, labels and settings of the template change what an answer follows from. "
        "Trained on without them, a model learns something else than the data says.",
        advice="Take the key out of the data, or type dataset.ignore_keys=[KEY] to train without it. Keys that mean "
        "nothing to training are counted in a note and need nothing.",
    ),
    "data-several-arrays": Explanation(
        summary="A JSON file with documents under several keys.",
        why="One of them may be meant for testing, so they are not joined.",
        advice="Write those to train on into a file of their own: jq -c '.train[]' FILE > train.jsonl",
    ),
    "hub-file-options": Explanation(
        summary="A data set's card describes its JSON or CSV files by an option that is not read here.",
        why="Tunebook reads such files itself, since the `datasets` library makes dates, numbers and missing values of "
        "texts. Of the card's options it knows `field` of JSON and `sep` of CSV.",
        advice="Bring the files to JSONL and name them by dataset=jsonl dataset.path=FILE_OR_GLOB.",
    ),
    "special-token-in-content": Explanation(
        summary="A document holds the text of a special token, such as </s> or <|im_end|>.",
        why="The tokenizer makes the token of it. In a turn it would end the answer, or let a user's text control the "
        "model; nothing tells whether that is meant.",
        advice="dataset.special_tokens_in_content=as_text trains on it as text, which auto does in conversations; "
        "=keep takes it for the token, which auto does in plain text and in prompt and completion; =refuse stops.",
    ),
    "tokens-not-counted": Explanation(
        summary="The trainer did not count the trained-on tokens of a step.",
        why="Without that number each micro-batch would weigh alike, and the gradient would depend on how a step is "
        "cut. transformers leaves it out for models that say that their own loss does not take it.",
        advice="Install the versions of the lock; if they are, please report the model's class.",
    ),
    "template-leaves-out": Explanation(
        summary="The chat template does not write part of a conversation.",
        why="Templates leave out turns that they do not know, such as the system's or a tool's, and reasoning. The "
        "model would be trained on a conversation that nobody wrote. Of earlier answers that are not trained on "
        "a template may leave out parts; such documents are counted in a note.",
        advice="Name a template that writes it with model.chat_template=FILE, or take it out of the documents.",
    ),
    "chat-template-random": Explanation(
        summary="The chat template draws by chance.",
        why="The same documents would be other tokens in each preparation, under one fingerprint.",
        advice="Name a template without the filter `random` and without `lipsum` by model.chat_template=FILE.",
    ),
    "data-file-not-found": Explanation(
        summary="A data file does not exist or cannot be read.",
        why="Relative paths start where the command is typed. A folder is refused because its files may be meant for "
        "different purposes.",
        advice="Correct the path, or quote a glob such as dataset.path='data/*.jsonl'.",
    ),
    "data-file-kind": Explanation(
        summary="A file of a kind that documents are not read from.",
        why="The kind is told by the ending: .jsonl, .json, .csv, .tsv, .parquet, also .gz.",
        advice="Convert or rename the file.",
    ),
    "data-file-empty": Explanation(
        summary="A data file without a document.",
        why="It has no bytes, or blank lines only.",
        advice="Name the right file; an export may have failed.",
    ),
    "data-file-broken": Explanation(
        summary="A data file that is cut off or not what its ending says.",
        why="Copies that were interrupted look like this.",
        advice="Copy it again; `gzip -t FILE` checks a .gz.",
    ),
    "data-broken-json": Explanation(
        summary="A line that is not one JSON object.",
        why="JSONL has one whole document on each line. The message names file, line and column.",
        advice="Correct the line; a pretty-printed JSON array belongs in a file ending in .json.",
    ),
    "data-not-utf8": Explanation(
        summary="Bytes that are not UTF-8.",
        why="Text in another encoding would be trained on as wrong characters.",
        advice="Convert it, such as with `iconv -f LATIN1 -t UTF-8`.",
    ),
    "data-missing-field": Explanation(
        summary="A document without a field that its format needs.",
        why="The format is detected from the first document, or said by dataset.format.",
        advice="Correct the document, or name the right format.",
    ),
    "data-unknown-format": Explanation(
        summary="The documents' format cannot be told from their keys.",
        why="Each format is known by its keys; the message lists them.",
        advice="Rename the keys, or say dataset.format and, for plain text, dataset.text_field.",
    ),
    "data-unknown-role": Explanation(
        summary="A turn with a role that is not known.",
        why="Turns are the system's, the user's, the assistant's or a tool's; the message lists the words for each.",
        advice="Rename the role in the data.",
    ),
    "dataset-name-missing": Explanation(
        summary="A hub data set without a name.",
        why="dataset.source=hub looks up dataset.name.",
        advice="Set dataset.name=organisation/name.",
    ),
    "max-documents": Explanation(
        summary="dataset.max_documents below one.",
        why="It takes the first so many documents.",
        advice="Set a number from 1 on, or null for all.",
    ),
    "mixture-parts": Explanation(
        summary="A mixture without parts, or with a mixture as a part.",
        why="dataset.parts names each data set of a mixture.",
        advice="Set dataset.parts.NAME.path=FILE for each part.",
    ),
    "mixture-weights": Explanation(
        summary="The weights of a mixture do not work out.",
        why="Weights are positive and given for every part or for none; they are shares of the documents, and no "
        "document is drawn twice.",
        advice="Change the weight that the message names.",
    ),
    "mixture-kinds": Explanation(
        summary="Parts with documents of different kinds.",
        why="Conversations, plain text and tokens are masked in different ways and cannot share a batch.",
        advice="Bring them to one format.",
    ),
    "synthetic-without-vocabulary": Explanation(
        summary="Generated documents for a model of unknown vocabulary.",
        why="Their tokens are drawn from it.",
        advice="Choose a model group with facts, or a model.path with a config.json.",
    ),
    "nothing-to-train-on": Explanation(
        summary="Every document was dropped.",
        why="The message counts the reasons; most often all are longer than training.max_length, or none has a "
        "trained token.",
        advice="Raise training.max_length, or set dataset.overlong=split.",
    ),
    "validation-empty": Explanation(
        summary="The held-out share leaves one part without documents.",
        why="A share of few documents can round to none.",
        advice="Change dataset.validation_share.",
    ),
    "validation-overlap": Explanation(
        summary="The same file is trained on and validated on.",
        why="The validation loss would measure what was memorised.",
        advice="Name other files, or hold out a share.",
    ),
    "validation-share": Explanation(
        summary="A held-out share outside 0 to 0.5.",
        why="More than half held out leaves less to train on than to measure with.",
        advice="Set for example dataset.validation_share=0.05.",
    ),
    "prepared-not-found": Explanation(
        summary="Prepared data that is missing or incomplete.",
        why="Data is prepared once, before the ranks start, and read from its folder.",
        advice="Start the training again, or prepare with `tunebook data`.",
    ),
    "cache-not-writable": Explanation(
        summary="Prepared data cannot be written.",
        why="The folder belongs to somebody else or is on a read-only disk.",
        advice="Make it writable, or name another with the variable that the message names.",
    ),
    "worker-killed": Explanation(
        summary="A process that tokenises was killed.",
        why="Most often the system ran out of memory.",
        advice="Use fewer: dataset.num_workers=2.",
    ),
}

RUNS: dict[str, Explanation] = {
    "outputs-not-writable": Explanation(
        summary="The outputs folder cannot be written to.",
        why="Nothing is started whose results could not be kept.",
        advice="Make it writable, or name another: outputs=FOLDER.",
    ),
    "disk-full": Explanation(
        summary="The disk has no room for what is to be written.",
        why="A half-written checkpoint or data set is worth nothing.",
        advice="Free some space, or write to another disk.",
    ),
    "memory-ran-out": Explanation(
        summary="A GPU, or the host, ran out of memory while training.",
        why="The plan is an estimate, and cannot see what else is on a GPU. The message says what tensors took beside "
        "what was planned, what lay in pieces between them, and what others held.",
        advice="Make the change that the message names, and start the training again: the optimizer steps stay as they "
        "are. Where other processes hold the memory, end those or name another GPU in CUDA_VISIBLE_DEVICES.",
    ),
    "unknown-run": Explanation(
        summary="There is no run of that name.",
        why="Runs are folders under outputs/<recipe>/, `latest` being the newest.",
        advice="Name one of those that the message lists.",
    ),
    "run-named-twice": Explanation(
        summary="Two of the runs to compare are one.",
        why="A recipe's name and `latest` mean its newest run, which may be the one that was named by its folder.",
        advice="Name each run once, by its folder where it is not the newest.",
    ),
    "no-run-folder": Explanation(
        summary="A folder that is no run's.",
        why="A run folder holds the resolved run.yaml, written before the first step.",
        advice="Name a folder that `tunebook train` made.",
    ),
    "run-without-model": Explanation(
        summary="No run that has finished, or one without a final model.",
        why="The whole model is written to model/ at the end. `latest` and a recipe's name mean the newest run that "
        "finished, so that one at work or one that failed is not evaluated by accident.",
        advice="Finish the run, name it by its folder, or name one of its checkpoints.",
    ),
    "broken-record": Explanation(
        summary="A record of a run cannot be read.",
        why="Tunebook writes its records whole, so something else changed the file, or a newer version wrote it.",
        advice="Restore the file from a copy, or remove what the message names.",
    ),
    "model-changed": Explanation(
        summary="The weights in a run's model/ folder are not those that the run wrote.",
        why="The manifest records the size and SHA-256 of each file when it was on the disk. A copy may have been cut "
        "off, or something else wrote there; scores and exports would be of other weights than the run says.",
        advice="Restore the folder from a copy, or export a checkpoint: tunebook export RUN --checkpoint STEP.",
    ),
    "model-not-written": Explanation(
        summary="The training ended, but the folder of the trained model holds no weights.",
        why="A run that says finished must leave a model: gathering the parts of a sharded one did not work.",
        advice="The newest folder under checkpoints/ holds the weights. Please report the strategy and the versions.",
    ),
    "loss-not-finite": Explanation(
        summary="The loss became infinite or not a number.",
        why="From there on every weight is ruined. Usual causes: a learning rate that is too high, fp16, or a broken "
        "document.",
        advice="Go on from the checkpoint that the message names with a lower learning rate; look at the documents "
        "of that step.",
    ),
    "stopped": Explanation(
        summary="The run was stopped on request.",
        why="Ctrl-C or SIGTERM ends a run after the step it is in. Ctrl-C after that ends it without saving, at once: "
        "ranks that do not hear it within 2 s, since they wait for others, are killed. SIGTERM and a closed terminal "
        "may come several times and count once. Slurm asks so before it takes a job away, and "
        "Ray before it takes a machine away: ranks then have launcher.stop_timeout_s to save and end, or until the "
        "machine goes where that is sooner.",
        advice="Start it again, without training.resume=never: it goes on from its newest checkpoint where one was "
        "saved.",
    ),
    "upload-not-possible": Explanation(
        summary="What the run saves, or an export, cannot be uploaded.",
        why="training.push_to_hub uploads every save and `tunebook export --push` one folder, which needs a network "
        "and an account that may write there. An adapter is of use to others only if they have its base model.",
        advice="Run `hf auth login`; or set training.push_to_hub=null and upload later with `tunebook export --push`.",
    ),
    "run-is-running": Explanation(
        summary="A run is at work in that folder.",
        why="Two runs in one folder would overwrite each other's checkpoints and records.",
        advice="Wait for it, or start the other in a folder of its own.",
    ),
    "run-folder-taken": Explanation(
        summary="The folder named by --run-folder holds something that this run cannot go on with.",
        why="A run goes on in its folder while it is unfinished and its configuration is the same; nothing else is "
        "overwritten.",
        advice="Name a folder that is new or empty, or leave --run-folder out.",
    ),
    "run-lost": Explanation(
        summary="The training ended without a word.",
        why="It was killed, most often by the system for want of memory, or its folder was removed meanwhile.",
        advice="Look at what it printed and at log.txt in the run folder; start it again, without "
        "training.resume=never, and it goes on from its newest checkpoint.",
    ),
    "unknown-suite": Explanation(
        summary="There is no set of tasks of that name for this run.",
        why="A suite is an evaluation group of hydra_configs/evaluation, or `quick`, the tasks that the run's recipe "
        "ships in its folder tasks/.",
        advice="Take a suite that the message lists, or name tasks: tasks=a,b.",
    ),
    "suite-file": Explanation(
        summary="A file of hydra_configs/evaluation is no evaluation group.",
        why="Its keys and types are those of the section `evaluation` of a configuration.",
        advice="Correct the file as the message says.",
    ),
    "suite-and-tasks": Explanation(
        summary="An evaluation was told both a suite and tasks.",
        why="A suite is a list of tasks already; whether the others are meant instead or as well cannot be told.",
        advice="Type suite=NAME or tasks=a,b. All of them: write the suite's tasks out and add the others.",
    ),
    "no-tasks": Explanation(
        summary="An evaluation without tasks.",
        why="evaluation.tasks is empty.",
        advice="Name tasks of lm-evaluation-harness, or YAML files of your own.",
    ),
    "unknown-task": Explanation(
        summary="lm-evaluation-harness has no task of that name.",
        why="Tasks are named as in the harness; one of your own is named by its YAML file.",
        advice="Take the spelling that the message suggests.",
    ),
    "task-file": Explanation(
        summary="A task's YAML file cannot be used.",
        why="It is missing, is not YAML, or lacks the key `task`.",
        advice="Correct the file as the message says.",
    ),
    "task-runs-code": Explanation(
        summary="A task of lm-evaluation-harness that executes programs written by the model.",
        why="They would run in the harness' own process, beside the weights and your files.",
        advice="Take suite=code or tasks=humaneval,mbpp: tasks of Tunebook's own under the same names that only "
        "generate; the sandbox executes. A task file of yours does the same with `metadata.code`, as "
        "src/tunebook/evaluate/code/tasks/ shows.",
    ),
    "harness-missing": Explanation(
        summary="lm-evaluation-harness is not installed.",
        why="Evaluation runs in it.",
        advice="Install it with `pip install lm-eval`.",
    ),
    "heldout-too-long": Explanation(
        summary="Held-out prompts are longer than the model's context leaves room for.",
        why="The harness would cut their beginning, and the score would mean nothing.",
        advice="Shorten them, or lower generation_kwargs.max_gen_toks in the task's file.",
    ),
    "evaluation-failed": Explanation(
        summary="The evaluation ended with an error.",
        why="Its own message stands above. The training before it is untouched.",
        advice="Correct the cause and run `tunebook eval`.",
    ),
}
