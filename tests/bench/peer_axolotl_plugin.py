"""Axolotl's own way to add a callback: a plugin that its configuration names, with the meter of `peer_axolotl.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
from peer_meter import ForwardRecorder


class MeterPlugin(BasePlugin):  # type: ignore[misc]
    """Told by the environment where to write, and which token is padding."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """The callbacks beside axolotl's."""
        return [ForwardRecorder(Path(os.environ["PEER_MEASURED"]), int(os.environ["PEER_PADDING_ID"]))]
