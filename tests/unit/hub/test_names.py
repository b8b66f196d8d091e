"""Names on a hub, and whether an address may get the token."""

from __future__ import annotations

import pytest

from launch.base.errors import ConfigError
from launch.hub import client, names
from launch.hub.names import HubName

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", HubName("Qwen/Qwen2.5-0.5B", False)),
        ("hf:Qwen/Q@refs/pr/1", HubName("Qwen/Q", False, revision="refs/pr/1")),
        ("hf:openai/gsm8k", HubName("openai/gsm8k", True, split="train")),
        ("hf:a/b/c:Test@v1.0", HubName("a/b", True, "c", "test", "v1.0")),
        ("hf:a/b:valid", HubName("a/b", True, split="validation")),
    ],
)
def test_a_name_is_read_and_written(text, name):
    assert names.parse(text, name.is_data) == name
    assert names.parse(str(name), name.is_data) == name


@pytest.mark.parametrize("text", ["", "a", "a/", "/a/b", "a/b/c/d", "a/..", "../b", "a/b:c", "ä/b"])
def test_other_texts_are_no_models(text):
    assert not names.is_model(text)
    with pytest.raises(ConfigError, match="is no name on a hub; expected OWNER/NAME"):
        names.parse(text, is_data=False)


@pytest.mark.parametrize(
    ("endpoint", "url", "may"),
    [
        ("", "https://huggingface.co/api/models/a/b", True),
        ("", "https://huggingface.co:443/api", True),
        ("", "http://huggingface.co/api", False),
        ("", "https://cdn-lfs.huggingface.co/file", False),
        ("", "https://huggingface.co.evil.org/api", False),
        ("", "https://huggingface.co@evil.org/api", False),
        ("https://mirror/", "https://mirror/a", True),
        ("https://mirror", "https://huggingface.co/a", False),
        ("https://mirror", "https://mirror:8443/a", False),
        ("http://mirror", "http://mirror/a", False),
        ("http://10.0.0.7:80", "http://10.0.0.7/a", False),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/a", True),
        ("http://[::1]:8080", "http://[::1]:8080/a", True),
        ("http://localhost:8080", "http://localhost:8080/a", True),
        ("http://localhost:8080", "http://localhost:9090/a", False),
        ("http://localhost.evil.org", "http://localhost.evil.org/a", False),
    ],
)
def test_the_token_is_for_the_hub_over_https_or_on_this_machine(monkeypatch, endpoint, url, may):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert client.may_get_token(url) is may


@pytest.mark.parametrize(
    "address", ["huggingface.co", "ftp://mirror", "http://", "http://x:y", "http://x:99999"]
)
def test_an_address_that_is_none_is_a_mistake_of_the_environment(monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError, match=f"HF_ENDPOINT={address}: expected the address of a hub"):
        client.endpoint()


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ({}, ""),
        ({"license": "mit"}, "mit"),
        ({"license": ["mit", "cc0-1.0"]}, "mit, cc0-1.0"),
        ({"license": "other", "license_name": "qwen-research"}, "other, qwen-research"),
    ],
)
def test_the_licence_is_that_of_the_card(card, licence):
    assert client.Listing("", card, {}).licence == licence
