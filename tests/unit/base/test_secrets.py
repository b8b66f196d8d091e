"""Secrets in names and in texts."""

from __future__ import annotations

import time

import pytest

from launch.base.text import SECRET_NAME, holds_secret, shown, without_secrets

pytestmark = pytest.mark.unit

A = "aB3dE5gH7jK9mN1pQ3sT5vX7zB9dF1hJ3lN5pR7"  # letters and figures of no secret
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----"


@pytest.mark.parametrize(
    "secret",
    [
        *(f"hf_{A[:34]}", f"ghp_{A[:36]}", f"github_pat_{A[:30]}", f"glpat-{A[:20]}", f"glrt-{A}"),
        *(f"npm_{A[:36]}", "AKIAIOSFODNN7EXAMPLE", f"AIza{A[:35]}", f"sk-{A[:30]}", f"r8_{A[:37]}"),
        *(f"xoxb-{A[:20]}", f"eyJ{A[:12]}.eyJ{A[:12]}.{A[:12]}", f"Bearer {A[:24]}", KEY, KEY[:60]),
    ],
)
def test_a_secret_is_replaced_whole_wherever_it_stands(secret):
    said = f"before {secret} behind"
    assert holds_secret(said)
    assert without_secrets(said) in ("before [secret] behind", "before [secret]")


@pytest.mark.parametrize(
    "before", ["\x1b[31m", "\x1b[1;32m", r"line\n", r"tab\t", "?token%3D", "key=", "'", "\n"]
)
def test_a_secret_is_found_behind_a_colour_an_escape_and_a_percent_sign(before):
    for secret in (f"hf_{A[:34]}", f"sk-{A[:30]}", "AKIAIOSFODNN7EXAMPLE", f"ghp_{A[:36]}"):
        assert without_secrets(f"{before}{secret} behind") == f"{before}[secret] behind"


@pytest.mark.parametrize(
    "said", ["Authorization: Basic bWU6aHVudGVyMg==", "'Authorization': 'Basic bWU6aHVudGVyMg=="]
)
def test_a_basic_authorization_is_replaced(said):
    assert without_secrets(f"{said}'") == "[secret]'" or without_secrets(f"{said}'") == "'[secret]'"


@pytest.mark.parametrize(
    "name", ["CONDA_PW", "WIFI_PSK", "HF_TOKENS", "OPENAI_APIKEYS", "DB_PWD", "db.pwd"]
)
def test_names_that_say_secret_are_secrets(name):
    assert SECRET_NAME.search(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET https://me:hunter2@host/x", "GET https://[secret]@host/x"),
        ("redis://:hunter2@10.0.0.1:6379", "redis://[secret]@10.0.0.1:6379"),
        ("me:hunter2!@mirror.example.org", "[secret]@mirror.example.org"),
    ],
)
def test_user_and_password_of_an_address_are_replaced(text, expected):
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("mail:someone@example.org", "git@github.com:owner/name.git", "http://host:29500/path"),
        *(
            "rank 1: 10.0.0.1:29500 refused",
            "the bearer of bad news",
            "sk-learn",
            "npm_config_cache",
        ),
        *("s3://bucket/key", "user@host:/data/x@y.parquet", "2024-03-05T01:02:03@node1.cluster"),
    ],
)
def test_texts_without_a_secret_stay_as_they_are(text):
    assert shown(text) == text


@pytest.mark.parametrize(
    "name",
    [
        *(
            "max_tokens",
            "add_tokens",
            "include_num_input_tokens_seen",
            "label_names",
            "keep",
            "pad",
        ),
        *("MONKEYPATCH", "KEYMAP", "AUTHOR", "PATH", "COMPASS", "passed", "PWD", "OLDPWD"),
    ],
)
def test_names_of_other_things_are_no_secrets(name):
    assert not SECRET_NAME.search(name)


@pytest.mark.parametrize(
    "unit",
    ["+", "eyJ-", "a+", "a.b+", "x:", "://", "hf_", "\\n", "%3D", "bearer  ", "-----BEGIN A"],
)
def test_texts_that_a_pattern_nearly_matches_take_no_time_by_their_square(unit):
    """200,000 characters took minutes of processor time; they take less than a second."""
    before = time.process_time()
    shown(unit * (200_000 // len(unit)))
    assert time.process_time() - before < 60
