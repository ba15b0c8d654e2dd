"""Evaluation on held-out conversations with images: what the model reads is what transformers' own processor makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.evaluate.conftest import cpu_run
from tests.image_models import FAMILIES, draw_image, load_processor, write_model
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import DatasetConfig, ModelConfig
from tunebook.errors import DataError, RequestError
from tunebook.evaluate.contamination import check_evaluated
from tunebook.evaluate.fetch import require_tasks
from tunebook.evaluate.harness import HarnessSettings, load_tasks, run_task
from tunebook.evaluate.request_model import RequestModel
from tunebook.evaluate.results import choose_samples, task_answers, task_scores
from tunebook.evaluate.task_files import read_task_file
from tunebook.model.processor import load_image_processor
from tunebook.model.tokenizer import load_tokenizer
from tunebook.record.scores import pair_samples

pytestmark = pytest.mark.usefixtures("quiet_harness")

TASK: dict[str, Any] = {
    "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "target_delimiter": "",
    "metadata": {"version": 1.0, "conversations": "held.jsonl"},
}  # fmt: skip
WRITTEN = TASK | {
    "task": "written", "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 6},
}  # fmt: skip
CHOICES = ["red", "blue green"]
CHOSEN = TASK | {
    "task": "chosen", "output_type": "multiple_choice", "doc_to_choice": CHOICES, "metric_list": [{"metric": "acc"}],
}  # fmt: skip
# The first two have the same text, and images of the same size.
QUESTIONS = [("What?", [0]), ("What?", [1]), ("And these two?", [2, 0]), ("Without one?", [])]
SIZES = [(60, 40), (60, 40), (40, 90)]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", FAMILIES[request.param])


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", FAMILIES["qwen2_5_vl"])


@pytest.fixture
def task_of(tmp_path: Path) -> Callable[..., Path]:
    """`task_of(WRITTEN)`: a task's file, with the questions and their images beside it."""

    def write(task: dict[str, Any], answer: str = "red") -> Path:
        for seed, size in enumerate(SIZES):
            draw_image(seed, *size).save(tmp_path / f"{seed}.png")
        lines = []
        for text, images in QUESTIONS:
            turns = [{"role": "user", "content": "<image>" * len(images) + text}]
            turns += [{"role": "assistant", "content": answer}]
            lines.append({"messages": turns, "images": [f"{image}.png" for image in images]})
        (tmp_path / "held.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))
        return tmp_path / f"{task['task']}.yaml"

    return write


def evaluated(folder: Path, task: Path, batch_size: int = 3) -> tuple[dict[str, Any], Any, Any]:
    """The harness' results, the model, and transformers' own processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "projection_weight" in name:  # Gemma 3's projector is zero at first, so that it sees no image
            torch.nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(0))
    settings = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(settings, is_padded=False)
    load = partial(load_image_processor, settings, tokenizer)
    harness = HarnessSettings(
        tokenizer=tokenizer, max_length=2048, num_fewshot=None, limit=None, system_prompt=None, load_processor=load
    )
    cache = task.parent / "cache"
    cache.mkdir(exist_ok=True)
    (loaded,) = load_tasks([read_task_file(task)], cache, harness)
    request_model = RequestModel(
        model, tokenizer, batch_size=batch_size, compute_dtype=None, folder=cache / "kept", identity={},
        load_processor=load,
    )  # fmt: skip
    return run_task(request_model, loaded, harness), model, load_processor(folder, tokenizer)


def inputs_of(processor: Any, text: str, images: list[int], answer: str = "") -> Any:
    """The model's inputs for a question as transformers makes them, with the beginning of an answer."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    pictures = [draw_image(image, *SIZES[image]) for image in images]
    return processor(text=prompt + answer, images=pictures or None, return_tensors="pt", add_special_tokens=False)


def test_answers_are_those_of_the_model_alone(family: Path, task_of: Callable[..., Path]) -> None:
    results, model, processor = evaluated(family, task_of(WRITTEN))
    answers = task_answers("written", results)
    for answer, (text, images) in zip(answers, QUESTIONS, strict=True):
        inputs = inputs_of(processor, text, images)
        row = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert answer.responses == [processor.tokenizer.decode(row, skip_special_tokens=True)]
        assert len(answer.images) == len(images)


def test_likelihoods_are_those_of_the_model_alone(family: Path, task_of: Callable[..., Path]) -> None:
    results, model, processor = evaluated(family, task_of(CHOSEN))
    answers = task_answers("chosen", results)
    for answer, (text, images) in zip(answers, QUESTIONS, strict=True):
        for choice, likelihood in zip(CHOICES, answer.responses, strict=True):
            prompt = inputs_of(processor, text, images)["input_ids"][0]
            start = len(prompt) - int(processor.decode(prompt[-1:]) == "\n")  # the harness counts it as the answer's
            inputs = inputs_of(processor, text, images, choice)
            with torch.no_grad():
                log_probs = model(**inputs).logits[0].log_softmax(-1)
            tokens = inputs["input_ids"][0]
            expected = sum(log_probs[place - 1, tokens[place]] for place in range(start, len(tokens)))
            assert likelihood == pytest.approx(float(expected), abs=1e-4)
    assert answers[0].responses != answers[1].responses, "equal tokens, other images"


def test_samples_keep_small_images_and_are_paired_by_item(qwen: Path, task_of: Callable[..., Path]) -> None:
    task = task_of(WRITTEN)
    results, _, _ = evaluated(qwen, task)
    samples = choose_samples(task_answers("written", results))
    for seed in range(len(SIZES)):
        (task.parent / f"{seed}.png").unlink()
    assert sorted(len(sample["images"]) for sample in samples) == [0, 1, 1, 2]
    pairs = pair_samples({}, {"samples": samples, "tasks": task_scores(results)})
    shown = [image for pair in pairs for image in pair["images"]]
    assert len(pairs) == 4 and len({*shown}) == 3
    assert all(image.startswith("data:image/jpeg;base64,") for image in shown)


def test_a_missing_image_is_refused_with_its_line(qwen: Path, task_of: Callable[..., Path]) -> None:
    task = task_of(WRITTEN)
    (task.parent / "1.png").unlink()
    with pytest.raises(DataError, match=r"held\.jsonl, line 2: image 1 of turn 1 \(user\)") as caught:
        evaluated(qwen, task)
    assert caught.value.problem_id == "data-image"
    with pytest.raises(DataError):
        require_tasks([str(task)])  # before a training


def test_an_image_that_the_model_does_not_take_is_refused_with_its_line(
    qwen: Path, task_of: Callable[..., Path]
) -> None:
    task = task_of(WRITTEN)
    draw_image(0, 1, 300).save(task.parent / "1.png")
    with pytest.raises(DataError, match=r"held\.jsonl:2: image 1 of the document, .* has 1 x 300 pixels"):
        evaluated(qwen, task)


def test_a_model_without_a_processor_is_refused_before_its_template(qwen: Path, task_of: Callable[..., Path]) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (qwen / name).unlink()
    (qwen / "chat_template.jinja").write_text("{{ messages[0].content + '?' }}")
    with pytest.raises(RequestError) as caught:
        evaluated(qwen, task_of(WRITTEN))
    assert caught.value.problem_id == "model-without-images"
    with pytest.raises(RequestError) as caught:  # before a training
        require_tasks([str(task_of(WRITTEN))], model=ModelConfig(facts=ModelFacts(architecture="Qwen2ForCausalLM")))
    assert caught.value.problem_id == "model-without-images"


def test_images_in_the_harness_own_way_are_refused(qwen: Path, task_of: Callable[..., Path]) -> None:
    task = task_of(WRITTEN)
    settings = {key: value for key, value in WRITTEN.items() if key != "metadata"}
    settings |= {"doc_to_text": "{{images}}", "doc_to_target": "x", "doc_to_image": "images", "dataset_path": "json"}
    settings |= {"dataset_kwargs": {"data_files": {"test": str(task.parent / "held.jsonl")}}, "test_split": "test"}
    task.write_text(json.dumps(settings))
    with pytest.raises(RequestError) as caught:
        evaluated(qwen, task)
    assert caught.value.problem_id == "task-with-media"


def test_examples_before_images_are_refused(qwen: Path, task_of: Callable[..., Path]) -> None:
    with pytest.raises(RequestError) as caught:
        evaluated(qwen, task_of(WRITTEN | {"num_fewshot": 2}))
    assert caught.value.problem_id == "examples-with-images"


def test_the_same_question_about_another_image_is_not_contaminated(qwen: Path, task_of: Callable[..., Path]) -> None:
    task = task_of(WRITTEN)
    run = task.parent / "run"
    run.mkdir()
    (run / "run.yaml").write_text("")
    trained = task.parent / "train.jsonl"
    trained.write_text(task.with_name("held.jsonl").read_text().splitlines()[0] + "\n")
    config = cpu_run(model=ModelConfig(path=str(qwen)), dataset=DatasetConfig(path=str(trained)))
    config = replace(config, evaluation=replace(config.evaluation, tasks=[str(task)]))
    source = read_task_file(task)
    settings = ModelConfig(path=str(qwen))
    tokenizer = load_tokenizer(settings, is_padded=False)
    harness = HarnessSettings(
        tokenizer=tokenizer, max_length=2048, num_fewshot=None, limit=None, system_prompt=None,
        load_processor=partial(load_image_processor, settings, tokenizer),
    )  # fmt: skip
    found = check_evaluated(run, config, load_tasks([source], task.parent, harness))
    assert found is not None and found["groups"]["written"]["items"]["exact"] == [0]
