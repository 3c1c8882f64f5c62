"""Decides, each turn, whether the manager plans first or keeps its books first.

While the stages have plans queued there is time for everything. When they are about to run dry, the next
plan goes first, and what can wait waits: results for that one plan, since the stages then have one to run, and
admission for a number of plans at most, so that nothing starves when steps are short. What is postponed changes
when a token is computed, never which.
"""

from __future__ import annotations

from dataclasses import dataclass

ADMISSION_DEADLINE = 2
"""Plans in a row that may go before admission."""


@dataclass(slots=True)
class Pacing:
    depth: int
    """Plans the stages should have, those that run included."""
    low: int = 0
    """With so many, the first stage has none that it could begin."""
    admission_waited: int = 0
    """Plans sent since the last one that admitted."""
    admissions_postponed: int = 0
    """Plans that went before admission."""
    results_postponed: int = 0
    """Results that a plan went before."""

    def wants_plan(self, queued: int) -> bool:
        return queued < self.depth

    def hurry(self, queued: int) -> bool:
        """Whether the next plan goes before everything else, `queued` plans being unfinished."""
        return queued <= self.low

    def admit(self, hurrying: bool) -> bool:
        """Whether the next plan admits waiting sequences first."""
        return not hurrying or self.admission_waited >= ADMISSION_DEADLINE

    def planned(self, waiting_results: int, admitted: bool) -> None:
        """A plan was sent, `waiting_results` being there that have not been taken in."""
        self.admission_waited = 0 if admitted else self.admission_waited + 1
        self.admissions_postponed += not admitted
        self.results_postponed += waiting_results
