"""Every recipe's card: its sections, its table of settings, its commands, and nothing that is not there."""

import shlex
from functools import cache

import pytest

from tunebook.config.book import book_root
from tunebook.config.compose import compose

RECIPES = book_root() / "recipes"
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))
OWN = {"quickstart", "smollm2_135m_boolq", "smollm2_135m_lora", "smollm2_135m_tools"}  # without an outside source

SECTIONS = ["Claim", "Hardware", "Commands", "What the source reports", "Settings", "Deviations", "Evidence"]


@cache
def composes(recipe: str, *overrides: str) -> None:
    """Raises: RequestError where a quoted command is wrong. Cards repeat commands, so each is tried once."""
    compose(recipe, list(overrides))


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
    if words[0] == "tunebook":
        return words[2], [word for word in words[3:] if not word.startswith("--")]
    variables = dict(word.split("=", 1) for word in words[2:])
    return variables.get("RECIPE", "quickstart"), shlex.split(variables.get("ARGS", ""))


@pytest.mark.parametrize("name", NAMES)
def test_card_has_its_sections_in_order_on_one_page(name: str) -> None:
    headings = [line[3:] for line in card(name).splitlines() if line.startswith("## ")]
    assert headings == SECTIONS
    assert card(name).startswith(f"# {name}: ")
    written, _, rest = card(name).partition("<!-- made from evidence")
    assert len((written + rest.partition("<!-- end of evidence -->")[2]).splitlines()) <= 80  # beside what is generated


@pytest.mark.parametrize("name", NAMES)
def test_card_has_a_table_of_settings_with_reasons(name: str) -> None:
    table = card(name).split("## Settings")[1].split("## Deviations")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == "| setting | source | here | why |"
    assert len(rows) >= 5
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


@pytest.mark.parametrize("name", NAMES)
def test_card_says_how_to_look_first_and_how_to_run(name: str) -> None:
    asked = [(words[0], words[1], *as_request(words)) for words in commands(name) if words[1] == "train"]
    assert any(recipe == name and f"tunebook train {name} --dry-run" in card(name) for _, _, recipe, _ in asked)
    assert any(program == "make" and recipe == name for program, _, recipe, _ in asked)


@pytest.mark.parametrize("name", NAMES)
def test_commands_on_the_card_compose(name: str) -> None:
    for words in commands(name):
        recipe, overrides = as_request(words)
        assert recipe in NAMES, words
        composes(recipe, *[override for override in overrides if not override.startswith("--")])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN])
def test_card_names_the_source_of_the_claim(name: str) -> None:
    titles = (
        "Distributed SFT with trl and DeepSpeed Part 2",
        "Fine-tuning Llama 2 70B using PyTorch FSDP",
        "Supervised Fine-Tuning for Large Language Models",
        "Fine-Tuning Large Language Models: A Guide",
        "Scaling model training with more",
        "recipes/configs/qwen3/4B_lora_single_device.yaml`",
        "recipes/configs/qwen3/8B_full.yaml`",
        "recipes/configs/qwen3/30B_A3B_full.yaml`",
        "Fine-Tune Gemma using Hugging Face Transformers and QLoRA",
        "Tulu 3: Pushing Frontiers in Open Language Model Post-Training",
        "Fine-tuning with gpt-oss and Hugging Face Transformers",
        "read-me of LLaMA-Factory",
        "MLPerf Training, in [mlcommons/training]",
        "Training Beyond 1M Tokens",
    )
    claim = card(name).split("## Hardware")[0]
    assert sum(title in claim for title in titles) == 1


@pytest.mark.parametrize("name", NAMES)
def test_card_claims_no_evidence_that_is_not_there(name: str) -> None:
    evidence = list((RECIPES / name / "evidence").glob("*.json"))
    says_none = "None recorded yet." in card(name).split("## Evidence")[1]
    assert says_none == (not evidence)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_named_on_the_card_exist(name: str) -> None:
    families = (
        "qwen", "llama2_", "llama3_", "llama31_", "zero1_", "zero2_", "zero3_", "dolly3b_", "smollm2_",
        "gemma3_", "olmo3_", "gpt_oss_",
    )  # fmt: skip
    words = {piece for line in card(name).splitlines() for piece in line.split("`")[1::2] if piece.startswith(families)}
    known = set(NAMES) | {choice.stem for choice in (book_root() / "hydra_configs").glob("*/*.yaml")}
    assert sorted(words - known) == []
