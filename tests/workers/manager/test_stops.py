from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.manager.stops import StopSets

VOCAB = 20


@given(st.lists(st.tuples(st.booleans(), st.frozensets(st.integers(0, VOCAB - 1), max_size=5)), max_size=12))
def test_lookups_equal_python_sets(actions):
    stops = StopSets(VOCAB)
    using: list[tuple[int, frozenset[int]]] = []
    for leaves, ids in actions:
        if leaves and using:
            stops.release(using.pop()[0])
        else:
            using.append((stops.intern(ids), ids))
    for number, ids in using:
        tokens = np.arange(VOCAB, dtype=np.int32)
        assert stops.contain(np.full(VOCAB, number, np.int32), tokens).tolist() == [t in ids for t in range(VOCAB)]
    for number, _ in using:
        stops.release(number)
    assert not len(stops._keys)
