"""Check prose and code for words that this project does not use. `make lint` runs it; exit code 1 if one is found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# A regular expression, without case, and what to write instead. No word is listed that is ever right.
INSTEAD = {
    r"roll calls?": "rendezvous",
    r"likeness(es)?": "match, similarity",
    r"told (apart|from)": "distinguished from",
    r"what of": "which part of, which of",
    r"in silence": "silently",
    r"anew": "again",
    r"in order to|so as to": "to",
    r"utili[sz](e|es|ed|ing)": "use",
    r"leverag(es|ed|ing)": "use",
    r"prior to": "before",
    r"subsequent to": "after",
    r"commenc(e|es|ed|ing)": "start",
    r"due to the fact that": "because",
    r"hence|thus": "so",
    r"whilst|amongst": "while, among",
    r"furthermore|moreover": "also",
    r"e\.g\.|i\.e\.": "for example, that is",
    r"simply|basically|obviously|of course|seamless(ly)?|effortless(ly)?": "nothing",
    r"(white|black)-?list(s|ed|ing)?": "allowlist, denylist",
}
FILES = [
    "*.md",
    "*.py",
    "*.sh",
    "*.yaml",
    "*.yml",
    "Makefile",
    "docker/Dockerfile",
    ":!tests",
    ":!docs/plain_english.py",
]

# Files that git does not know yet count too.
command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FILES]
found = 0
for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split():
    for number, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), start=1):
        for word, instead in INSTEAD.items():
            if match := re.search(rf"(?<![\w-])({word})(?![\w-])", line, re.IGNORECASE):
                print(f"{name}:{number}: '{match[0]}'; write: {instead}")
                found += 1
sys.exit(1 if found else 0)
