"""One rank of `peer_llamafactory.py`: LLaMA-Factory's own `run_exp` with a meter among its callbacks.

    torchrun tests/bench/peer_llamafactory_run.py SETTINGS.json MEASURED.json PADDING_ID

Imports nothing of Tunebook: it runs beside the older packages that LLaMA-Factory asks for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.tuner import run_exp  # type: ignore[import-not-found]
from peer_meter import Meter


class Recorder(Meter):
    """A meter that finds the trainer's collator by itself, and ends the program once training is done."""

    def __init__(self, file: Path, padding_id: int) -> None:
        # Not by the mask: packed rows have ones over their padding, or the number of each document.
        super().__init__(lambda batch: int((batch["input_ids"] != padding_id).sum()))
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first batch is collated."""
        loader = kwargs["train_dataloader"]
        loader = getattr(loader, "base_dataloader", loader)  # what accelerate has wrapped
        loader.collate_fn = self.counting(loader.collate_fn)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was measured; the model is not saved, which would take longer than training it."""
        if state.is_world_process_zero:
            has_gpu = torch.cuda.is_available()
            model = kwargs["model"]
            measured = {
                "speeds": self.speeds,
                "seconds": self.seconds,
                "losses": [line["loss"] for line in state.log_history if "loss" in line],
                "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if has_gpu else None,
                "hardware": torch.cuda.get_device_name() if has_gpu else "cpu",
                "weights_dtype": str(next(model.parameters()).dtype),
                "attention": model.config._attn_implementation,
                "rows_per_step": args.per_device_train_batch_size * args.gradient_accumulation_steps,
            }
            self.file.write_text(json.dumps(measured), encoding="utf-8")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """Train as the settings say."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    run_exp(settings, callbacks=[Recorder(Path(sys.argv[2]), int(sys.argv[3]))])


if __name__ == "__main__":
    main()
