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
from workers.stage.cuda.arrange import Arranged, Arranger, Int32s, Int64s
from workers.stage.cuda.buckets import Kind
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.clock import DeviceClock
from workers.stage.cuda.decoder import CudaDecoder
from workers.stage.cuda.draw import Draw
from workers.stage.cuda.fused import Fused
from workers.stage.cuda.graphs import Steps
from workers.stage.cuda.inputs import InputBuffer, upload
from workers.stage.cuda.special import Special, found
from workers.stage.kv_cache import CacheShape
from workers.stage.sizes import Sizes
from workers.stage.weights import Weights


@dataclass(frozen=True, slots=True)
class _Samples:
    """Which of a step's samples are drawn how; `wanted`: log-probabilities of the special ones."""

    plain: Int64s
    special: Int64s
    wanted: Int32s
    width: int
    """Of the special ones' results."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    step: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event
    samples: _Samples
    results: list[Tensor]
    """In pinned memory: the plain samples' ids, then results of special ones."""


class CudaExecutor:
    """Plans run in the order they are submitted; results come in the same order.

    `submit` and `collect` may be called from two threads.
    """

    def __init__(self, config: ModelConfig, weights: Weights, sizes: Sizes, fused: Fused) -> None:
        device, self.sizes = weights.device, sizes
        self.device = device
        # Padding has a slot of its own, whose pages are all the scratch page.
        slots = sizes.max_seqs + 1
        shape = CacheShape(config.num_layers, sizes.pages, sizes.page_size, config.num_kv_heads, config.head_dim)
        self.cache = PagedCache(shape, weights.dtype, device)
        self.table = torch.zeros(slots, sizes.pages_per_seq, dtype=torch.int32, device=device)
        self.table[-1] = shape.scratch
        last = torch.zeros(slots, dtype=torch.int64, device=device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        parts = sizes.max_tokens
        self._arranger = Arranger(sizes.page_size, config.num_heads, config.num_kv_heads, processors, parts)
        self._buffer = InputBuffer(sizes.max_tokens, sizes.max_seqs, slots - 1, device)
        decoder = CudaDecoder(config, weights, fused, self.cache, self.table, last, parts)
        self.draw = Draw(weights.head, config.vocab_size, last)
        self.special = Special(self.draw, weights.dtype.itemsize, sizes.max_seqs)
        self.steps = Steps(decoder, self.draw, self.special, self._buffer, sizes.max_tokens, sizes.max_seqs)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._submitted: deque[_Submitted] = deque()
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
        with self._trace.span("arrange", step=plan.step):
            self._take_changes(plan)
            arranged = self._arranger.arrange(plan) if len(plan.row_slots) else None
            samples = self._split(plan)
            if arranged is not None:
                self._fill(plan, arranged, samples.plain)
        with self._trace.span("launch"):
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began.record()
            results = [] if arranged is None else self._run(plan, arranged, samples)
            self._send_back(plan.step, began, samples, results)

    def collect(self) -> StepResult:
        """The oldest step's result; waits until it has come, without holding the interpreter."""
        oldest = self._submitted.popleft()
        oldest.copied.synchronize()
        if self._clock is not None:
            began, ended = self._clock.at(oldest.began), self._clock.at(oldest.ended)
            self._trace.add("step", began, ended, track=DEVICE_TRACK, arguments={"step": oldest.step})
        samples, results = oldest.samples, [each.numpy() for each in oldest.results]
        plain = results[:1] if len(samples.plain) else []
        special = found(results[len(plain) :], samples.wanted, samples.width)
        tokens = np.empty(len(samples.plain) + len(samples.special), np.int32)
        tokens[samples.special] = special.tokens
        if plain:
            tokens[samples.plain] = plain[0]
        return StepResult(
            step=oldest.step,
            busy_us=int(oldest.began.elapsed_time(oldest.ended) * 1e3),
            tokens=tokens,
            chosen=special.chosen,
            top_ids=special.top_ids,
            top_values=special.top_values,
        )

    def _take_changes(self, plan: Plan) -> None:
        """Slots, page tables and page copies."""
        if len(plan.setup_slots):
            self.draw.set_up(plan)
            self.special.set_up(plan)
        if len(plan.table_slots):
            places = plan.table_slots.astype(np.int64) * self.table.shape[1] + plan.table_indices
            where, pages = upload([places, plan.table_pages], self.device)
            self.table.view(-1).index_copy_(0, where, pages)
        if len(plan.copies):
            pairs = plan.copies.reshape(-1, 2).astype(np.int64)
            self.cache.copy(*upload([pairs[:, 0], pairs[:, 1]], self.device))

    def _split(self, plan: Plan) -> _Samples:
        among = self.special.among(plan.sample_slots, plan.sample_positions)
        special = np.flatnonzero(among)
        wanted = self.special.wanted(plan.sample_slots[special])
        return _Samples(np.flatnonzero(~among), special, wanted, self.special.width(wanted))

    def _fill(self, plan: Plan, arranged: Arranged, plain: Int64s) -> None:
        arranged = replace(arranged, sample_tokens=arranged.sample_tokens[plain])
        size, samples = self.steps.token_size(len(arranged.tokens)), self.steps.sample_size(len(plain))
        self._buffer.fill(size, arranged, samples, plan.sample_slots[plain], plan.sample_positions[plain])

    def _run(self, plan: Plan, arranged: Arranged, samples: _Samples) -> list[Tensor]:
        """The plain samples' ids, where there are any, and results of special ones, portion after portion."""
        size = self.steps.token_size(len(arranged.tokens))
        self.steps.forward(Kind(size, len(arranged.prefix_tiles) > 0, len(arranged.chunk_tiles) > 0))
        results = []
        if len(samples.plain):
            self.steps.draw(self.steps.sample_size(len(samples.plain)))
            # A copy: the next step writes over them, and the next portion over a portion's results.
            results.append(self.steps.tokens[: len(samples.plain)].clone())
        for start in range(0, len(samples.special), self.special.rows):
            part = samples.special[start : start + self.special.rows]
            self.special.fill(arranged.sample_tokens[part], plan.sample_slots[part], plan.sample_positions[part])
            self.steps.special(self.special.size(len(part)), samples.width)
            results.append(self.special.results(len(part), samples.width).clone())
        return results

    def _send_back(self, step: int, began: torch.cuda.Event, samples: _Samples, results: list[Tensor]) -> None:
        """Copy results on a stream of their own: the next step does not wait for it."""
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        self._side.wait_event(ended)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            copies = [_to_host(each, self._side) for each in results]
            copied.record()
        self._submitted.append(_Submitted(step, began, ended, copied, samples, copies))


def _to_host(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
