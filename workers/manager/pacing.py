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
    plans: int = 0
    """Plans sent, of which ..."""
    hurried: int = 0
    """... went before results that were there, and ..."""
    admissions_postponed: int = 0
    """... before admission."""
    results_postponed: int = 0
    """Results that a plan went before, each counted with every such plan."""

    def wants_plan(self, queued: int) -> bool:
        return queued < self.depth

    def hurry(self, queued: int) -> bool:
        """Whether the next plan goes before everything else, `queued` plans being unfinished."""
        return queued == 0 and self.results_waited < RESULTS_DEADLINE

    def admit(self, hurrying: bool) -> bool:
        """Whether the next plan admits waiting sequences first."""
        return not hurrying or self.admission_waited >= ADMISSION_DEADLINE

    def planned(self, waiting_results: int, admitted: bool) -> None:
        """A plan was sent, `waiting_results` being there that have not been taken in."""
        hurried = waiting_results > 0
        self.results_waited = self.results_waited + 1 if hurried else 0
        self.admission_waited = 0 if admitted else self.admission_waited + 1
        self.plans += 1
        self.hurried += hurried
        self.admissions_postponed += not admitted
        self.results_postponed += waiting_results
