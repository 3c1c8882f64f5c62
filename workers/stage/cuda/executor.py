"""Executes plans on a GPU without waiting for it: `submit` launches a step, `collect` takes its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toka.messages import Plan, StepResult
from toka.model import ModelConfig
from workers.stage.cuda.cache import PagedCache
from workers.stage.cuda.decoder import CudaDecoder
from workers.stage.cuda.draw import Draw
from workers.stage.cuda.graphs import Steps
from workers.stage.cuda.inputs import Arranged, Arranger, InputBuffer, upload
from workers.stage.kv_cache import CacheShape
from workers.stage.sampler import Drawn, Sampler
from workers.stage.sizes import Sizes
from workers.stage.slots import LOGPROBS, MIN_P, TOP_K, TOP_P, Slots
from workers.stage.weights import Weights


@dataclass(frozen=True, slots=True)
class _Submitted:
    step: int
    began: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event
    results: list[Tensor]
    """In pinned memory: tokens and, where some were asked for, log-probabilities as in StepResult."""


class CudaExecutor:
    """Plans run in the order they are submitted; results come in the same order.

    `submit` and `collect` may be called from two threads.
    """

    def __init__(self, config: ModelConfig, weights: Weights, sizes: Sizes) -> None:
        device, self.sizes = weights.device, sizes
        self.device = device
        # Padding has a slot of its own, whose pages are all the scratch page.
        slots = sizes.max_seqs + 1
        shape = CacheShape(config.num_layers, sizes.pages, sizes.page_size, config.num_kv_heads, config.head_dim)
        self.cache = PagedCache(shape, weights.dtype, device)
        self.table = torch.zeros(slots, sizes.pages_per_seq, dtype=torch.int32, device=device)
        self.table[-1] = shape.scratch
        self.slots = Slots(slots, config.vocab_size, device)
        self._sampler = Sampler(self.slots)
        self._special = np.zeros(slots, np.bool_)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        parts = sizes.max_tokens
        self._arranger = Arranger(sizes.page_size, config.num_heads, config.num_kv_heads, processors, parts)
        self._buffer = InputBuffer(sizes.max_tokens, sizes.max_seqs, slots - 1, device)
        decoder = CudaDecoder(config, weights, self.cache, self.table, self.slots.tokens, parts)
        self.draw = Draw(weights.head, config.vocab_size, self.slots.tokens)
        self.steps = Steps(decoder, self.draw, self._buffer, sizes.max_tokens, sizes.max_seqs)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._submitted: deque[_Submitted] = deque()

    @torch.inference_mode()
    def capture(self, progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Capture the graphs of all steps; before it, every step is launched kernel by kernel."""
        self.steps.capture(progress)

    def execute(self, plan: Plan) -> StepResult:
        self.submit(plan)
        return self.collect()

    @torch.inference_mode()
    def submit(self, plan: Plan) -> None:
        """Launch a step, and the copies of its results."""
        self._take_changes(plan)
        arranged = self._arranger.arrange(plan) if len(plan.row_slots) else None
        if arranged is not None:
            self._fill(plan, arranged)
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        tokens, drawn = (None, None) if arranged is None else self._run(plan, arranged)
        self._send_back(plan.step, began, tokens, drawn)

    def collect(self) -> StepResult:
        """The oldest step's result; waits until it has come, without holding the interpreter."""
        oldest = self._submitted.popleft()
        oldest.copied.synchronize()
        tokens, chosen, ids, values = (each.numpy() for each in oldest.results)
        return StepResult(
            step=oldest.step,
            busy_us=int(oldest.began.elapsed_time(oldest.ended) * 1e3),
            tokens=tokens,
            chosen=chosen,
            top_ids=ids.astype(np.int32, copy=False),
            top_values=values,
        )

    def _take_changes(self, plan: Plan) -> None:
        """Slots, page tables and page copies."""
        if len(plan.setup_slots):
            self.slots.set_up(plan)
            self.draw.set_up(plan)
            floats, ints = plan.setup_floats.reshape(-1, 6), plan.setup_ints.reshape(-1, 4)
            filtered = (floats[:, TOP_P] < 1) | (floats[:, MIN_P] > 0) | (ints[:, TOP_K] > 0)
            self._special[plan.setup_slots] = filtered | (ints[:, LOGPROBS] >= 0)
            self._special[[extras.slot for extras in plan.extras]] = True
        if len(plan.table_slots):
            places = plan.table_slots.astype(np.int64) * self.table.shape[1] + plan.table_indices
            where, pages = upload([places, plan.table_pages], self.device)
            self.table.view(-1).index_copy_(0, where, pages)
        if len(plan.copies):
            pairs = plan.copies.reshape(-1, 2).astype(np.int64)
            self.cache.copy(*upload([pairs[:, 0], pairs[:, 1]], self.device))

    def _fill(self, plan: Plan, arranged: Arranged) -> None:
        size, samples = self._sizes(arranged)
        self._buffer.fill(size, arranged, samples, plan.sample_slots, plan.sample_positions)

    def _sizes(self, arranged: Arranged) -> tuple[int, int]:
        """Tokens and samples that the step is filled up to."""
        return self.steps.token_size(len(arranged.tokens)), self.steps.sample_size(len(arranged.sample_tokens))

    def _run(self, plan: Plan, arranged: Arranged) -> tuple[Tensor | None, Drawn | None]:
        """The ids sampled, and what the special ones among them have beside."""
        size, samples = self._sizes(arranged)
        self.steps.forward(size, len(arranged.prefix_tiles) > 0, len(arranged.chunk_tiles) > 0)
        if not len(plan.sample_slots):
            return None, None
        self.steps.draw(samples)
        tokens = self.steps.tokens[: len(plan.sample_slots)]
        special = np.flatnonzero(self._special[plan.sample_slots])
        return tokens, self._sample_special(plan, arranged, special, tokens) if len(special) else None

    def _sample_special(self, plan: Plan, arranged: Arranged, special: NDArray[np.intp], tokens: Tensor) -> Drawn:
        """Draw anew where the slot asks for more than a temperature. This waits for the GPU."""
        where, ends = upload([special.astype(np.int64), arranged.sample_tokens[special]], self.device)
        logits = self.draw.head(self.steps.hidden.index_select(0, ends)).float()
        slots = plan.sample_slots[special].astype(np.int64)
        positions = plan.sample_positions[special].astype(np.int64)
        drawn = self._sampler.sample(logits, np.arange(len(special)), slots, positions)
        tokens.index_copy_(0, where, drawn.tokens.int())
        self.slots.record(slots, drawn.tokens)
        return drawn

    def _send_back(self, step: int, began: torch.cuda.Event, tokens: Tensor | None, drawn: Drawn | None) -> None:
        """Copy results on a stream of their own: the next step does not wait for it."""
        results = [torch.empty(0, dtype=kind) for kind in (torch.int32, torch.float32, torch.int32, torch.float32)]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Also of the ids a copy: the next step writes over them.
        found = [] if tokens is None else [tokens.clone()]
        found += [] if drawn is None else [drawn.chosen, drawn.top_ids, drawn.top_values]
        ended.record()
        self._side.wait_event(ended)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            results[: len(found)] = [_to_host(each, self._side) for each in found]
            copied.record()
        self._submitted.append(_Submitted(step, began, ended, copied, results))


def _to_host(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    tensor.record_stream(stream)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
