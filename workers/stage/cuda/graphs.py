"""Runs steps, as CUDA graphs once these are captured: one of the decoder for each number of tokens and kind of
step, one of drawing for each number of samples, one of special draws for each size and width of a portion, one of
scoring for each width."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.stage.cuda.buckets import WIDTHS, Kind, filled, kinds, sizes_up_to
from workers.stage.cuda.decoder import CudaDecoder
from workers.stage.cuda.draw import Draw
from workers.stage.cuda.inputs import InputBuffer
from workers.stage.cuda.scoring import Scoring
from workers.stage.cuda.special import Special


class Steps:
    """`hidden`: [tokens, hidden], and `tokens`: [samples] int32, hold what the last step gave; `incoming`, of hidden's
    shape, is where a step of a later stage of a pipeline begins.

    All graphs share one pool of memory: they run one after another, and keep nothing there.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        draw: Draw | None,
        special: Special | None,
        scoring: Scoring | None,
        buffer: InputBuffer,
        tokens: int,
        samples: int,
        first: bool,
    ) -> None:
        """draw, special, scoring: where the model ends here; tokens, samples: most of a step; first: whether it begins
        here."""
        self._decoder, self._draw, self._special, self._buffer = decoder, draw, special, buffer
        self._scoring = scoring
        weights, shape = decoder.weights, (tokens, decoder.hidden_size)
        self.hidden = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        self.incoming = None if first else torch.zeros_like(self.hidden)
        self.tokens = torch.zeros(samples, dtype=torch.int32, device=weights.device)
        self._token_sizes, self._sample_sizes = sizes_up_to(tokens), sizes_up_to(samples)
        self._kinds = kinds(self._token_sizes, samples)
        self._captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def token_size(self, tokens: int) -> int:
        """What a step of `tokens` tokens is filled up to."""
        return filled(self._token_sizes, tokens)

    def sample_size(self, samples: int) -> int:
        return filled(self._sample_sizes, samples)

    def forward(self, kind: Kind) -> None:
        """Fill `hidden` from the inputs in the buffer."""
        self._run(self._forward, *kind)

    def draw(self, size: int) -> None:
        """Fill `tokens` from `hidden` and the samples in the buffer."""
        self._run(self._drawn, size)

    def special(self, size: int, width: int) -> None:
        """Fill the results of `Special` from `hidden` and its portion, of `size` rows."""
        self._run(self._specially, size, width)

    def score(self, width: int) -> None:
        """Fill the results of `Scoring` from `hidden` and its portion."""
        self._run(self._scored, width)

    def _run(self, run: Callable[..., None], *key: int) -> None:
        graph = self._captured.get((run.__name__, *key))
        if graph is not None:
            graph.replay()
        else:
            run(*key)

    def _forward(self, size: int, grouped: bool, chunked: bool) -> None:
        rows, inputs = min(size, len(self.tokens)), self._buffer.inputs(size)
        residual = self._decoder.embed(inputs) if self.incoming is None else self.incoming[:size]
        self.hidden[:size] = self._decoder.run(residual, inputs, rows, grouped, chunked)

    def _drawn(self, size: int) -> None:
        assert self._draw is not None
        samples = self._buffer.samples(size)
        hidden = self.hidden.index_select(0, samples.tokens)
        self._draw.draw(hidden, samples.slots, samples.outputs, self.tokens[:size])

    def _specially(self, size: int, width: int) -> None:
        assert self._special is not None
        self._special.run(self.hidden, size, width)

    def _scored(self, width: int) -> None:
        assert self._scoring is not None
        self._scoring.run(self.hidden, width)

    @property
    def sizes(self) -> list[int]:
        """What graphs are captured for, the largest first, so that the others find room in its memory."""
        samples = self._sample_sizes if self._draw is not None else []
        return sorted({*self._token_sizes, *samples}, reverse=True)

    def capture(self, sizes: Sequence[int], progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Capture the graphs for some of `sizes`, and those of portions, where they are not captured yet.

        Runs steps of blank inputs: page 0 must not be in use yet.
        """
        self._buffer.clear()
        for done, size in enumerate(sizes):
            for kind in self._kinds:
                if kind.size == size:
                    self._capture(self._forward, *kind)
            if size in self._sample_sizes and self._draw is not None:
                self._capture(self._drawn, size)
            progress((done + 1) / (len(sizes) + 1))
        if self._special is not None:
            self._special.clear()
            for size in reversed(self._special.sizes):
                for width in WIDTHS:
                    self._capture(self._specially, size, width)
        if self._scoring is not None:
            self._scoring.clear()
            for width in WIDTHS:
                self._capture(self._scored, width)
        progress(1.0)

    def _capture(self, run: Callable[..., None], *key: int) -> None:
        if (run.__name__, *key) in self._captured:
            return
        # Once before, for what is compiled, loaded or allocated at a first run.
        run(*key)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's own thread looks after its work meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run(*key)
        self._captured[run.__name__, *key] = graph
