"""An upload that cannot work is refused before anything starts."""

import pytest

from tunebook.errors import RequestError
from tunebook.launch.upload import check_upload


class FakeHub:
    error = None

    def whoami(self):
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "error", None)
    return FakeHub


def test_nothing_to_upload_asks_nobody(hub):
    hub.error = AssertionError("asked")
    check_upload(None)


def test_an_account_is_enough(hub):
    check_upload("me/model")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Name or service not known"), "me/model: the hub is out of reach .*push_to_hub=null"),
        (OSError("Token is required"), "me/model: the hub knows no account here; run `hf auth login`"),
    ],
)
def test_without_network_or_account_it_is_refused(hub, error, message):
    hub.error = error
    with pytest.raises(RequestError, match=message):
        check_upload("me/model")
