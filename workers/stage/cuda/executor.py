"""Executes plans on a GPU without waiting for it: `submit` launches a step, `collect` takes its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from toka.messages import Plan, StepResult
from toka.model import ModelConfig
from toka.trace import DEVICE_TRACK, OFF, Recorder
from workers.stage.cuda.arrange import Arranged, Arranger, Int32s
from workers.stage.cuda.buckets import Kind
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.clock import DeviceClock
from workers.stage.cuda.decoder import CudaDecoder
from workers.stage.cuda.fused import Fused
from workers.stage.cuda.graphs import Steps
from workers.stage.cuda.inputs import InputBuffer, upload
from workers.stage.cuda.pipe import Coming, NcclPipe
from workers.stage.cuda.ranks import ALONE, Ranks
from workers.stage.cuda.sampling import Sampling, Split, result
from workers.stage.cuda.scoring import Scoring
from workers.stage.kv_cache import CacheShape
from workers.stage.masks import Matcher
from workers.stage.partition import Partition, whole
from workers.stage.scoring import Wanted, unpacked, wanted
from workers.stage.sizes import Sizes
from workers.stage.weights import Weights

MOST_UNTAKEN = 64
"""Steps whose ids nothing needed yet: more than are on their way at once."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    step: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event
    slots: Int32s
    """Those that it sampled for."""
    split: Split | None
    """None where nothing was drawn."""
    results: list[Tensor]
    """In pinned memory: the plain samples' ids, then results of special ones."""
    asked: Wanted | None
    """None where nothing was scored."""
    scores: list[Tensor]
    """In pinned memory, portion after portion."""


class CudaExecutor:
    """Plans run in the order they are submitted; results come in the same order.

    `submit` and `collect` may be called from two threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        sizes: Sizes,
        fused: Fused,
        part: Partition | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """config, weights: of this stage's `part`, which `ranks` share; None: of a whole model."""
        device, self.sizes = weights.device, sizes
        self.device, self._gpu = device, torch.cuda.current_device()
        self.part = part or whole(config)
        self.matcher: Matcher | None = None
        self.pipe: NcclPipe | None = None
        """To the stages before and behind this one; None: it is alone, or is being warmed up, ..."""
        self.link: NcclPipe | None = None
        """... and will have this one."""
        # Padding has a slot of its own, whose pages are all the scratch page.
        slots = sizes.max_seqs + 1
        shape = CacheShape(config.num_layers, sizes.pages, sizes.page_size, config.num_kv_heads, config.head_dim)
        self.cache = PagedCache(shape, weights.dtype, device)
        self.table = torch.zeros(slots, sizes.pages_per_seq, dtype=torch.int32, device=device)
        self.table[-1] = shape.scratch
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        parts = sizes.max_tokens
        self._arranger = Arranger(sizes.page_size, config.num_heads, config.num_kv_heads, processors, parts)
        self._buffer = InputBuffer(sizes.max_tokens, sizes.max_seqs, slots - 1, device)
        decoder = CudaDecoder(config, weights, fused, self.cache, self.table, self.last, parts, ranks)
        self.sampling = self.scoring = draw = special = None
        if weights.head is not None:
            size = weights.dtype.itemsize
            self.sampling = Sampling(weights.head, config.vocab_size, self.last, sizes.max_seqs, size, ranks)
            draw, special = self.sampling.draw, self.sampling.special
            self.scoring = Scoring(weights.head, draw.ids, device, size, ranks)
        most = sizes.max_tokens, sizes.max_seqs
        self.steps = Steps(decoder, draw, special, self.scoring, self._buffer, *most, self.part.first)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._submitted: deque[_Submitted] = deque()
        self._sampled: deque[tuple[int, Int32s, Coming]] = deque()
        """Ids that the last stage draws for this one: their step, their slots."""
        self._trace = OFF
        self._clock: DeviceClock | None = None

    @torch.inference_mode()
    def capture(
        self, progress: Callable[[float], None] = lambda fraction: None, sizes: Sequence[int] | None = None
    ) -> None:
        """Capture the graphs of all steps, or of some of `steps.sizes`; others are launched kernel by kernel."""
        self.steps.capture(self.steps.sizes if sizes is None else sizes, progress)

    def observe(self, trace: Recorder) -> None:
        """Record what steps take from now on, on the GPU too."""
        self._trace, self._clock = trace, DeviceClock() if trace.on else None
        trace.name_track("GPU steps", DEVICE_TRACK)

    def execute(self, plan: Plan) -> StepResult:
        self.submit(plan)
        return self.collect()

    @torch.inference_mode()
    def submit(self, plan: Plan) -> None:
        """Launch a step, and the copies of its results."""
        rows = len(plan.row_slots) > 0
        with self._trace.span("arrange", step=plan.step):
            self._take_changes(plan)
            arranged = self._arranger.arrange(plan) if rows else None
            split = self.sampling.split(plan) if self.sampling is not None else None
            if arranged is not None:
                self._fill(plan, arranged, split)
            # Behind all memory that this step takes: to take some may have the GPU finish what was launched before.
            coming = self.pipe.receive(len(plan.tokens)) if self.pipe and rows and not self.part.first else None
        with self._trace.span("launch"):
            if coming is not None and self.steps.incoming is not None:
                coming.put(self.steps.incoming[: len(plan.tokens)])
            self._take_sampled(plan.after)
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began.record()
            results = [] if arranged is None else self._run(plan, arranged, split)
            asked = wanted(plan, arranged.row_begins) if self.scoring and arranged and plan.scores else None
            scores = [] if asked is None or self.scoring is None else self.scoring.score(asked, self.steps.score)
            self._send_back(plan, began, split, results, asked, scores)

    def collect(self) -> StepResult:
        """The oldest step's result; waits until it has come, without holding the interpreter."""
        # A thread begins with the first GPU, where its first call would take half a gigabyte.
        torch.cuda.set_device(self._gpu)
        oldest = self._submitted.popleft()
        oldest.copied.synchronize()
        if self._clock is not None:
            began, ended = self._clock.at(oldest.began), self._clock.at(oldest.ended)
            self._trace.add("step", began, ended, track=DEVICE_TRACK, arguments={"step": oldest.step})
        busy_us = int(oldest.began.elapsed_time(oldest.ended) * 1e3)
        likely = np.empty(0, np.int64) if oldest.asked is None else oldest.asked.likely
        scored = unpacked([each.numpy() for each in oldest.scores], likely)
        found = result(oldest.step, busy_us, oldest.split, [each.numpy() for each in oldest.results], scored)
        self._tell_matcher(oldest, found)
        return found

    def _tell_matcher(self, step: _Submitted, found: StepResult) -> None:
        """At once, and not by the thread that submits: it may wait for the masks that follow from this."""
        if self.matcher is None or step.split is None or not self.part.answers:
            return
        constrained = step.split.constrained
        if constrained.any():
            self.matcher.sampled(step.step, step.slots[constrained], found.tokens[constrained])

    def _take_sampled(self, step: int) -> None:
        """Put down the ids of steps up to `step`, and others that must have come long since."""
        while self._sampled and (self._sampled[0][0] <= step or len(self._sampled) > MOST_UNTAKEN):
            _, slots, ids = self._sampled.popleft()
            (where,) = upload([slots.astype(np.int64)], self.device)
            drawn = torch.empty_like(where)
            ids.put(drawn)
            self.last.index_copy_(0, where, drawn)

    def _take_changes(self, plan: Plan) -> None:
        """Slots, page tables and page copies."""
        if self.sampling is not None:
            self.sampling.set_up(plan)
        if len(plan.table_slots):
            places = plan.table_slots.astype(np.int64) * self.table.shape[1] + plan.table_indices
            where, pages = upload([places, plan.table_pages], self.device)
            self.table.view(-1).index_copy_(0, where, pages)
        if len(plan.copies):
            pairs = plan.copies.reshape(-1, 2).astype(np.int64)
            self.cache.copy(*upload([pairs[:, 0], pairs[:, 1]], self.device))

    def _fill(self, plan: Plan, arranged: Arranged, split: Split | None) -> None:
        plain = np.empty(0, np.int64) if split is None else split.plain
        arranged = replace(arranged, sample_tokens=arranged.sample_tokens[plain])
        size, samples = self.steps.token_size(len(arranged.tokens)), self.steps.sample_size(len(plain))
        self._buffer.fill(size, arranged, samples, plan.sample_slots[plain], plan.sample_positions[plain])

    def _run(self, plan: Plan, arranged: Arranged, split: Split | None) -> list[Tensor]:
        """Launch the step's own work, and send on what it makes; its results."""
        size = self.steps.token_size(len(arranged.tokens))
        self.steps.forward(Kind(size, len(arranged.prefix_tiles) > 0, len(arranged.chunk_tiles) > 0))
        results = []
        if self.sampling is not None and split is not None:
            results = self.sampling.run(plan, arranged, split, self.steps, self.matcher)
        if self.pipe is not None:
            self._pass_on(self.pipe, plan, len(arranged.tokens))
        return results

    def _pass_on(self, pipe: NcclPipe, plan: Plan, tokens: int) -> None:
        if self.part.last and len(plan.sample_slots):
            (slots,) = upload([plan.sample_slots.astype(np.int64)], self.device)
            pipe.send_ids(self.last.index_select(0, slots))
        elif not self.part.last:
            pipe.send(self.steps.hidden[:tokens])
        if self.part.first and len(plan.sample_slots):
            # Not before what these ids are made from has been sent: memory that is allocated in between has the GPU
            # finish what was launched before it.
            self._sampled.append((plan.step, plan.sample_slots, pipe.receive_ids(len(plan.sample_slots))))

    def _send_back(
        self,
        plan: Plan,
        began: torch.cuda.Event,
        split: Split | None,
        results: list[Tensor],
        asked: Wanted | None,
        scores: list[Tensor],
    ) -> None:
        """Copy results on a stream of their own: the next step does not wait for it."""
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        self._side.wait_event(ended)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            copies, scored = ([_to_host(each, self._side) for each in some] for some in (results, scores))
            copied.record()
        self._submitted.append(
            _Submitted(plan.step, began, ended, copied, plan.sample_slots, split, copies, asked, scored)
        )


def _to_host(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
