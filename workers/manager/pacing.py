"""Decides, each turn, whether the manager plans first or keeps its books first.

While the stages have plans queued there is time for everything. When they are about to run dry, the next
plan goes first, and what can wait waits: taking in results, admission. Each has a deadline in steps, so that
nothing starves when steps are short. What is postponed changes when a token is computed, never which.
"""

from __future__ import annotations

from dataclasses import dataclass

RESULTS_DEADLINE = 4
ADMISSION_DEADLINE = 2


@dataclass(slots=True)
class Pacing:
    depth: int
    """Plans the stages should have, the running one included."""
    results_waited: int = 0
    """Plans sent since results were last taken in."""
    admission_waited: int = 0

    def wants_plan(self, queued: int) -> bool:
        return queued < self.depth

    def hurry(self, queued: int) -> bool:
        """Whether the next plan goes before everything else, `queued` plans being unfinished."""
        return queued == 0 and self.results_waited < RESULTS_DEADLINE

    def admit(self, hurrying: bool) -> bool:
        """Whether the next plan admits waiting sequences first."""
        return not hurrying or self.admission_waited >= ADMISSION_DEADLINE

    def planned(self, hurrying: bool, admitted: bool) -> None:
        self.results_waited = self.results_waited + 1 if hurrying else 0
        self.admission_waited = 0 if admitted else self.admission_waited + 1
