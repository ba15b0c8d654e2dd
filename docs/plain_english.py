"""Check prose for words that this project does not use, and print what to say instead. `make lint` runs it.

It checks pages, the texts of errors and foreign settings, the comments, docstrings and messages of Python modules, and
shell scripts and settings as a whole. It skips code spans, code blocks and generated text: recorded evidence, and pages
made from a checked source. A word is listed in `INSTEAD` only if a replacement is right everywhere: there are no
exceptions. Exit code 1 if a word is found.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Regular expressions, without case; a space stands for any white space. Nothing instead: leave the word out.
INSTEAD = {
    # coined words, and English that few engineers speak
    r"roll calls?": "rendezvous",
    r"likeness(es)?": "match, similarity",
    r"beside": "next to, in addition to, compared with",
    r"(go|goes|going|gone|went) on": "continue, resume",
    r"(is|are|was|were|be|been) said": "is stated, printed, reported",
    r"told (apart|from)": "distinguished from",
    r"(is|are) to be [a-z]+(ed|en)": "must be, will be",
    r"(take|takes|taking|taken|took) away": "remove",
    r"(bring|brings|bringing|brought) along": "include",
    r"(mend|mends|mending|mended)": "fix",
    r"dealt out": "distributed",
    r"a like": "a similar",
    r"what of": "which part of, which of",
    r"in silence": "silently",
    r"anew": "again",
    r"belongs? into": "belongs in",
    # formal words
    r"in order to|so as to": "to",
    r"utili[sz](e|es|ed|ing)": "use",
    r"leverag(es|ed|ing)": "use",
    r"prior to": "before",
    r"subsequent to": "after",
    r"commenc(e|es|ed|ing)": "start",
    r"facilitat(e|es|ed|ing)": "help",
    r"due to the fact that": "because",
    r"(is|are) able to": "can",
    r"(make|makes|made|making) use of": "use",
    r"hence|thus": "so",
    r"shall": "must, will",
    r"upon": "on, after",
    r"whilst|amongst": "while, among",
    r"furthermore|moreover": "also",
    # abbreviations that readers confuse
    r"e\.g\.": "for example, such as",
    r"i\.e\.": "that is",
    # words that add nothing
    r"please|simply|basically|obviously|of course": "",
    r"seamless(ly)?|effortless(ly)?|blazing(ly)?": "",
    # terms
    r"white-?list(s|ed|ing)?": "allowlist, allow",
    r"black-?list(s|ed|ing)?": "denylist, deny",
    r"sanity checks?": "check",
}

PAGES = ("*.md", "docs/*.md", "docker/README.md", "recipes/*/README.md")
SOURCES = ("src/tunebook/config/foreign.yaml", "src/**/*.py", "docker/*.py")
SCRIPTS = ("docker/**/*.sh", "docker/Dockerfile", ".ci/*", "Makefile", "pyproject.toml")
SETTINGS = ("hydra_configs/**/*.yaml", "recipes/*.yaml", "compose*.yaml", "docker/**/*.yaml", "*.yml")

# Stands for a character that is no prose, so that words on its two sides are not read as one phrase.
_NO_PROSE = "\0"
_NO_PROSE_OF_PAGES = re.compile(
    r"^ *```.*?^ *```"
    r"|(?<=\n\n)(?: {4}[^\n]*\n+)+"
    r"|^<!-- made from evidence.*?^<!-- end of evidence -->"
    r"|(?<=\])\([^)\s]+\)",
    re.DOTALL | re.MULTILINE,
)
_CODE_SPAN = re.compile(r"`[^`\0\n]+(?:\n[^`\0\n]+)?`|https?://\S+")

# A hyphen or an underscore makes a word part of a name, such as a rule's id.
_WORDS = re.compile(
    r"(?<![\w-])(?:"
    + "|".join(f"({word.replace('(', '(?:')})" for word in INSTEAD).replace(" ", r"\s+")
    + r")(?![\w-])",
    re.IGNORECASE,
)
_ADVICE = list(INSTEAD.values())


def _no_prose(text: str) -> str:
    """A text of equal length and with the same lines, marked as no prose."""
    return re.sub(r"\S", _NO_PROSE, text)


def page_prose(page: str) -> str:
    """A page of Markdown without code blocks, link targets and recorded evidence."""
    return _NO_PROSE_OF_PAGES.sub(lambda skipped: _no_prose(skipped[0]), page)


def python_prose(source: str) -> str:
    """Comments and docstrings of a module at their places; everything else is marked as no prose."""
    starts = [0, *(end.end() for end in re.finditer("\n", source))]
    prose, end, starts_statement = "", 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_comment = token.type == tokenize.COMMENT
        if is_comment or (token.type == tokenize.STRING and starts_statement):
            prose += _no_prose(source[end : starts[token.start[0] - 1] + token.start[1]])
            prose += " " + token.string[1:] if is_comment else token.string
            end = starts[token.end[0] - 1] + token.end[1]
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            starts_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return prose + _no_prose(source[end:])


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a module with a blank in it, which a key or a name has not; no docstrings."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else _NO_PROSE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if " " in text and id(node) not in statements | parts:
            yield node.lineno, text


def found_words(prose: str) -> list[tuple[int, str, str]]:
    """Line, word and what to say instead, of every listed word in prose, in the order of lines."""
    prose = _CODE_SPAN.sub(lambda span: _no_prose(span[0]), prose)
    return [
        (prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), _ADVICE[(match.lastindex or 0) - 1])
        for match in _WORDS.finditer(prose)
    ]


def found_in(file: Path) -> list[tuple[int, str, str]]:
    """Line, word and what to say instead, of every listed word in a file; for a message the line in which it begins."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return found_words(page_prose(text))
    if file.suffix != ".py":
        return found_words(text)
    of_messages = [(line, word, instead) for line, said in messages(text) for _, word, instead in found_words(said)]
    return sorted([*found_words(python_prose(text)), *of_messages])


def checked_files() -> list[Path]:
    """Every file whose prose is checked."""
    found = {file for pattern in (*PAGES, *SOURCES, *SCRIPTS, *SETTINGS) for file in ROOT.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def main() -> int:
    """Print the listed words of all files; return the exit code."""
    num_found = 0
    for file in checked_files():
        for line, word, instead in found_in(file):
            print(f"{file.relative_to(ROOT)}:{line}: {word}: {f'say {instead}' if instead else 'leave it out'}")
            num_found += 1
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
