"""The noise is uniform and independent as far as tests of its size can see, and a function of its key alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.stage import noise

CPU = torch.device("cpu")


def keys(rows: int, seed: int = 1, sample: int = 0, position: int = 0, vary: str = "position") -> torch.Tensor:
    given = {"seed": seed, "sample": sample, "position": position}
    columns = {name: torch.full((rows,), value, dtype=torch.int64) for name, value in given.items()}
    columns[vary] += torch.arange(rows)
    return noise.row_keys(columns["seed"], columns["sample"], columns["position"])


def p_value_of_chi_square(statistic: float, freedom: int) -> float:
    """Upper tail of chi-square, by the regularised incomplete gamma function."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    return p_value_of_chi_square(float(((counts - expected) ** 2 / expected).sum()), counts.size - 1)


@pytest.mark.parametrize("vary", ["seed", "sample", "position"])
def test_bits_are_uniform(vary: str) -> None:
    """Over ids and rows together, over ids of one row, and over rows for one id; high bits and low."""
    bits = noise.noise_bits(keys(512, vary=vary), noise.vocabulary(16384, CPU)).numpy()
    for shift in (24, 14):
        bins = (bits >> shift) & 255
        assert chi_square(np.bincount(bins.ravel(), minlength=256), bits.size / 256) > 1e-4
        rows = [chi_square(np.bincount(row, minlength=256), 64.0) for row in bins]
        columns = [chi_square(np.bincount(column, minlength=256), 2.0) for column in bins.T[:2048]]
        for values in (rows, columns):
            # p-values of many tests are uniform themselves; those of columns are coarse.
            assert 0.4 < np.mean(values) < 0.6
            assert min(values) > 1e-6


@pytest.mark.parametrize("vary", ["seed", "sample", "position"])
@pytest.mark.parametrize("gap", [1, 2, 64])
def test_neighbours_are_independent(vary: str, gap: int) -> None:
    """Pairs of neighbouring ids, and of the same id in neighbouring rows, fill a 64 x 64 table evenly."""
    bits = noise.noise_bits(keys(256, vary=vary), noise.vocabulary(16384, CPU)).numpy() >> 26 & 63
    for first, second in ((bits[:, :-gap], bits[:, gap:]), (bits[:-gap], bits[gap:])):
        pairs = np.bincount((first * 64 + second).ravel(), minlength=4096)
        assert chi_square(pairs, first.size / 4096) > 1e-4


def test_every_bit_of_the_key_changes_half_of_the_upper_bits() -> None:
    words = noise.vocabulary(4096, CPU)
    zero = torch.zeros(64, dtype=torch.int64)
    one_bit = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    base = noise.noise_bits(noise.row_keys(zero, zero, zero), words)
    for columns in ((one_bit, zero, zero), (zero, one_bit, zero), (zero, zero, one_bit)):
        changed = (noise.noise_bits(noise.row_keys(*columns), words) ^ base).numpy()
        upper = np.unpackbits(changed.view(np.uint8).reshape(64, -1, 4)[:, :, 2:], axis=2)
        assert np.abs(upper.mean(axis=(1, 2)) - 0.5).max() < 0.01


def test_correlation_of_gumbel_noise_across_rows_is_that_of_chance() -> None:
    values = noise.gumbel(noise.noise_bits(keys(300), noise.vocabulary(8192, CPU)))
    correlation = torch.corrcoef(values).fill_diagonal_(0) * 8192**0.5
    assert abs(float(values.mean()) - 0.5772) < 0.005
    assert abs(float(values.var()) - np.pi**2 / 6) < 0.01
    assert abs(float(correlation.std()) - 1) < 0.02
    assert float(correlation.abs().max()) < 5.5


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_draws_follow_softmax(spread: float) -> None:
    torch.manual_seed(5)
    size, draws = 4096, 20_000
    x = torch.randn(size) * spread
    drawn = torch.cat(
        [
            noise.draw(x.expand(1000, -1), torch.ones(1000), keys(1000, position=i), noise.vocabulary(size, CPU))[0]
            for i in range(0, draws, 1000)
        ]
    )
    order = x.argsort(descending=True)
    expected = (x.softmax(0)[order].double() * draws).numpy()
    counts = torch.bincount(drawn, minlength=size)[order].numpy()
    # Ids are put together from the least likely on, until ten draws are expected of each set.
    bins = np.minimum(np.cumsum(expected) // 10, expected.sum() // 10 - 1).astype(int)
    observed, wanted = np.bincount(bins, counts), np.bincount(bins, expected)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert chi_square(observed, wanted) > 1e-4


@pytest.mark.parametrize("size", [100, 2048, 20_001, 49152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_pruning_changes_no_draw(size: int, spread: float) -> None:
    torch.manual_seed(6)
    x = torch.randn(40, size) * spread
    x[3] = float("-inf")
    x[3, 77] = 0.0
    heat = torch.rand(40) + 0.5
    ids = noise.vocabulary(size, CPU)
    full, winners = (x / heat[:, None] + noise.gumbel(noise.noise_bits(keys(40), ids[:, :size]))).max(1)
    drawn, won = noise.draw(x, heat, keys(40), ids)
    assert torch.equal(drawn, winners) and torch.equal(won, full)
    assert int(drawn[3]) == 77


def test_noise_depends_on_its_key_alone() -> None:
    torch.manual_seed(7)
    x, heat = torch.randn(30, 9000) * 2, torch.rand(30) + 0.5
    ids = noise.vocabulary(9000, CPU)
    row_keys = keys(30, seed=-(1 << 62), sample=3, position=500)
    together, _ = noise.draw(x, heat, row_keys, ids)
    shuffled = torch.randperm(30)
    assert torch.equal(noise.draw(x[shuffled], heat[shuffled], row_keys[shuffled], ids)[0], together[shuffled])
    alone = [noise.draw(x[i : i + 1], heat[i : i + 1], row_keys[i : i + 1], ids)[0] for i in range(30)]
    assert torch.equal(torch.cat(alone), together)


def test_draws_from_slices_of_the_vocabulary_are_those_from_all_of_it() -> None:
    torch.manual_seed(9)
    size, heat, row_keys = 60_000, torch.ones(20), keys(20)
    x = torch.randn(20, size) * 2
    whole, won = noise.draw(x, heat, row_keys, noise.vocabulary(size, CPU))
    parts = [slice(start, start + 20_000) for start in range(0, size, 20_000)]
    words = [noise.vocabulary(20_000, CPU, part.start) for part in parts]
    drawn = [noise.draw(x[:, part], heat, row_keys, some) for part, some in zip(parts, words)]
    best, which = torch.stack([score for _, score in drawn]).max(0)
    ids = torch.stack([column + part.start for (column, _), part in zip(drawn, parts)])
    assert torch.equal(ids.gather(0, which[None])[0], whole) and torch.equal(best, won)
    assert set(which.tolist()) == {0, 1, 2}


def test_the_first_of_equal_scores_is_drawn() -> None:
    """Whichever of their columns looks most promising."""
    size = 30_000
    words = noise.vocabulary(size, CPU)
    twins = [1000, 1400, 1800]
    words[:, twins] = words[:, twins[:1]]
    x = torch.zeros(8, size)
    x[:, twins] = 40.0
    assert noise.draw(x, torch.ones(8), keys(8), words)[0].tolist() == twins[:1] * 8


def test_bits_are_the_documented_function() -> None:
    """Worked out again in Python's integers: what another device has to give, bit for bit."""

    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    def murmur(x: int) -> int:
        x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
        x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
        return x ^ x >> 16

    def expected(seed: int, sample: int, position: int, token: int) -> int:
        golden = 0x9E3779B97F4A7C15
        x = mix((seed + golden) % 2**64)
        x = mix((x + (sample + 1) * golden) % 2**64)
        x = mix((x + (position + 1) * golden) % 2**64)
        words = [murmur((2 * token + half) * 0x9E3779B9 % 2**32) for half in (1, 2)]
        return (words[0] ^ x % 2**32) * (words[1] & ~1 ^ (x >> 32 | 1)) % 2**32

    for seed, sample, position in ((0, 0, 0), (2**64 - 1, 5, 100), (123456789 << 30, 1023, 131071)):
        signed = torch.tensor([seed - 2**64 if seed >> 63 else seed])
        row = noise.row_keys(signed, torch.tensor([sample]), torch.tensor([position]))
        bits = noise.noise_bits(row, noise.vocabulary(1000, CPU))
        assert (bits[0, :1000].long() % 2**32).tolist() == [
            expected(seed, sample, position, token) for token in range(1000)
        ]


@pytest.mark.parametrize("size", [7, 64, 500, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    x = torch.randint(0, 9, (50, size)).to(dtype)
    assert torch.equal(noise.argmax(x), x.float().argmax(1))
