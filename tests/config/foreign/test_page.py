"""The page for users of other tools lists every key of theirs that the tables have."""

from __future__ import annotations

import pytest

from tunebook.config.foreign import all_names, find_key
from tunebook.config.foreign.page import as_markdown, keys_of

TOOLS = ("TRL", "axolotl", "LLaMA-Factory")


def rows(tool: str) -> dict[str, list[str]]:
    """The cells behind each key in a tool's part of the page."""
    part = as_markdown().split(f"## Coming from {tool}\n")[1].split("\n## ")[0]
    found: dict[str, list[str]] = {}
    for line in part.splitlines():
        if line.startswith("| `"):
            keys, *cells = line.strip("| ").split(" | ")
            found |= {key.strip("`"): cells for key in keys.split(", ")}
    return found


def test_the_page_is_up_to_date(project_root):
    """`python -m tunebook.config.foreign.page > docs/coming_from.md` writes it."""
    assert (project_root / "docs" / "coming_from.md").read_text(encoding="utf-8") == as_markdown()


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_of_a_tool_has_one_row(tool):
    known = {name for name in all_names() if tool in find_key(name).tools_of(name).split(", ")}
    assert len(known) > 50
    assert known <= set(rows(tool))
    listed = [name for names, _ in keys_of(tool) for name in names]
    assert len(listed) == len(set(listed)) == len(rows(tool))


@pytest.mark.parametrize(
    ("tool", "key", "here"),
    [
        ("TRL", "gradient_accumulation_steps", "`training.global_samples=N`"),
        ("TRL", "max_steps", "-1, 0: `training.max_steps=null`<br>any other value: `training.max_steps=VALUE`"),
        ("axolotl", "sequence_len", "`training.max_length=VALUE`"),
        ("axolotl", "lora_on_cpu", "Adapters are LoRA or DoRA, without biases; peft.rank, alpha, dropout, "
         "target_modules, target_parameters, modules_to_save, use_rslora, use_dora, rank_pattern and alpha_pattern are "
         "what can be set."),
        ("LLaMA-Factory", "lora_target", "all or all-linear: `peft=lora peft.target_modules=[]`<br>any other value: "
         "`peft=lora 'peft.target_modules=[A,B]'`"),
    ],
)  # fmt: skip
def test_a_key_and_what_to_type(tool, key, here):
    assert rows(tool)[key][0] == here


def test_a_placeholder_is_no_tag():
    assert "&lt;recipe>/&lt;time>" in rows("axolotl")["output_dir"][1]
