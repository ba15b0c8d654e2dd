"""`${...}` can read other keys and variables, but no tokens of the environment."""

from dataclasses import replace

import pytest

from tunebook.config.compose import compose
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.identity import config_hash
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
TOKEN = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)


REFUSED = {
    "plain": "${oc.env:HF_TOKEN}",
    "with a default": "${oc.env:HF_TOKEN,none}",
    "of another variable": "${oc.env:NOT_THERE}",
    "inside a text": "a ${oc.env:HF_TOKEN} b",
    "decoded": "${oc.decode:${oc.env:HF_TOKEN}}",
    "a name put together": "${oc.env:HF_${training.resume}}",
    "a resolver put together": "${oc.${tracking.project}:HF_TOKEN}",
    "the clock": "${now:%Y-%m-%d}",
    "hydra's": "${hydra:job.num}",
    "python's": "${python_version:major}",
}


def refused(recipe, words, dirs):
    with pytest.raises(RequestError) as caught:
        compose(recipe, words, dirs)
    assert (caught.value.exit_code, caught.value.problem_id) == (2, "wrong-type")
    assert TOKEN not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("how", REFUSED)
def test_in_a_recipe_and_in_what_it_builds_on(tmp_path, how):
    head = "# @package _global_\ndefaults:\n  - {}\n  - _self_\n"
    values = f"training:\n  resume: TOKEN\ntracking:\n  project: env\ntitle: '{REFUSED[how]}'\n"
    (tmp_path / "evil.yaml").write_text(head.format("quickstart") + values)
    (tmp_path / "child.yaml").write_text(head.format("evil"))
    for name in ("evil", "child"):
        assert refused(name, [], [tmp_path]).startswith(f"{tmp_path / 'evil.yaml'}: title: ")


def test_allowed_variables_keys_and_defaults_are_read(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("STORE", raising=False)
    words = ["outputs=${oc.env:SCRATCH}/runs", "training.seed=${oc.env:SLURM_JOB_ID}", "title=${tracking.project}"]
    config = compose("quickstart", [*words, "tracking.project=${oc.env:STORE,elsewhere}"]).config
    assert (config.outputs, config.training.seed, config.title) == ("/scratch/me/runs", 17, "elsewhere")


@pytest.mark.parametrize("text", ["${oc.env:HF_TOKEN}", "a ${b", "${", r"\${x}", r"\\${x}", r"a\b ${x} \${y}", "${{}}"])
def test_text_like_an_interpolation_stays_a_text(tmp_path, text):
    """An escaped interpolation is a text, also when the ranks read run.yaml."""
    config = resolve_auto(compose("quickstart", []).config, NO_GPU).config
    config = replace(config, title=text, tracking=replace(config.tracking, project=text))
    (tmp_path / "run.yaml").write_text(config_to_yaml(config))
    found = load_config(tmp_path / "run.yaml")
    assert (found.title, found.tracking.project) == (text, text)
    assert TOKEN not in (tmp_path / "run.yaml").read_text()
    assert config_hash(found) == config_hash(config)
