"""The .env that docker/front.sh writes and plain `docker compose` reads."""

from __future__ import annotations

import os
import re

from tunebook.record.provenance import describe_code


def test_env_has_every_setting_of_compose(machine):
    machine.front("env", GPU="cpu")
    used = set(re.findall(r"\$\{(TUNEBOOK_\w+)", (machine.checkout / "compose.yaml").read_text()))
    written = set(re.findall(r"^(\w+)=", (machine.checkout / ".env").read_text(), flags=re.MULTILINE))
    assert used - written == {"TUNEBOOK_SHM_SIZE", "TUNEBOOK_SANDBOX_IMAGE"}  # the user's own
    assert written - used == {"COMPOSE_FILE", "TUNEBOOK_ATTENTION_CHOICE"}
    assert machine.setting("COMPOSE_FILE") == "compose.yaml:docker/cpu/compose.yaml"
    assert (machine.setting("TUNEBOOK_UID"), machine.setting("TUNEBOOK_GID")) == (str(os.getuid()), str(os.getgid()))
    assert machine.setting("TUNEBOOK_CHECKOUT") == str(machine.checkout)
    machine.gpus()
    machine.front("env")
    assert machine.setting("COMPOSE_FILE") == "compose.yaml"


def test_the_users_own_lines_and_permissions_are_kept(machine):
    env = machine.checkout / ".env"
    env.write_text("# mine\nHF_TOKEN='se cret'\nTUNEBOOK_SHM_SIZE=64gb\n")
    env.chmod(0o600)
    for generation in ("cpu", "hopper"):
        machine.front("env", GPU=generation)
        text = env.read_text()
        assert text.startswith("# mine\nHF_TOKEN='se cret'\nTUNEBOOK_SHM_SIZE=64gb\n# By make env")
        assert text.count("TUNEBOOK_GENERATION") == text.count("# By make env") == 1
    assert env.stat().st_mode & 0o777 == 0o600


def test_the_files_of_a_build_are_remembered_until_they_are_given_again(machine):
    for name in ("ca.pem", "pip.conf"):
        (machine.folder / name).touch()
    (machine.folder / "my data").mkdir()
    given = {"CA": "../ca.pem", "PIP_CONF": "../pip.conf", "BASE_IMAGE": "site/debian:12", "NETWORK": "host"}
    machine.front("env", GPU="cpu", DATA="../my data", **given)
    machine.front("env", GPU="cpu", PIP_CONF="")
    assert machine.setting("TUNEBOOK_CA") == str(machine.folder / "ca.pem")
    assert machine.setting("TUNEBOOK_PIP_CONF") == ""
    assert machine.setting("TUNEBOOK_BASE_IMAGE") == "site/debian:12"
    assert machine.setting("TUNEBOOK_BUILD_NETWORK") == "host"
    assert machine.setting("TUNEBOOK_DATA") == str(machine.folder / "my data")


def test_the_code_has_the_hash_of_the_manifest(machine):
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org")
    machine.front("env", GPU="cpu")
    assert machine.setting("TUNEBOOK_GIT_COMMIT") == ""
    (machine.checkout / ".gitignore").write_text(".env\n.cache/\noutputs/\n")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        assert machine.command(*git, *words).returncode == 0
    for edited in (None, "recipes/quickstart.yaml", "docker/zwei drei.txt"):
        if edited is not None:
            (machine.checkout / edited).write_text("edited\n")
        machine.front("env", GPU="cpu")
        expected = describe_code(machine.checkout)
        assert machine.setting("TUNEBOOK_GIT_COMMIT") == expected["git_commit"]
        assert machine.setting("TUNEBOOK_GIT_DIFF_SHA256") == (expected["git_diff_sha256"] or "")
