"""Hooks of mkdocs.yml: add pages outside of docs/ to the site, and change links so that they lead to pages of the site.

In the repository, links are relative to the file that they are in. On the site, the README is the front page and the
pages of docs/ are beside it. Linked files that are not pages, such as evidence, are copied to the site. A link to a
file that does not exist stays as it is, and `mkdocs build --strict` reports it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FRONT_PAGE = "index.md"
_LINK = re.compile(r"(?P<before>\]\(|\bsrc=\")(?P<path>[^)\"#\s:]+)(?=[)\"#])")
_CODE = re.compile(r"^(```.*?^```|(?: {4}[^\n]*\n)+)|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def cards() -> list[Path]:
    """The card of every recipe."""
    return sorted(ROOT.glob("recipes/*/README.md"))


def outside_pages() -> list[Path]:
    """The pages that are not in docs/."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docker/README.md", "recipes/README.md")),
        *cards(),
    ]


def site_path(file: Path) -> str:
    """The path in the site's sources of a file of the repository."""
    if file == ROOT / "README.md":
        return FRONT_PAGE
    folder = ROOT / "docs"
    return str(file.relative_to(folder if file.is_relative_to(folder) else ROOT))


def repository_path(path: str) -> Path:
    """The file of the repository that is at a path of the site's sources."""
    if path == FRONT_PAGE:
        return ROOT / "README.md"
    return ROOT / "docs" / path if (ROOT / "docs" / path).is_file() else ROOT / path


def links(markdown: str) -> list[re.Match[str]]:
    """The relative links of a page, without those in code."""
    code = [found.span() for found in _CODE.finditer(markdown)]
    return [one for one in _LINK.finditer(markdown) if not any(start <= one.start() < end for start, end in code)]


def linked_file(page: Path, path: str) -> Path | None:
    """The file that a link of a page leads to; a folder's is its README.md. None if it does not exist."""
    file = Path(os.path.normpath(page.parent / path))
    file = file / "README.md" if file.is_dir() else file
    return file if file.is_file() and file.is_relative_to(ROOT) else None


def with_site_links(markdown: str, path: str) -> str:
    """A page with every link to a file of the repository changed to that file's path on the site."""
    page = repository_path(path)
    for link in reversed(links(markdown)):
        if (file := linked_file(page, link["path"])) is not None:
            there = os.path.relpath(site_path(file), Path(path).parent)
            markdown = markdown[: link.start("path")] + there + markdown[link.end("path") :]
    return markdown


def on_config(config: MkDocsConfig) -> None:
    """List the table of all recipes and their cards in the navigation."""
    for section in config.nav or []:
        if "Recipes" in section:
            listed = [{card.parent.name: site_path(card)} for card in cards()]
            section["Recipes"] = [{"All recipes": "recipes/README.md"}, *listed]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages outside of docs/, and every other file that a page links."""
    from mkdocs.structure.files import File

    pages = [*outside_pages(), *sorted((ROOT / "docs").glob("*.md"))]
    linked = {linked_file(page, link["path"]) for page in pages for link in links(page.read_text(encoding="utf-8"))}
    for file in [*outside_pages(), *sorted(filter(None, linked))]:
        if files.get_file_from_path(site_path(file)) is None:
            files.append(File.generated(config, site_path(file), abs_src_path=str(file)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change a page's links."""
    return with_site_links(markdown, page.file.src_uri)
