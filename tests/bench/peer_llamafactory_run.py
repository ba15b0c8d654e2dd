"""What runs in LLaMA-Factory's own environment, which has older packages: imports nothing of Tunebook.

    python tests/bench/peer_llamafactory_run.py weights CONFIG.json FOLDER
    torchrun tests/bench/peer_llamafactory_run.py SETTINGS.json MEASURED.json PADDING_ID

The first writes random weights, as its transformers reads them; the second is one rank of a training with a meter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_weights(config_file: Path, folder: Path) -> None:
    """Random weights in bf16, as a released base model is stored; made on the GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.for_model(**json.loads(config_file.read_text(encoding="utf-8")))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def train(settings_file: Path, measured: Path, padding_id: int) -> None:
    """LLaMA-Factory's own `run_exp` with a meter among its callbacks."""
    from llamafactory.train.tuner import run_exp  # type: ignore[import-not-found]
    from peer_meter import Recorder

    settings: dict[str, Any] = json.loads(settings_file.read_text(encoding="utf-8"))
    run_exp(settings, callbacks=[Recorder(measured, padding_id)])


if __name__ == "__main__":
    if sys.argv[1] == "weights":
        write_weights(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
