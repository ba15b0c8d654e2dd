"""The texts for errors of `tunebook chat`, by `problem_id`."""

from __future__ import annotations

from tunebook.plan.rules.frame import Explanation

CHAT: dict[str, Explanation] = {
    "chat-no-text": Explanation(
        summary="There is no text to answer.",
        why="A question or system prompt is empty, or its bytes are not UTF-8, which every tokenizer here reads.",
        advice="Write one with --prompt, pipe it in, or start the command in a terminal and type; convert other "
        "encodings with iconv.",
    ),
    "chat-setting": Explanation(
        summary="A setting of the answers that no answer can have.",
        why="An answer has at least one token, and a temperature is 0 (always the likeliest token) or above.",
        advice="Give a value as the message says.",
    ),
    "chat-too-long": Explanation(
        summary="One question alone is longer than the model's context.",
        why="Older questions are left out where a conversation grows too long, but the last one is what is to be "
        "answered. Cutting it in silence would answer another question.",
        advice="Shorten it, or ask about one part after the other.",
    ),
    "chat-out-of-memory": Explanation(
        summary="The GPU ran out of memory while answering.",
        why="What the model remembers of a conversation grows with its length, beside the weights.",
        advice="Type /reset for a new conversation, lower --max-new-tokens, or end what else runs on the GPU.",
    ),
    "chat-save": Explanation(
        summary="The conversation cannot be saved there.",
        why="It is written as one line of JSONL, the format `messages`, and never over a file that it did not write.",
        advice="Type /save FILE.jsonl with a new name in a folder that you may write to.",
    ),
    "chat-command": Explanation(
        summary="A line that begins with a slash and is no command.",
        why="A misspelt command would otherwise be answered as a question.",
        advice="/help lists the commands; a space before the slash sends the line as it is.",
    ),
    "model-does-not-fit": Explanation(
        summary="The model does not fit into the memory of the GPUs.",
        why="A chat tried it as loaded, with its weights rounded to the format it computes in, and spread over all "
        "GPUs that the process may use. An evaluation rounds nothing: a copy on each GPU, or one model spread over "
        "all. What other programs hold there is missing for it.",
        advice="End what else runs there (nvidia-smi shows it), allow more GPUs with CUDA_VISIBLE_DEVICES, or put "
        "CUDA_VISIBLE_DEVICES= before the command to use the CPU.",
    ),
    "adapter-without-base": Explanation(
        summary="An adapter whose base model is not here.",
        why="An adapter is the difference to the model it was trained on, named in its adapter_config.json; alone it "
        "cannot answer.",
        advice="Copy the base model here and correct base_model_name_or_path, or export the run as a whole model with "
        "`tunebook export RUN`.",
    ),
}
