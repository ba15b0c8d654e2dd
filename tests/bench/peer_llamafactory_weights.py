"""Random weights of a planned model as a folder that LLaMA-Factory loads, made on the GPU where there is one.

    python tests/bench/peer_llamafactory_weights.py CONFIG.json FOLDER

Written by the transformers of its own environment, so that what it reads is what it writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Draw them in bf16, as a released base model is stored."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(sys.argv[2])


if __name__ == "__main__":
    main()
