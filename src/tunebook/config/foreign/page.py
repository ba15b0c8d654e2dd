"""The page for users of other tools: `python -m tunebook.config.foreign.page` prints `docs/coming_from.md`.

Its tables are made from the YAML files of this folder. What a tool has in common with Tunebook is written here.
"""

from __future__ import annotations

import re

from tunebook.config.foreign import Foreign, commands, entries

_INTRODUCTION = """\
# Coming from other tools

This page lists the keys of TRL, axolotl and LLaMA-Factory, and what to type instead.
It is generated from `src/tunebook/config/foreign/`: `python -m tunebook.config.foreign.page > docs/coming_from.md`.

`tunebook explain NAME` prints one entry, also for keys of transformers, accelerate, DeepSpeed, torchtune, Megatron and
other tools. A key of another tool on the command line is an error that names the key to type. Configuration files of
other tools are not read.

`VALUE` stands for the value that you had. A choice such as `optimizer=adamw` selects a file of `hydra_configs/`.

## What differs from all three

- `training.global_samples` counts documents per optimizer step over all GPUs. It is the per-device batch x accumulation
  steps x GPUs of the other tool, if that tool does not pack.
- Accumulation steps are not set. They follow from `training.global_samples`, the number of GPUs and
  `training.micro_batch_size`.
- Packing does not change the number of documents per optimizer step.
- Packed documents never attend to each other. A probe verifies this before the first step.
- Evaluation is part of a run. With `evaluation=tasks` the model is evaluated after the training, and before it too with
  `evaluation.before=true`. The default is `evaluation=none`.
- Tunebook starts the ranks. Do not put torchrun, `accelerate launch` or `deepspeed` before the command.
- A run is checked and planned before a GPU is used. `--dry-run` prints the plan and stops.
- Only supervised fine-tuning is offered.
"""
_TOOLS = {
    "TRL": """\
Same:

- Tunebook trains with TRL's `SFTTrainer`.
- The formats `messages`, `prompt` and `completion`, and `text` are read without a setting.
- The learning rate of full fine-tuning is 2e-5 by default.

Different:

- With `messages`, the loss counts only the assistant's turns.
- With `messages`, TRL counts every token unless `assistant_only_loss` is set.
- `training.max_length` is 2,048 tokens by default. TRL's `max_length` is 1,024.
- `packing=auto` is the default. TRL pads unless `packing` is set.
""",
    "axolotl": """\
Same:

- A run is described by one YAML file. Here it is a recipe in a folder that `--recipes-dir` names.
- The loss does not count prompts unless that is asked for.

Different:

- `micro_batch_size` counts rows, and it is chosen by the plan if it is not set.
- `sample_packing` is `packing=isolated`. The default is `packing=auto`.
- `val_set_size` is `dataset.validation_share`, which takes a share and not a number of documents.
- The format of the data is detected. `datasets.type` is not needed.
""",
    "LLaMA-Factory": """\
Same:

- The formats alpaca and ShareGPT are read without a setting.
- The loss does not count prompts unless that is asked for.

Different:

- There is no `dataset_info.json`. `dataset=jsonl dataset.path=FILE` names a file.
- Templates are not named after model families. The chat template is that of the model's tokenizer.
  `model.chat_template` names a Jinja file, or one of TRL's templates.
- `neat_packing` is `packing=isolated`. Packing without isolation is not offered.
- `cutoff_len` is `training.max_length`.
""",
}


def keys_of(tool: str) -> list[tuple[list[str], Foreign]]:
    """Every entry that has keys of a tool, with those keys, in the order of the tables."""
    found = (
        ([name for name, _ in entry.names if tool in entry.tools_of(name).split(", ")], entry) for entry in entries()
    )
    return [(names, entry) for names, entry in found if names]


def as_markdown() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for tool, text in _TOOLS.items():
        offered = [(names, entry) for names, entry in keys_of(tool) if entry.is_offered]
        refused = [(names, entry) for names, entry in keys_of(tool) if not entry.is_offered]
        lines += [f"## Coming from {tool}\n\n{text}", f"### Keys of {tool}\n", "| key | here | note |", "|---|---|---|"]
        lines += [_row(_code(names), _here(entry), entry.say) for names, entry in offered]
        lines += [f"\n### Keys of {tool} that are not offered\n", "| key | why |", "|---|---|"]
        lines += [_row(_code(names), entry.say) for names, entry in refused]
        lines.append("")
    lines += [
        "## Commands\n",
        "Commands of any of the three tools, and of others.\n",
        "| command | here | note |",
        "|---|---|---|",
    ]
    lines += [_row(_code([name for name, _ in entry.names]), _command(entry), entry.say) for entry in commands()]
    return "\n".join(lines) + "\n"


def _here(entry: Foreign) -> str:
    """What to type, by value if that depends on it."""
    if len(entry.forms) == 1:
        return f"`{entry.forms[0].shown}`"
    return "<br>".join(f"{form.values}: {f'`{form.shown}`' if form.type else form.shown}" for form in entry.forms)


def _command(entry: Foreign) -> str:
    form = entry.forms[0] if entry.forms else None
    return f"`{' '.join((form.type or '').replace('{words}', '').split())}`" if form else "not offered"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(*cells: str) -> str:
    """A row of a table; `<` of a placeholder such as <recipe> is no tag."""
    cells = tuple(re.sub(r"<(?!br>)", "&lt;", cell) for cell in cells)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(as_markdown(), end="")
