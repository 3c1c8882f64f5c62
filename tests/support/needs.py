"""Skip, by name, what a machine lacks; where TOKA_TEST_ALL=1 is set, such a skip fails."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def needs(program: str) -> str:
    """The path of a program the test runs. Skips the test where there is none."""
    path = shutil.which(program)
    if path is None:
        lacks(f"{program} is missing")
    return path


def lacks(what: str) -> NoReturn:
    """Skip the test: the machine cannot do what it needs."""
    if os.environ.get("TOKA_TEST_ALL") == "1":
        pytest.fail(f"{what} and TOKA_TEST_ALL is set")
    pytest.skip(what)
