"""LoRA and QLoRA: from the `peft` group to a PEFT configuration, and trained adapters back onto their base model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import PeftMethod
from tunebook.config.schema import PeftSettings

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_config.json"


def adapter_config(settings: PeftSettings) -> LoraConfig | None:
    """PEFT's configuration, None for full fine-tuning. No named modules means every linear layer but the head."""
    if settings.method is PeftMethod.full:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it by the rank; a fraction is fine
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        modules_to_save=list(settings.modules_to_save) or None,
        use_rslora=settings.use_rslora,
    )


def holds_model(folder: Path) -> bool:
    """Whether a folder is a whole model's or an adapter's."""
    return (folder / "config.json").is_file() or is_adapter(folder)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, which needs its base model beside it."""
    return (folder / ADAPTER_FILE).is_file()


def with_adapter(base: PreTrainedModel, folder: Path, method: PeftMethod) -> PreTrainedModel:
    """The base model with a trained adapter merged into it; over quantised weights the adapter stays beside them."""
    from peft import PeftModel

    with warnings.catch_warnings():  # peft asks transformers by a name that has a newer one
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        adapted: Any = PeftModel.from_pretrained(base, str(folder))
    model: PreTrainedModel = adapted if method is PeftMethod.qlora else adapted.merge_and_unload()
    return model
