"""Control characters and secrets: how they are found and shown, and that configurations with them are refused."""

import pytest

from tunebook.config.choices import LauncherName
from tunebook.config.compose import compose
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import MixturePart
from tunebook.config.unsafe_text import (
    is_secret_name,
    printable,
    require_printable,
    shown,
    without_secrets,
)
from tunebook.errors import RequestError
from tunebook.plan.rules import check

SIGNS = ["\n", "\0", "\x1b", "\x85", "\u2028", "\u202e", "\udce9"]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
PASSWORD = "correct-horse-battery"


@pytest.mark.parametrize("sign", SIGNS, ids=ascii)
def test_each_is_shown_and_refused(sign):
    assert shown(f"main{sign}x") == f"main{ascii(sign)[1:-1]}x"
    with pytest.raises(RequestError, match=r"^--name=main\\\S+x holds") as caught:
        require_printable("--name", f"main{sign}x")
    assert caught.value.problem_id == "control-characters"


@pytest.mark.parametrize("text", ["", "main", "a b#'\"$`\\;&|", "größe", "数据", "a\u00a0b", "🙂", "a\u200bb"])
def test_other_text_is_left_alone(text):
    assert shown(text) == text
    require_printable("--name", text)


def test_text_of_several_lines_keeps_its_lines_and_tabs():
    assert printable("a\x1b[31mb\x07\x9b2Jc\rd\te\nf é🦊") == "a\\x1b[31mb\\x07\\x9b2Jc\\rd\te\nf é🦊"


def found_in(config):
    return {problem.key: problem for problem in check(config) if problem.id == "control-characters"}


@pytest.mark.parametrize("key", ["dataset.path", "launcher.partition"])
def test_no_text_of_a_configuration_holds_one(sound, changed, key):
    config = changed(sound, {"launcher": SlurmConfig(name=LauncherName.slurm), key: "a\u2028touch /tmp/injected"})
    assert found_in(config)[key].is_error


def test_names_of_parts_are_checked(sound, changed):
    parts = {"chat\x1b[2J": MixturePart(path="a\rb")}
    found = found_in(changed(sound, {"dataset.parts": parts}))
    assert set(found) == {"dataset.parts", "dataset.parts.chat\\x1b[2J.path"}


@pytest.mark.parametrize("key", ["dataset.system_prompt", "model.pad_token"])
def test_texts_that_only_a_model_or_a_data_file_sees_may_hold_them(sound, changed, key):
    assert found_in(changed(sound, {key: "Be brief.\nBe kind."})) == {}


SECRET = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT", "SECRET_SAUCE", "hf_token",
          "TOKEN_2", "GPG_PASSPHRASE")  # fmt: skip
NOT_SECRET = ("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "PATH", "SSH_AUTH_SOCK", "AWS_ACCESS_KEY_ID", "KEYBOARD",
              "PATTERN", "SECRETARY", "MAX_TOKENS", "GOOGLE_APPLICATION_CREDENTIALS_FILE")  # fmt: skip


def test_names_of_secrets():
    assert [name for name in (*SECRET, *NOT_SECRET) if is_secret_name(name)] == [*SECRET]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"x{PASSWORD}y", "x***y"),
        (TOKEN, "***"),
        ("ghp_" + "a1" * 18, "***"),
        ("sk-proj-" + "a1" * 12, "***"),
        ("tunebook", "tunebook"),
        ("/data/sk-learn-datasets-2024-small", "/data/sk-learn-datasets-2024-small"),
        ("/secrets/token-file", "/secrets/token-file"),
        ("a sentence that stands in a variable", "a sentence that stands in a variable"),
    ],
)
def test_secret_is_hidden_anywhere_in_a_text(text, hidden):
    environment = {
        "DB_PASSWORD": PASSWORD, "PROJECT_KEY": "tunebook", "MY_TOKEN": "/secrets/token-file",
        "OTHER_TOKEN": "a sentence that stands in a variable", "PLAIN": "quickstart",
    }  # fmt: skip
    assert without_secrets(f"<{text}>", environment) == f"<{hidden}>"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["launcher=slurm", f"launcher.extra_args=['--comment={PASSWORD}']"], "launcher.extra_args"),
        (["title=" + TOKEN], "title"),
    ],
)
def test_configuration_with_a_secret_is_refused(monkeypatch, words, key):
    """The shell inserts the variable's value, so Tunebook does not see its name."""
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)
    with pytest.raises(RequestError) as caught:
        compose("quickstart", words)
    assert (caught.value.exit_code, caught.value.problem_id) == (2, "secret-in-configuration")
    assert caught.value.message.startswith(f"{key} holds ")
    assert not any(secret in caught.value.message for secret in (PASSWORD, TOKEN))
