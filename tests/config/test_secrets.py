"""Secrets of the environment: which variables hold one, and that none is written or printed."""

import pytest

from tunebook.config.compose import compose
from tunebook.config.secrets import is_secret_name, secret_in, without_secrets
from tunebook.errors import RequestError

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
PASSWORD = "correct-horse-battery"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT"),
        *("MY_SECRET", "SECRET_SAUCE", "APIKEY", "hf_token", "TOKEN_2", "AWS_SESSION_TOKEN", "GPG_PASSPHRASE"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "HOME", "PATH", "SSH_AUTH_SOCK", "AWS_ACCESS_KEY_ID", "KEYBOARD"),
        *("DATA_DIR", "PATTERN", "SECRETARY", "MAX_TOKENS", "GOOGLE_APPLICATION_CREDENTIALS_FILE"),
    ],
)
def test_other_names(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"x{PASSWORD}y", "the value of DB_PASSWORD"),
        (TOKEN, "what looks like an access token"),
        ("ghp_" + "a1" * 18, "what looks like an access token"),
        ("sk-proj-" + "a1" * 12, "what looks like an access token"),
        ("quickstart", None),
        ("tunebook", None),
        ("hf_hub", None),
        ("/data/sk-learn-datasets-2024-small", None),
        ("/secrets/token-file", None),
        ("a sentence that stands in a variable", None),
    ],
)
def test_a_secret_is_found_wherever_it_stands(text, found):
    environment = {
        "DB_PASSWORD": PASSWORD, "PROJECT_KEY": "tunebook", "MY_TOKEN": "/secrets/token-file",
        "OTHER_TOKEN": "a sentence that stands in a variable", "PLAIN": "quickstart",
    }  # fmt: skip
    assert secret_in(text, environment) == found
    assert without_secrets(f"<{text}>", environment) == (f"<{text}>" if found is None else f"<{hidden(text)}>")


def hidden(text):
    return text.replace(PASSWORD, "***") if PASSWORD in text else "***"


@pytest.mark.parametrize(
    ("words", "key", "place"),
    [
        (["title=" + PASSWORD], "title", "override 'title=***'"),
        (["launcher=slurm", f"launcher.extra_args=['--comment={PASSWORD}']"], "launcher.extra_args", "--comment=***"),
        (["dataset=mixture", f"dataset.parts.a.path=/x/{PASSWORD}"], "dataset.parts.a.path", "path=/x/***"),
        (["title=" + TOKEN], "title", "override 'title=***'"),
        (["launcher=ray", "launcher.env_vars=['OPENAI_API_KEY=short']"], "launcher.env_vars", "a value for OPENAI_API"),
    ],
)
def test_a_configuration_holds_none_however_it_came_there(monkeypatch, words, key, place):
    """The shell puts a variable's value in without Tunebook seeing its name."""
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)
    with pytest.raises(RequestError) as caught:
        compose("quickstart", words)
    assert (caught.value.exit_code, caught.value.problem_id) == (2, "secret-in-configuration")
    assert f"{key} holds " in caught.value.message
    assert place in caught.value.message
    assert not any(secret in caught.value.message for secret in (PASSWORD, TOKEN, "short"))


def test_rays_workers_may_get_other_variables():
    config = compose("quickstart", ["launcher=ray", "launcher.env_vars=['NCCL_DEBUG=INFO','MY_TOKEN=']"]).config
    assert config.launcher.env_vars == ["NCCL_DEBUG=INFO", "MY_TOKEN="]
