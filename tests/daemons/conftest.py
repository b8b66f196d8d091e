"""The rule for programs that a test needs and a machine may lack."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def needs():
    """A function that takes why a test cannot run here, "" if it can. It skips the test, as these
    programs are no part of the README's set-up; where CI is set, which installs them, it fails."""

    def check(why: str) -> None:
        if why and os.environ.get("CI"):
            pytest.fail(why)
        if why:
            pytest.skip(why)

    return check
