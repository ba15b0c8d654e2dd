"""Pages and links of the documentation site. Whether the site builds is tested by `make docs`, which CI runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
site_pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site_pages)


@pytest.mark.parametrize(
    ("page", "written", "on_the_site"),
    [
        ("index.md", "[data](docs/data.md#tools)", "[data](data.md#tools)"),
        ("index.md", "[card](recipes/quickstart/README.md)", "[card](recipes/quickstart/README.md)"),
        ("index.md", '<img src="docs/report.png" alt="x">', '<img src="report.png" alt="x">'),
        ("commands.md", "[images](../docker/README.md)", "[images](docker/README.md)"),
        ("commands.md", "[start](../README.md)", "[start](index.md)"),
        ("commands.md", "[recipes](../recipes/quickstart)", "[recipes](recipes/quickstart/README.md)"),
        ("recipes/zero3_lora/README.md", "[ray](../../docker/README.md#ray)", "[ray](../../docker/README.md#ray)"),
        ("recipes/zero3_lora/README.md", "[limits](../../docs/limits.md)", "[limits](../../limits.md)"),
    ],
)
def test_links_lead_to_pages_of_the_site(page, written, on_the_site):
    assert site_pages.with_site_links(f"a {written}, b {written}", page) == f"a {on_the_site}, b {on_the_site}"


@pytest.mark.parametrize(
    "written",
    [
        "[elsewhere](https://example.org/docs/data.md)",
        "[below](#tools)",
        "[missing](docs/missing.md)",  # left for the strict build to report
        "[outside](../../etc/passwd)",
        "`[code](docs/data.md)`",
        "```\n[code](docs/data.md)\n```",
        "    [code](docs/data.md)\n",
    ],
)
def test_other_links_and_code_stay(written):
    assert site_pages.with_site_links(written, "index.md") == written


def test_every_page_of_the_repository_has_its_own_place():
    pages = [*site_pages.outside_pages(), *sorted((ROOT / "docs").glob("*.md"))]
    paths = [site_pages.site_path(page) for page in pages]
    assert len(set(paths)) == len(paths) > 25
    assert [site_pages.repository_path(path) for path in paths] == pages
