"""Images in conversations: every way to write them, what is refused, and tokens and pixels as the model's processor."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from datasets import Dataset, List
from datasets import Image as Picture
from PIL import Image
from torch.utils.data import DataLoader

from tests.image_models import FAMILIES, draw_image, load_processor, write_model
from tunebook.commands.data_page import write_page
from tunebook.config.choices import ModelPart, Overlong, PackingMode, Source, TrainOn
from tunebook.config.frozen import plain_config
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import DatasetConfig, ModelConfig, PackingConfig, RunConfig, TrainingConfig
from tunebook.data.images import open_image
from tunebook.data.prepare import prepare
from tunebook.data.sampler import IMAGES
from tunebook.data.sources import begins_with_images
from tunebook.errors import DataError, RequestError
from tunebook.files import sha256_file
from tunebook.model.processor import load_image_processor, scaled_size
from tunebook.model.tokenizer import load_tokenizer

Make = Callable[..., RunConfig]
TEXT_ALONE = ModelFacts(architecture="Qwen3_5ForCausalLM", vocab_size=512, dtype="float32")
WHAT = {"type": "text", "text": "What?"}


@pytest.fixture(scope="session", params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, one of each family, with TRL's template that marks answers."""
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_model(folder, family, has_weights=False, template=f"{family.template}_training")


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen", FAMILIES["qwen2_5_vl"], has_weights=False)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A run over documents that are written to `data/train.jsonl`, with two pictures in `data/pictures`."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    draw_image(0, 100, 60).save(folder / "pictures" / "a.png")
    draw_image(1, 40, 40).save(folder / "pictures" / "b.png")

    def make(model: Path, documents: list[dict[str, Any]], max_length: int = 1024, **dataset: Any) -> RunConfig:
        (folder / "train.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        return plain_config(
            model=ModelConfig(path=str(model)),
            dataset=DatasetConfig(path=str(folder / "train.jsonl"), num_workers=1, **dataset),
            packing=PackingConfig(mode=PackingMode.padded),
            training=TrainingConfig(global_samples=1, max_length=max_length),
        )

    return make


def asked(content: Any, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    return {"messages": turns, **more}


def prepared(config: RunConfig) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = prepare(config).train.load().to_list()
    return rows


def test_tokens_masks_and_pixels_are_those_of_the_processor(family_folder: Path, data: Make, tmp_path: Path) -> None:
    pictures = [tmp_path / "data" / "pictures" / name for name in ("a.png", "b.png")]
    first = [
        {"type": "image", "image": str(pictures[0])}, {"type": "text", "text": "What is"},
        {"type": "image", "image": str(pictures[1])}, {"type": "text", "text": "this?"},
    ]  # fmt: skip
    talk = [("user", first), ("assistant", "A cat."), ("user", "And now?"), ("assistant", "Still.")]
    in_parts = [
        {"role": role, "content": content if isinstance(content, list) else [{"type": "text", "text": content}]}
        for role, content in talk
    ]
    (row,) = prepared(
        data(family_folder, [{"messages": [{"role": role, "content": content} for role, content in talk]}])
    )
    model = ModelConfig(path=str(family_folder))
    tokenizer = load_tokenizer(model)
    theirs = load_processor(family_folder, tokenizer)
    expected = theirs.apply_chat_template(
        in_parts,
        chat_template=tokenizer.chat_template,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"add_special_tokens": False},
    )
    assert row["input_ids"] == expected.pop("input_ids")[0].tolist()
    assert [int(label != -100) for label in row["labels"]] == expected.pop("assistant_masks")[0].tolist()
    assert [reference.partition(" ")[2] for reference in row[IMAGES]] == list(map(str, pictures))
    processor = load_image_processor(model, tokenizer)
    inputs = processor.pixels([open_image(reference) for reference in row[IMAGES]])
    inputs |= processor.token_types(torch.tensor([row["input_ids"]]))
    del expected["attention_mask"]
    assert inputs.keys() == expected.keys()
    assert all(torch.equal(inputs[name], value) for name, value in expected.items())


def test_templates_for_other_fields_name_the_place_of_an_image(qwen_folder: Path, data: Make) -> None:
    document = {"image": "pictures/a.png", "kind": "animal", "told": "A cat."}
    templates = {"question_template": "<image>Which {{kind}}?", "answer_template": "{{told}}"}
    (row,) = prepared(data(qwen_folder, [document], **templates))
    assert [Path(reference.partition(" ")[2]).name for reference in row[IMAGES]] == ["a.png"]


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: asked([{"type": "image", "image": "pictures/a.png"}, WHAT]),
        lambda folder: asked([{"type": "image", "path": str(folder / "pictures" / "a.png")}, WHAT]),
        lambda folder: asked([{"type": "image_url", "image_url": {"url": data_url(folder)}}, WHAT]),
        lambda folder: asked([{"type": "input_image", "image_url": data_url(folder)}, WHAT]),
        lambda folder: asked([{"type": "image", "base64": data_url(folder).partition(",")[2]}, WHAT]),
        lambda folder: asked([{"type": "image"}, WHAT], images=["pictures/a.png"]),
        lambda folder: asked("<image>What?", images=[{"path": "pictures/a.png", "bytes": None}]),
        lambda folder: asked("<image>What?", images=[{"base64": data_url(folder).partition(",")[2]}]),
        lambda folder: asked("<image>What?", image="pictures/a.png"),
        lambda folder: {
            "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A cat."}],
            "images": ["pictures/a.png"],
        },
        lambda folder: {"instruction": "<image>What?", "output": "A cat.", "images": ["pictures/a.png"]},
    ],
)  # fmt: skip
def test_every_way_to_write_an_image_is_one_document(
    form: Callable[[Path], dict[str, Any]], data: Make, qwen_folder: Path, tmp_path: Path
) -> None:
    (row,) = prepared(data(qwen_folder, [form(tmp_path / "data")]))
    (reference,) = row[IMAGES]
    digest, _, path = reference.partition(" ")
    file = tmp_path / "data" / "pictures" / "a.png"
    assert digest == sha256_file(file) == sha256_file(Path(path))
    text = load_tokenizer(ModelConfig(path=str(qwen_folder))).decode(row["input_ids"])
    assert text.count("<|image_pad|>") == 8  # 112 x 56 pixels, a token for 28 x 28
    assert text.endswith("<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n")


def data_url(folder: Path) -> str:
    return "data:image/png;base64," + base64.b64encode((folder / "pictures" / "a.png").read_bytes()).decode()


def test_bytes_in_parquet_and_in_a_folder_of_the_hub(data: Make, qwen_folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    picture = (tmp_path / "data" / "pictures" / "a.png").read_bytes()
    table = pa.Table.from_pylist([asked("<image>What?", images=[{"bytes": picture, "path": None}]), asked("Hi")])
    config = data(qwen_folder, [])
    pq.write_table(table, tmp_path / "data" / "train.parquet")
    of_file = replace(config, dataset=replace(config.dataset, path=str(tmp_path / "data" / "train.parquet")))
    assert [len(row[IMAGES]) for row in prepared(of_file)] == [1, 0]
    rows = Dataset.from_list([asked("<image>What?", images=[draw_image(0, 100, 60)])])
    (tmp_path / "hub").mkdir()
    rows.cast_column("images", List(Picture())).to_parquet(tmp_path / "hub" / "train.parquet")
    named = DatasetConfig(source=Source.hub, name=str(tmp_path / "hub"), num_workers=1)
    assert [len(row[IMAGES]) for row in prepared(replace(config, dataset=named))] == [1]


@pytest.fixture(scope="session")
def large_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a few kilobytes with 100 and 400 million pixels."""
    folder = tmp_path_factory.mktemp("large")
    Image.new("1", (10_000, 10_000)).save(folder / "large.png")
    Image.new("1", (20_000, 20_000)).save(folder / "huge.png")
    return folder


TWO = [{"type": "image"}, {"type": "image"}, WHAT]
IN_TURN = [{"role": "user", "content": "What?", "images": ["a.png"]}, {"role": "assistant", "content": "A cat."}]
DRAWN = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": "<image>"}]


@pytest.mark.parametrize(
    ("document", "problem_id", "named"),
    [
        (asked([{"type": "image", "image": "no.png"}]), "data-image", ["image 1 of turn 1 (user)", "no.png does not"]),
        (asked("<image>What?", images=["a\0.png"]), "data-image", ["cannot be read: embedded null"]),
        (asked("<image>What?", images=["empty.png"]), "data-image", ["empty.png has no bytes"]),
        (asked("<image>What?", images=["text.png"]), "data-image", ["no image that Pillow knows"]),
        (asked("<image>What?", images=["half.png"]), "data-image", ["half.png", "broken"]),
        (asked("<image>What?", images=["wide.tiff"]), "data-image", ["wide.tiff", "32 bits"]),
        (asked("<image>What?", images=["large.png"]), "data-image", ["too large", "10,000 x 10,000"]),
        (asked("<image>What?", images=["huge.png"]), "data-image", ["too large", "89,478,485 pixels"]),
        (asked("<image>What?", image_path="a.png"), "data-media", ["'image_path'", "under 'images'"]),
        (asked("<image>What?", images=["thin.png"]), "data-image", ["image 1 of the document", "1 x 300"]),
        (asked("<image>What?", images=["https://example.com/a.png"]), "data-image-url", ["download_images=true"]),
        (asked("<image>What?", images=["data:image/png;base64,%%"]), "data-image", ["broken data URL"]),
        (asked("<image>What?", images=[{"source": "a.png"}]), "data-image", ["keys are: source", "known are bytes"]),
        ({"messages": IN_TURN}, "data-key-not-supported", ["turn 1 (user)", "under 'images' of the document"]),
        (asked("<image>What?", images=[]), "data-image-marks", ["0 images", "1 mark (turn 1 (user): 1)"]),
        (asked("What?", images=["a.png"]), "data-image-marks", ["1 image", "0 marks"]),
        (asked(TWO, images=["a.png"]), "data-image-marks", ["1 image", "2 marks"]),
        (asked("<image>What?", images=["a.png"], image="a.png"), "data-image", ["images and image"]),
        ({"messages": DRAWN, "images": ["a.png"]}, "data-image", ["turn 2 (assistant)"]),
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_used_names_line_and_turn(
    document: dict[str, Any],
    problem_id: str,
    named: list[str],
    data: Make,
    qwen_folder: Path,
    large_images: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    whole = (folder / "pictures" / "a.png").read_bytes()
    (folder / "a.png").write_bytes(whole)
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    for name in ("large.png", "huge.png"):
        (folder / name).symlink_to(large_images / name)
    draw_image(0, 1, 300).save(folder / "thin.png")
    Image.new("F", (28, 28), 0.5).save(folder / "wide.tiff")
    with pytest.raises(DataError) as caught:
        prepare(data(qwen_folder, [asked("Hi"), document]))
    assert caught.value.problem_id == problem_id
    assert all(text in caught.value.message for text in ["train.jsonl", "2: ", *named])


def test_marks_without_a_list_of_images_are_text(data: Make, qwen_folder: Path) -> None:
    made = prepare(data(qwen_folder, [asked("What does <image> mean in HTML?"), asked("Hi")]))
    assert not made.has_images
    assert [note for note in made.notes if note.endswith("documents with <image> as text, since they name no image: 1")]


def test_a_changed_image_is_prepared_again(data: Make, qwen_folder: Path, tmp_path: Path) -> None:
    config = data(qwen_folder, [asked("<image>What?", images=["pictures/a.png"])])
    first = prepare(config)
    assert prepare(config).was_cached
    draw_image(5, 100, 60).save(tmp_path / "data" / "pictures" / "a.png")
    changed = prepare(config)
    assert not changed.was_cached and changed.fingerprint != first.fingerprint
    assert changed.content_sha256 != first.content_sha256, "other pixels, with the same tokens"
    draw_image(0, 100, 60).save(tmp_path / "data" / "pictures" / "a.png")
    assert prepare(config).content_sha256 == first.content_sha256
    (tmp_path / "data" / "pictures" / "a.png").unlink()
    with pytest.raises(DataError, match="does not exist"):
        prepare(config)


def test_images_that_moved_are_found_at_their_new_place(data: Make, qwen_folder: Path, tmp_path: Path) -> None:
    config = data(qwen_folder, [asked("<image>What?", images=["pictures/a.png"])])
    first = prepare(config)
    assert first.image_folders == [str(tmp_path / "data" / "pictures")]
    assert config.dataset.path is not None
    (tmp_path / "data").rename(tmp_path / "moved")
    path = tmp_path / "moved" / Path(config.dataset.path).name
    moved = prepare(replace(config, dataset=replace(config.dataset, path=str(path))))
    assert moved.content_sha256 == first.content_sha256
    open_image(moved.train.load()[0][IMAGES][0])


def test_equal_documents_in_another_folder_have_its_images(data: Make, qwen_folder: Path, tmp_path: Path) -> None:
    config = data(qwen_folder, [asked("<image>What?", images=["pictures/a.png"])])
    first = prepare(config)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    draw_image(5, 60, 100).save(tmp_path / "copy" / "pictures" / "a.png")
    copy = prepare(replace(config, dataset=replace(config.dataset, path=str(tmp_path / "copy" / "train.jsonl"))))
    assert copy.image_folders == [str(tmp_path / "copy" / "pictures")]
    assert copy.content_sha256 != first.content_sha256 and prepare(config).was_cached


def test_transparent_images_are_on_white_and_16_bits_become_8(family_folder: Path, tmp_path: Path) -> None:
    processor = load_image_processor(
        ModelConfig(path=str(family_folder)), load_tokenizer(ModelConfig(path=str(family_folder)))
    )
    image = draw_image(0, 60, 40).convert("RGBA")
    image.putalpha(draw_image(1, 60, 40).convert("L"))
    image.save(tmp_path / "a.png")
    theirs = processor.pixels([image])
    assert all(
        torch.equal(theirs[name], value)
        for name, value in processor.pixels([open_image(f"- {tmp_path}/a.png")]).items()
    )
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(f"- {tmp_path}/clear.png").getpixel((0, 0)) == (255, 255, 255)
    Image.new("I;16", (4, 4), 51 * 257).save(tmp_path / "gray.png")
    assert open_image(f"- {tmp_path}/gray.png").getpixel((0, 0)) == (51, 51, 51)


def test_an_image_that_is_gone_is_named_without_a_traceback(tmp_path: Path) -> None:
    draw_image(0, 60, 40).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:900])
    for name, reason in (("gone.png", "No such file"), ("cut.png", "truncated")):
        loader = DataLoader([f"- {tmp_path}/{name}"], num_workers=1, collate_fn=lambda rows: open_image(rows[0]))
        with pytest.raises(DataError, match=f"^the image .*{name} was read .*: .*{reason}"):
            next(iter(loader))


def test_larger_images_are_scaled_down(data: Make, qwen_folder: Path) -> None:
    document = asked("<image>What?", images=["pictures/a.png"])
    config = data(qwen_folder, [document], max_image_pixels=3 * 28 * 28)
    (row,) = prepared(config)
    tokenizer = load_tokenizer(config.model)
    processor = load_image_processor(config.model, tokenizer, config.dataset.max_image_pixels)
    width, height = scaled_size((100, 60), 3 * 28 * 28)
    assert width * height <= 3 * 28 * 28 < (width + 1) * (height + 1) and width / height == pytest.approx(
        5 / 3, rel=0.05
    )
    pixels = processor.pixels([open_image(row[IMAGES][0])])
    (token,) = processor.token_ids
    assert row["input_ids"].count(token) == int(pixels["image_grid_thw"].prod()) // 4 == 2


def test_a_long_document_is_cut_before_an_image(data: Make, qwen_folder: Path) -> None:
    talk = [("user", "<image>One?"), ("assistant", "Yes."), ("user", "<image>Two?"), ("assistant", "No.")]
    document = {
        "messages": [{"role": role, "content": content} for role, content in talk],
        "images": ["pictures/a.png", "pictures/a.png"],
    }
    (whole,) = prepared(data(qwen_folder, [document]))
    (token,) = load_image_processor(
        ModelConfig(path=str(qwen_folder)), load_tokenizer(ModelConfig(path=str(qwen_folder)))
    ).token_ids
    second = [place for place, id in enumerate(whole["input_ids"]) if id == token][8]
    (cut,) = prepared(data(qwen_folder, [document], max_length=second + 5))
    assert cut["input_ids"] == whole["input_ids"][:second] and cut[IMAGES] == whole[IMAGES][:1]
    everything = data(qwen_folder, [document], max_length=40, train_on=TrainOn.everything)
    assert not prepared(everything)[0][IMAGES] and not prepare(everything).train.counts.contents
    with pytest.raises(DataError) as caught:
        prepare(data(qwen_folder, [document], max_length=second + 5, overlong=Overlong.split))
    assert caught.value.problem_id == "document-too-long"


def test_image_tokens_are_never_trained(data: Make, qwen_folder: Path) -> None:
    config = data(qwen_folder, [asked("<image>What?", images=["pictures/a.png"])], train_on=TrainOn.everything)
    (row,) = prepared(config)
    left_out = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]
    (token,) = load_image_processor(config.model, load_tokenizer(config.model)).token_ids
    assert left_out == [row["input_ids"][0], *[token] * 8]


def test_results_of_tools_may_have_images(data: Make, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "qwen3", FAMILIES["qwen3_vl"], has_weights=False)
    call = {"type": "function", "function": {"name": "draw", "arguments": {"what": "a cat"}}}
    picture = {"type": "image", "image": "pictures/b.png"}
    messages = [
        {"role": "user", "content": "Draw a cat."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [picture, {"type": "text", "text": "done"}]},
        {"role": "assistant", "content": "Here it is."},
    ]
    (row,) = prepared(data(folder, [{"messages": messages}]))
    text = load_tokenizer(ModelConfig(path=str(folder))).decode(row["input_ids"])
    assert "<tool_response>\n<|vision_start|><|image_pad|>" in text and len(row[IMAGES]) == 1
    system = {"role": "system", "content": [picture]}
    with pytest.raises(DataError, match="system or tool turn") as caught:
        prepare(data(folder, [{"messages": [system, *messages[::3]]}]))
    assert caught.value.problem_id == "template-leaves-out"


def test_settings_that_images_do_not_have(data: Make, qwen_folder: Path, tokenizer_folder: Callable[..., Path]) -> None:
    config = data(qwen_folder, [asked("<image>What?", images=["pictures/a.png"])])
    refusals = {
        "images-packed": replace(config, packing=PackingConfig(mode=PackingMode.isolated)),
        "images-in-groups": replace(config, parallelism=replace(config.parallelism, sequence_group_size=2)),
    }
    without = [ModelConfig(path=str(tokenizer_folder("text"))), replace(config.model, facts=TEXT_ALONE)]
    others = [("model-without-images", replace(config, model=model)) for model in without]
    for problem_id, refused in [*refusals.items(), *others]:
        with pytest.raises(RequestError) as caught:
            prepare(refused)
        assert caught.value.problem_id == problem_id
    config = data(qwen_folder, [asked("Hi")])
    with pytest.raises(RequestError) as caught:
        prepare(replace(config, model=replace(config.model, train=[ModelPart.language, ModelPart.vision])))
    assert caught.value.problem_id == "train-without-images"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (asked("<image>What?", images=["a.png"]), True),
        (asked([{"type": "image_url", "image_url": {"url": "a"}}]), True),
        (asked('What does "images": [1] mean?'), False),
    ],
)
def test_images_are_seen_before_the_data_is_prepared(
    document: dict[str, Any], expected: bool, data: Make, qwen_folder: Path
) -> None:
    assert begins_with_images(data(qwen_folder, [document]).dataset) is expected


def test_samples_are_shown_with_their_images(data: Make, qwen_folder: Path, tmp_path: Path) -> None:
    question = "<image>What is <b>this</b>?"
    config = data(qwen_folder, [asked(question, images=["pictures/a.png"]), asked("Hi")])
    write_page(prepare(config), load_tokenizer(config.model), tmp_path / "page.html", num_samples=2)
    page = (tmp_path / "page.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 1
    assert "&lt;|image_pad|&gt; x 8" in page and "<mark>A cat.&lt;|im_end|&gt;</mark>" in page
    assert "&lt;b&gt;this" in page, "text of documents is no markup"


def test_images_are_fetched_only_if_asked_for(data: Make, qwen_folder: Path, tmp_path: Path) -> None:
    handler = partial(QuietHandler, directory=str(tmp_path / "data" / "pictures"))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in ("a.png", "none.png")]
        found = data(qwen_folder, [asked("<image>What?", images=urls[:1])], download_images=True)
        (row,) = prepared(found)
        assert row[IMAGES][0].partition(" ")[0] == sha256_file(tmp_path / "data" / "pictures" / "a.png")
        draw_image(3, 40, 40).save(tmp_path / "data" / "pictures" / "ä b.png")
        prepare(data(qwen_folder, [asked("<image>What?", images=[f"{urls[0][:-5]}ä b.png"])], download_images=True))
        for url in (urls[1], f"{urls[0]} b"):
            missing = data(qwen_folder, [asked("<image>What?", images=[url])], download_images=True)
            with pytest.raises(DataError, match="cannot be fetched"):
                prepare(missing)
        (tmp_path / "data" / "pictures" / "late.png").write_text("come back later")
        late = data(qwen_folder, [asked("<image>What?", images=[f"{urls[0][:-5]}late.png"])], download_images=True)
        with pytest.raises(DataError, match="no image"):
            prepare(late)
        draw_image(2, 40, 40).save(tmp_path / "data" / "pictures" / "late.png")
        prepare(late)
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_files_as_they_were_published(family: str, data: Make, tmp_path: Path) -> None:
    """Without a processor_config.json, older names of limits, a processor that needs torchvision, a JSON template."""
    folder = write_model(tmp_path / family, FAMILIES[family], has_weights=False)
    document = asked("<image>What?", images=["pictures/a.png"])
    expected = prepared(data(folder, [document]))
    (folder / "processor_config.json").unlink()
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    size = settings.pop("size")
    settings |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    settings["image_processor_type"] += "Fast"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    template = {"chat_template": (folder / "chat_template.jinja").read_text()}
    (folder / "chat_template.json").write_text(json.dumps(template))
    (folder / "chat_template.jinja").unlink()
    assert prepared(data(folder, [document])) == expected
