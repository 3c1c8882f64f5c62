"""Grammars by their text, compiled on a thread, and the vocabulary they are compiled for, read at the first of them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from toka.model import open_model

MOST_COMPILED = 256
"""Grammars that are kept, the last ones asked for."""
ROW_ITEMS = 500
"""Ways in which an output can be read, at one place in it. With so many a mask took 17 ms, for which the whole batch
waits; with the 2,000 that are the default, 200 ms. Schemas seldom need fifty."""
LEXER_STATES = 50_000
"""Some 2 KB each, for every sequence."""
STACK_BYTES = 512 << 20
"""Rules are compiled by recursion: 20,000 that each lead to the next take more than the usual 8 MiB. Only what is
used of it takes memory."""
MOST_THREADS = 8

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's ids, as llguidance knows them."""

    tokenizer: llguidance.LLTokenizer
    executor: llguidance.LLExecutor
    size: int
    """Ids of the model."""
    eos: list[int]
    end: Words
    """A mask of these alone: [words]."""

    def masks(self, matchers: list[tuple[llguidance.LLMatcher, int]], rows: int) -> Words:
        """[rows, words]: those that the matchers allow next, each in the row it is given with; other rows are 0."""
        found = np.zeros((rows, _words(self.tokenizer.vocab_size)), np.int32)
        if matchers:
            fill_next_token_bitmask_par(self.executor, matchers, found)
        return found[:, : _words(self.size)]

    def mask_of(self, ids: list[int]) -> Words:
        """[words]: these ids alone."""
        return _mask_of(ids, self.size)


def load(model: str) -> Vocabulary:
    """Read tokenizer and config of `model`, as in the settings. ValueError where they do not allow grammars."""
    source = open_model(model)
    config, tokenizer = source.config, source.tokenizer()
    if not config.eos_token_ids:
        raise ValueError("the model has no end-of-sequence id, with which an output with a grammar would end")
    # Ids that no token has are not allowed by any grammar; tokens without a place in the model are left out of masks.
    size = max(config.vocab_size, tokenizer.get_vocab_size())
    eos = list(config.eos_token_ids)
    known = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=eos)
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
    end = _mask_of(eos, config.vocab_size)
    return Vocabulary(known, llguidance.LLExecutor(threads), config.vocab_size, eos, end)


def _words(ids: int) -> int:
    return -(-ids // 32)


def _mask_of(ids: list[int], size: int) -> Words:
    bits = np.zeros(32 * _words(size), np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Grammars:
    def __init__(self, model: str) -> None:
        self._model = model
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        threading.stack_size(STACK_BYTES)
        self._thread = ThreadPoolExecutor(1, "compile")
        self._vocabulary: Future[Vocabulary] | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """Waits until it is read."""
        if self._vocabulary is None:
            self._vocabulary = self._thread.submit(load, self._model)
        return self._vocabulary.result()

    def of(self, text: str) -> Future[llguidance.LLMatcher]:
        """The grammar's matcher at its beginning, to be copied; ValueError, in a sentence, where it cannot be."""
        if self._vocabulary is None:
            self._vocabulary = self._thread.submit(load, self._model)
        if text not in self._compiled:
            self._compiled[text] = self._thread.submit(partial(_compile, self._vocabulary, text))
        self._compiled.move_to_end(text)
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return self._compiled[text]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _compile(vocabulary: Future[Vocabulary], text: str) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(max_items_in_row=ROW_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False)
    try:
        matcher = llguidance.LLMatcher(vocabulary.result().tokenizer, text, log_level=0, limits=limits)
        reason = why(matcher)
    except ValueError as error:
        reason = str(error)
    except BaseException as error:  # a panic of the library derives from BaseException
        reason = str(error) or type(error).__name__
    if reason:
        raise ValueError(f"the grammar cannot be used: {reason}")
    return matcher


def why(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with it, in its first line; empty where nothing is."""
    return (matcher.get_error() or "").partition("\n")[0]
