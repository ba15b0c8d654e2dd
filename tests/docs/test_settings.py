"""The page of the settings is what the schema says."""

from __future__ import annotations

import pytest

from tunebook.config.descriptions import sections


def test_every_setting_has_a_meaning_a_default_and_values() -> None:
    settings = [setting for section in sections().values() for setting in section.settings]
    assert len(settings) > 150
    assert [setting.key for setting in settings if not (setting.meaning and setting.default and setting.values)] == []


def test_a_setting_is_described_by_its_field() -> None:
    training = {setting.key: setting for setting in sections()["training"].settings}
    length = training["training.max_length"]
    assert (length.default, length.values) == ("2048", "whole number >= 2 tokens")
    assert length.meaning.startswith("The longest document")


def test_a_setting_that_two_libraries_have_is_described_for_each() -> None:
    both = [one for one in sections()["parallelism"].settings if one.key == "parallelism.offload_parameters"]
    assert [one.choices for one in both] == [("zero1", "zero2", "zero3"), ("fsdp", "fsdp_grad_op", "hsdp")]


def test_the_page_is_up_to_date(project_root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project_root / "docs"))
    import settings

    page = (project_root / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings.page(), "type: python docs/settings.py > docs/settings.md"
