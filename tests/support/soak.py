"""Long counts: `make soak` runs the tests of random inputs for longer and writes down what it ran.

Hypothesis tests take their number of examples from the profile; a test that counts in its own way is
marked `@pytest.mark.soak` and takes its count from `count`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

RECORD = os.environ.get("TOKA_SOAK", "")
"""The file to write to; empty in an ordinary run."""
EXAMPLES = 50
SOAK_EXAMPLES = 500

settings.register_profile("default", max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
settings.register_profile("soak", max_examples=SOAK_EXAMPLES, deadline=None, print_blob=True)


def count(short: int, soak: int) -> int:
    """How often to repeat: `soak` times under `make soak`."""
    return soak if RECORD else short


def examples(factor: float) -> settings:
    """A decorator for hypothesis tests: `factor` times the examples of the profile in use."""
    return settings(max_examples=max(1, round(factor * settings.default.max_examples)))


def counts_something(item: pytest.Item) -> bool:
    """Whether a test is one of those whose counts grow under `make soak`."""
    return item.get_closest_marker("soak") is not None or is_hypothesis_test(getattr(item, "obj", None))


def write_record(reports: Iterable[pytest.TestReport], seconds: float) -> None:
    """Write a page of what ran, how long, and how it ended."""
    lines = [
        "# Soak",
        "",
        f"`make soak` on {time.strftime('%Y-%m-%d')}: {os.cpu_count()} cores, {platform.machine()}, Python",
        f"{platform.python_version()}; {SOAK_EXAMPLES} examples of each hypothesis test; {seconds:.0f} s in all.",
        "",
        "| test | outcome | seconds |",
        "|---|---|---|",
        *(f"| `{each.nodeid}` | {each.outcome} | {each.duration:.1f} |" for each in reports),
    ]
    Path(RECORD).write_text("\n".join(lines) + "\n")
