"""Hypothesis profiles, and the record that `make soak` writes."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import settings

from tests.support import soak

# Before torch is imported: its threads must not spin while the processes that tests start want the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
settings.load_profile("soak" if soak.RECORD else "default")
_began = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: counts in its own way; `make soak` runs it for longer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if soak.RECORD:
        chosen = [item for item in items if soak.counts_something(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if soak.RECORD:
        stats = terminalreporter.stats
        reports = [each for outcome in ("passed", "failed") for each in stats.get(outcome, [])]
        soak.write_record(reports, time.monotonic() - _began)
