"""What a stage needs of an executor, whichever device it is for."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from toka.messages import Plan, StepResult
from toka.trace import Recorder
from workers.stage.masks import Matcher
from workers.stage.partition import Partition
from workers.stage.sizes import Sizes


class AnyExecutor(Protocol):
    sizes: Sizes
    part: Partition
    device: torch.device
    matcher: Matcher | None
    """Where samples may have grammars, from after the warm-up on."""

    def execute(self, plan: Plan) -> StepResult | None:
        """Run a plan to its end. The result is with a stage that samples."""
        ...


@runtime_checkable
class AheadExecutor(Protocol):
    """One that launches plans before those in front of them have run; results come in the order of the plans."""

    part: Partition

    def observe(self, trace: Recorder) -> None:
        """Record what steps take from now on, on the device too. No step may be under way."""
        ...

    def submit(self, plan: Plan) -> None: ...

    def collect(self) -> StepResult:
        """The oldest plan's result, waited for; may be called from another thread than `submit`. Of a stage that
        does not sample, it says how long the step took and nothing else."""
        ...
