"""`python -m tunebook.train RUN_FOLDER`: the program that the launcher starts once per rank."""

import sys
from pathlib import Path

from tunebook.train.run import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1])))
