"""A method is added by its file, its YAML, its settings and its facts, and nothing else knows its name."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tunebook.config.book import book_root
from tunebook.config.choices import PackingMode
from tunebook.config.compose import compose
from tunebook.config.keys import all_keys
from tunebook.config.schema import CHOICE_SCHEMAS, PackingConfig
from tunebook.errors import RequestError
from tunebook.facts.methods import METHODS
from tunebook.hardware.detect import Machine
from tunebook.plan.draft import draft_run
from tunebook.record.page.charts import other_charts
from tunebook.record.run_record import RunRecord

from . import focal
from .conftest import losses

NO_GPU = Machine(gpus=[], driver=None, num_cpus=8, host_memory_gib=32.0)


@pytest.fixture
def with_focal(monkeypatch, tmp_path, project_root):
    """A book that has a third method."""
    book = tmp_path / "book"
    shutil.copytree(project_root / "hydra_configs", book / "hydra_configs")
    (book / "recipes").symlink_to(project_root / "recipes")
    (book / "hydra_configs" / "method" / "focal.yaml").write_text(
        "# Tokens that the model knows count less.\n"
        "defaults:\n  - /schema/method/focal@_here_\n  - _self_\n\nname: focal\n"
    )
    monkeypatch.setenv("TUNEBOOK_HOME", str(book))
    monkeypatch.setitem(CHOICE_SCHEMAS["method"], "focal", focal.FocalConfig)
    monkeypatch.setitem(METHODS, "focal", focal.FACTS)
    for kept in (book_root, all_keys):
        kept.cache_clear()
    yield
    monkeypatch.undo()
    for kept in (book_root, all_keys):
        kept.cache_clear()


def test_it_is_composed_and_planned_by_its_facts(with_focal):
    config = compose("quickstart", ["method=focal", "method.gamma=1.5"]).config
    assert (config.method.name, config.method.gamma) == ("focal", 1.5)
    with pytest.raises(RequestError, match="it belongs to method=dpo"):
        compose("quickstart", ["method=focal", "method.beta=0.1"])
    draft = draft_run("quickstart", ["method=focal", "hardware=cpu"], [], NO_GPU)
    assert draft.exit_code == 0
    refused = draft_run("quickstart", ["method=focal", "hardware=cpu", "model.one_pass_head=true"], [], NO_GPU)
    assert "method-without-one-pass-head" in [problem.id for problem in refused.problems]


def test_it_trains_and_is_recorded(with_focal, run, config, changed, whole):
    padded = replace(config, packing=PackingConfig(mode=PackingMode.padded))
    plain = replace(padded, method=focal.FocalConfig(name="focal", gamma=0.0))
    folder, code, lines = run(plain, "plain")
    assert code == 0
    assert losses(lines) == pytest.approx(losses(whole[1]), rel=1e-4)  # without its factor it is SFT
    assert all(0 <= line["known_share"] <= 1 for line in lines)
    focused = losses(run(replace(plain, method=focal.FocalConfig(name="focal", gamma=2.0)), "focal")[2])
    assert focused[0] < losses(lines)[0]
    facts = {"config": {"method": {"name": "focal"}}, "plan": {"hardware": {"generation": "cpu"}}}
    assert "Known" in other_charts(RunRecord(folder=folder, training=lines, **facts))[0].title
