"""Every recipe's card: its sections, its table of settings, its commands, and nothing that is not there."""

import shlex

import pytest

from tunebook.cli.options import split
from tunebook.config.book import book_root

from .conftest import Composed

RECIPES = book_root() / "recipes"
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))
OWN = {  # without an outside source
    "digits", "quickstart", "smollm2_135m_boolq", "smollm2_135m_dpo", "smollm2_135m_lora", "smollm2_135m_tools",
    "gemma3_270m_boolq", "llama31_8b_lora_fp8",
}  # fmt: skip
SECTIONS = ["Claim", "Hardware", "Commands", "What the source reports", "Settings", "Deviations", "Evidence"]
SOURCES = (
    "Distributed SFT with trl and DeepSpeed Part 2",
    "Fine-tuning Llama 2 70B using PyTorch FSDP",
    "Supervised Fine-Tuning for Large Language Models",
    "Fine-Tuning Large Language Models: A Guide",
    "Scaling model training with more",
    "recipes/configs/qwen3/4B_lora_single_device.yaml`",
    "recipes/configs/qwen3/8B_full.yaml`",
    "recipes/configs/qwen3/30B_A3B_full.yaml`",
    "Fine-Tune Gemma using Hugging Face Transformers and QLoRA",
    "Fine-Tune Gemma for Vision Tasks using Hugging Face Transformers and QLoRA",
    "examples/train_lora/qwen2_5vl_lora_sft.yaml`",
    "Tulu 3: Pushing Frontiers in Open Language Model Post-Training",
    "Fine-tuning with gpt-oss and Hugging Face Transformers",
    "read-me of LLaMA-Factory",
    "settings are those of the alignment handbook,",
    "settings are those\nof the alignment handbook,",
    "MLPerf Training, in [mlcommons/training]",
    "Training Beyond 1M Tokens",
)


def card(name: str) -> str:
    return (RECIPES / name / "README.md").read_text()


def commands(name: str) -> list[list[str]]:
    """The words of each command in the card's code blocks and of each `tunebook ...` or `make ...` in its text."""
    text = card(name)
    pieces = [line.strip() for block in text.split("```bash\n")[1:] for line in block.split("```")[0].splitlines()]
    pieces += [piece for line in text.splitlines() for piece in line.split("`")[1::2]]
    found = [shlex.split(piece) for piece in pieces if piece.startswith(("tunebook ", "make "))]
    return [words for words in found if len(words) > 2 or words[0] == "make"]


def as_request(words: list[str]) -> tuple[str, list[str]]:
    """The recipe and the overrides that a quoted command asks for."""
    if words[0] == "make":
        variables = dict(word.split("=", 1) for word in words[2:])
        words = [*words[:2], variables.get("RECIPE", "quickstart"), *shlex.split(variables.get("ARGS", ""))]
    recipe, overrides = split([word for word in words[2:] if not word.startswith("--")])
    assert recipe is not None
    return recipe, overrides


@pytest.mark.parametrize("name", NAMES)
def test_card_has_its_sections_and_a_table_of_settings_with_reasons(name: str) -> None:
    text = card(name)
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == SECTIONS
    rows = [line for line in text.split("## Settings")[1].split("## Deviations")[0].splitlines() if line[:1] == "|"]
    assert rows[0] == "| setting | source | here | why |" and len(rows) >= 5
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
    assert sum(source in text.split("## Hardware")[0] for source in SOURCES) == (name not in OWN)
    evidence = list((RECIPES / name / "evidence").glob("*.json"))
    assert ("None recorded yet." in text.split("## Evidence")[1]) == (not evidence)


@pytest.mark.parametrize("name", NAMES)
def test_commands_on_the_card_compose(name: str, composed: Composed) -> None:
    assert f"tunebook train {name} --dry-run" in card(name)
    assert any(words[:2] == ["make", "train"] and as_request(words)[0] == name for words in commands(name))
    for words in commands(name):
        recipe, overrides = as_request(words)
        composed(recipe, *overrides)
