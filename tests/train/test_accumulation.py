"""A step has the same loss and the same gradient however it is cut into micro-batches, whatever a model says of its own
loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig

from tunebook.data.sampler import RankBatches, Schedule, StepSize
from tunebook.train.methods.sft import RecipeTrainer

NUM_TOKENS = 30  # of each document
TRAINED = (25, 2, 20, 1, 3, 15, 2, 1)  # of these, the last so many: micro-batches of one document are far from alike
SIZES = {
    "vocab_size": 1160, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
# Text without the towers of the multimodal models that AutoModelForCausalLM makes of these.
GEMMA_4 = {
    "text_config": SIZES | {"vocab_size_per_layer_input": 1160, "hidden_size_per_layer_input": 8},
    "vision_config": None,
    "audio_config": None,
}
MODELS: dict[str, dict[str, Any]] = {"llama": SIZES, "gemma4": GEMMA_4, "gemma4_unified": GEMMA_4}


class Gradient(TrainerCallback):
    """Keeps the gradient of the step and the loss that is logged."""

    gradient: torch.Tensor
    loss: float

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        self.gradient = torch.cat(gradients).clone()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.loss = logs.get("loss", getattr(self, "loss", None))


def one_step(folder: Path, project_root: Path, kind: str, num_passes: int) -> tuple[Gradient, RecipeTrainer]:
    """One step over eight documents, divided into this many passes."""
    random = np.random.default_rng(0)
    documents = []
    for num_trained in TRAINED:
        ids = random.integers(10, 800, NUM_TOKENS).tolist()
        documents.append({"input_ids": ids, "labels": [-100] * (NUM_TOKENS - num_trained) + ids[-num_trained:]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**MODELS[kind]), attn_implementation="sdpa")
    schedule = Schedule(
        lengths=np.full(len(TRAINED), NUM_TOKENS),
        size=StepSize(documents=len(TRAINED)),
        rows_per_step=num_passes,
        is_packed=True,
        seed=0,
    )
    arguments = SFTConfig(
        output_dir=str(folder / f"{kind}-{num_passes}"), max_steps=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=num_passes, max_length=None, dataset_kwargs={"skip_prepare_dataset": True},
        padding_free=True, remove_unused_columns=False, report_to=[], use_cpu=True, bf16=False, logging_steps=1,
        save_strategy="no", max_grad_norm=1e9, disable_tqdm=True, activation_checkpointing=False,
    )  # fmt: skip
    found = Gradient()
    trainer = RecipeTrainer(
        model=model,
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(project_root / "recipes" / "quickstart" / "model"),
        train_dataset=Dataset.from_list(documents),
        filler_token_id=2,
        train_batches=RankBatches(schedule, num_steps=1, micro_batch_size=1, rank=0, world_size=1),
        saver=SimpleNamespace(),  # type: ignore[arg-type]  # nothing is saved
        callbacks=[found],
    )
    trainer.train()
    return found, trainer


@pytest.mark.parametrize("kind", ["llama", "gemma4", pytest.param("gemma4_unified", marks=pytest.mark.nightly)])
def test_step_does_not_depend_on_the_number_of_passes(
    tmp_path: Path, project_root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, trainer = one_step(tmp_path, project_root, kind, 1)
    assert getattr(trainer.model, "accepts_loss_kwargs", None) is (None if kind == "llama" else False)
    cut, _ = one_step(tmp_path, project_root, kind, 8)
    # fp32 sums in another order: eps is 1.2e-7, the logged loss is rounded to four digits.
    assert cut.loss == pytest.approx(whole.loss, abs=2e-4)
    assert (cut.gradient - whole.gradient).norm() < 1e-5 * whole.gradient.norm()
    capsys.readouterr()
