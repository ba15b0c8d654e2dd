"""Whether a run mixes number formats, which each library then does in its own way."""

from __future__ import annotations

from tunebook.config.choices import Compute, MasterWeights
from tunebook.config.schema import RunConfig


def mixes_formats(config: RunConfig) -> bool:
    """Whether fp32 weights are computed with in bf16 or fp16. bf16 weights have nothing left to mix."""
    precision = config.precision
    return precision.compute is not Compute.fp32 and precision.master_weights is not MasterWeights.bf16
