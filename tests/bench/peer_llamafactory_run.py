"""One rank of `peer_llamafactory.py`: LLaMA-Factory's own `run_exp` with a meter among its callbacks.

    torchrun tests/bench/peer_llamafactory_run.py SETTINGS.json MEASURED.json PADDING_ID

Imports nothing of Tunebook: it runs beside the older packages that LLaMA-Factory asks for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llamafactory.train.tuner import run_exp  # type: ignore[import-not-found]
from peer_meter import Recorder


def main() -> None:
    """Train as the settings say."""
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    run_exp(settings, callbacks=[Recorder(Path(sys.argv[2]), int(sys.argv[3]))])


if __name__ == "__main__":
    main()
