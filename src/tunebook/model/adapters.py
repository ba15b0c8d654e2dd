"""LoRA and QLoRA: from the `peft` group to a PEFT configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook.config.choices import PeftMethod
from tunebook.config.schema import PeftSettings

if TYPE_CHECKING:
    from peft import LoraConfig


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
