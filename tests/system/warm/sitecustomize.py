"""Python imports this by itself where its folder is in PYTHONPATH: ranks are then started by `ranks.py`, by forks."""

import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

CLIENT = str(Path(__file__).with_name("client.py"))
STARTS_RANKS = ("torch.distributed.run", "tunebook.train")


def through_the_client(command: Any, where: str) -> Any:
    """A command, with the client in place of the Python that would become torchrun or a rank."""
    if isinstance(command, (list, tuple)):
        for at, (word, module) in enumerate(pairwise(command)):
            if word == "-m" and module in STARTS_RANKS:
                return [*command[:at], "-I", "-S", CLIENT, where, *command[at:]]
    return command


class Popen(subprocess.Popen):
    """Starts everything else as it is."""

    def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
        where = (settings.get("env") or os.environ).get("WARM_RANKS")
        super().__init__(through_the_client(args, where) if where else args, *more, **settings)


if "WARM_RANKS" in os.environ:
    subprocess.Popen = Popen
