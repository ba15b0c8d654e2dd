"""The same on GPUs: where the model goes, in which format, and that it can be interrupted there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from tunebook.config.choices import Compute, Generation
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.errors import DoesNotFitError
from tunebook.evaluate.chat import Ending, Sampling
from tunebook.evaluate.chat.model import ChatModel, load
from tunebook.evaluate.chat.session import Session
from tunebook.evaluate.target import Target
from tunebook.model import gpu_memory

SAMPLING = Sampling(max_new_tokens=16, temperature=0.0, seed=0)
GIB = 2**30


@pytest.fixture
def target(run: Path) -> Target:
    """A run of a GPU machine, in bf16 with weights in fp32."""
    config = load_config(run / "run.yaml")
    config.hardware.generation, config.precision.compute = Generation.hopper, Compute.bf16
    (run / "run.yaml").write_text(config_to_yaml(config))
    return Target(run=run, folder=run / "model")


@pytest.fixture
def limit_memory() -> Iterator[Callable[[float], None]]:
    """Lower the share of the GPU's memory that this process may use."""

    def lower(share: float) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share)

    yield lower
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_run_is_computed_as_it_was_trained(target: Target) -> None:
    loaded = load(target)
    assert loaded.notes[0] == f"{torch.cuda.get_device_name()} in bfloat16"
    assert (loaded.model._model.device.type, loaded.model._model.dtype) == ("cuda", torch.float32)
    session = Session(loaded.model, SAMPLING, None)
    for question in ("rain", "key"):
        pieces: list[str] = []
        session.ask(question, pieces.append)
        assert "".join(pieces) == "apple bird"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_folder_is_computed_in_its_own_format(target: Target, tmp_path: Path, dtype: torch.dtype) -> None:
    bare = tmp_path / "bare"
    assert target.folder is not None
    half: Any = Qwen2ForCausalLM.from_pretrained(target.folder)
    half.to(dtype).save_pretrained(bare)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / file).write_text((target.folder / file).read_text())
    loaded = load(Target(folder=bare))
    assert (loaded.model._model.device.type, loaded.model._model.dtype) == ("cuda", dtype)
    pieces: list[str] = []
    Session(loaded.model, SAMPLING, None).ask("rain", pieces.append)
    assert "".join(pieces) == "apple bird"


@pytest.mark.gpu
def test_an_answer_is_interrupted_and_memory_runs_out_in_words(
    target: Target, limit_memory: Callable[[float], None]
) -> None:
    model = load(target).model
    tokens = model.encode([{"role": "user", "content": "rain"}])
    pieces: list[str] = []
    assert model.generate(tokens, SAMPLING, pieces.append, lambda: bool(pieces)).ending is Ending.interrupted
    limit_memory(1e-6)
    with pytest.raises(DoesNotFitError, match="ran out of memory on a conversation of"):
        model.generate(tokens * 20_000, SAMPLING, pieces.append)


@pytest.mark.multigpu
def test_a_model_too_large_for_one_gpu_is_spread_and_answers_alike(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=832, hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=96,
    )  # fmt: skip

    def answer(model: Any) -> str:
        chat = ChatModel(model, tokenizer, stop_ids=[2])
        tokens = chat.encode([{"role": "user", "content": "rain"}])
        return chat.generate(tokens, SAMPLING, lambda _: None).text

    make: Callable[[Qwen2Config], PreTrainedModel] = Qwen2ForCausalLM
    model: Any = make(config)
    whole = answer(model.to("cuda:0"))
    model.to("cpu")
    # 1.2 GiB of weights need 1.8 GiB, and it is told that each GPU has 1 GiB.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spread, note = gpu_memory.place_on_gpus(model, None)
    assert note == "it is spread over 2 GPUs, since it does not fit into one"
    assert {str(parameter.device) for parameter in spread.parameters()} == {"cuda:0", "cuda:1"}
    assert answer(spread) == whole != ""
