"""Draw the images of the recipe `digits` and write its documents; the same each time.

    python recipes/digits/make_inputs.py [FOLDER]    write train.jsonl, heldout.jsonl and images/
    python recipes/digits/make_inputs.py --model     write the shipped model folder again, byte for byte

FOLDER is `inputs/digits` of the checkout by default, which git ignores. Drawing takes a quarter of a minute. An image
shows two digits, each in a color. The questions are on the number, the larger digit, and the colors. Twenty of the
hundred numbers are held out: no image to train on shows one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent / "quickstart"))
import model_files as quickstart  # noqa: E402

SEED = 1
NUM_TRAIN, NUM_HELDOUT = 20_000, 256
SIDE, PATCH = 32, 16  # pixels of an image and of a piece that becomes one token
COLORS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (60, 90, 240), "yellow": (225, 205, 40),
    "purple": (160, 60, 200),
}  # fmt: skip
IMAGE_TOKEN = "<image>"
VOCABULARY_SIZE = 384
# ChatML as the quickstart's, where a turn may be a list of images and texts.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message.content is string %}
        {{- message.content + '<|im_end|>' }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
Question = tuple[str, str]  # and its answer
Document = dict[str, Any]


def is_heldout(number: int) -> bool:
    """Two numbers of each first digit, and two of each last."""
    first, last = divmod(number, 10)
    return (last - first) % 10 in (2, 5)


def draw(number: int, colors: list[str], rng: random.Random) -> Image.Image:
    """Two digits on black, each of its own size, height and angle."""
    image = Image.new("RGB", (SIDE, SIDE))
    for place, (digit, color) in enumerate(zip(f"{number:02}", colors, strict=True)):
        mask = Image.new("L", image.size)
        center = (SIDE // 4 + place * SIDE // 2 + rng.randint(-1, 1), SIDE // 2 + rng.randint(-2, 2))
        font = ImageFont.load_default(size=rng.randint(18, 22))
        ImageDraw.Draw(mask).text(center, digit, fill=255, font=font, anchor="mm")
        image.paste(COLORS[color], mask=mask.rotate(rng.uniform(-8, 8), Image.Resampling.BILINEAR, center=center))
    return image


def questions(number: int, colors: list[str]) -> list[Question]:
    """All questions on an image."""
    digits = f"{number:02}"
    return [
        ("Which number is this?", digits),
        ("Which digit is larger?", max(digits)),
        ("Which colors are there?", " ".join(colors)),
    ]


def ask(of_image: list[Question], rng: random.Random, *, is_heldout: bool) -> list[Question]:
    """The questions of a document: one if it is held out, else the number and another one, in any order."""
    if is_heldout:
        return [rng.choice(of_image)]
    number, *others = of_image
    return rng.sample([number, rng.choice(others)], 2)


def write_documents(folder: Path, name: str, numbers: list[int], count: int, rng: random.Random) -> None:
    """Draw images of the numbers below the folder, and write NAME.jsonl with a document on each."""
    (folder / "images" / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(count):
        number, colors = rng.choice(numbers), [rng.choice([*COLORS]) for _ in range(2)]
        file = f"images/{name}/{index:05}.png"
        draw(number, colors, rng).save(folder / file)
        asked = ask(questions(number, colors), rng, is_heldout=name == "heldout")
        turns = []
        for question, answer in asked:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns[0]["content"] = f"{IMAGE_TOKEN}{turns[0]['content']}"
        group = {"task": asked[0][0]} if name == "heldout" else {}  # scores are shown by question, too
        lines.append(json.dumps({"messages": turns, "images": [file], **group}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_data(folder: Path, num_train: int = NUM_TRAIN, num_heldout: int = NUM_HELDOUT) -> None:
    """Write both files and the images below the folder."""
    rng = random.Random(SEED)
    write_documents(folder, "train", [n for n in range(100) if not is_heldout(n)], num_train, rng)
    write_documents(folder, "heldout", [n for n in range(100) if is_heldout(n)], num_heldout, rng)


def build_config(image_token_id: int) -> dict[str, Any]:
    """LLaVA's architecture: a SigLIP tower, a projector, and the quickstart's language model."""
    text = quickstart.build_config() | {"vocab_size": VOCABULARY_SIZE}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False,
    }  # fmt: skip
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": text.pop("dtype"),
        "image_token_index": image_token_id,
        "initializer_range": text["initializer_range"],
        "tie_word_embeddings": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": text,
        "vision_config": vision,
    }


def write_model(folder: Path) -> None:
    """Write the model folder without weights. The processor takes black for zero."""
    asked = [text for pair in questions(0, [*COLORS] * 2) for text in pair]
    texts = ["system\n", "user\n", "assistant\n", *asked, *COLORS] * 8  # often enough that a word is a token
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = quickstart.build_tokenizer(texts, VOCABULARY_SIZE)
    tokenizer.add_special_tokens([IMAGE_TOKEN])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", build_config(tokenizer.token_to_id(IMAGE_TOKEN))),
        ("generation_config.json", quickstart.build_generation_config()),
        ("tokenizer_config.json", quickstart.build_tokenizer_config()),
        ("processor_config.json", {
            "processor_class": "LlavaProcessor", "image_token": IMAGE_TOKEN, "patch_size": PATCH,
            "vision_feature_select_strategy": "full",
        }),
        ("preprocessor_config.json", {
            "image_processor_type": "SiglipImageProcessor", "processor_class": "LlavaProcessor",
            "size": {"height": SIDE, "width": SIDE}, "image_mean": [0.0] * 3, "image_std": [0.5] * 3,
        }),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def main() -> None:
    """Write the data, or the model folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER.parents[1] / "inputs" / "digits")
    parser.add_argument("--model", action="store_true", help="write the model folder instead, beside this script")
    asked = parser.parse_args()
    if asked.model:
        write_model(FOLDER / "model")
    else:
        write_data(asked.folder)
        print(f"wrote {asked.folder}")


if __name__ == "__main__":
    main()
