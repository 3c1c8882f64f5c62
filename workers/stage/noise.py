"""Sampling noise: a pure function of (seed, sample, position, vocabulary id), and the argmax it decides.

Drawing from softmax(x) is argmax(x + g) with independent Gumbel noise g (Gumbel-max). The 32 bits behind g
come from integer arithmetic that wraps around, the same on every device, with few operations an id:

- a row's key is its seed, sample and position through the finaliser of SplitMix64 (Steele, Lea and Flood,
  OOPSLA 2014, with Stafford's constants), two halves of 32 bits, the second made odd;
- a vocabulary id has two words, computed once by the finaliser of MurmurHash3 (Appleby), the second even;
- the noise of both is (word 1 ^ key 1) * (word 2 ^ key 2): the multiply of two keyed words of NH (Black et
  al., UMAC, CRYPTO 1999), here in one word, whose second factor is odd so that the product is uniform.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

DEPTH = 32
"""Vocabulary ids that are bounded together: a column, ids that lie `vocabulary / DEPTH` apart."""
CANDIDATES = (32, 256)
"""Columns of a row that are looked at before the rest is shown to be beaten: at first, and if that fails."""
ROWS = 4
"""Rows hashed at once: what that needs stays in a core's cache."""
ARGMAX_BLOCK = 512
_MARGIN = 1e-4


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_MURMUR_1, _MURMUR_2 = _signed(0x85EBCA6B, 32), _signed(0xC2B2AE35, 32)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    width = x.dtype.itemsize * 8
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def row_keys(seeds: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """seeds, samples, positions: [rows], int64. Returns [rows, 2], int32."""
    x = _mix(seeds + _GOLDEN_64)
    x = _mix(x + (samples + 1) * _GOLDEN_64)
    x = _mix(x + (positions + 1) * _GOLDEN_64)
    return (x | 1 << 32).view(torch.int32).view(-1, 2)


def vocabulary(size: int, device: torch.device, first: int = 0) -> Tensor:
    """The two words of each vocabulary id from `first` on: [2, size rounded up to DEPTH], int32."""
    end = first + -(-size // DEPTH) * DEPTH
    x = torch.arange(2 * first + 1, 2 * end + 1, dtype=torch.int32, device=device) * _GOLDEN_32
    x = (x ^ _shifted(x, 16)) * _MURMUR_1
    x = (x ^ _shifted(x, 13)) * _MURMUR_2
    words = (x ^ _shifted(x, 16)).view(-1, 2).T.contiguous()
    words[1] &= -2
    return words


def noise_bits(keys: Tensor, words: Tensor) -> Tensor:
    """keys: [rows, 2]; words: [2, ids], from `vocabulary`. Returns [rows, ids], int32."""
    x = words[0] ^ keys[:, :1]
    x *= words[1] ^ keys[:, 1:]
    return x


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of `noise_bits`, float32: the lower the bits, the greater, and the more exact."""
    uniform = (bits.long() + (1 << 31)).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def argmax(x: Tensor) -> Tensor:
    """x: [rows, ids]. The first id with the greatest value, by blocks: several times torch's speed on a CPU."""
    blocks = _filled(x, ARGMAX_BLOCK).view(len(x), -1, ARGMAX_BLOCK)
    block = blocks.amax(2).float().argmax(1)
    inside = blocks[torch.arange(len(x), device=x.device), block].float().argmax(1)
    return block * ARGMAX_BLOCK + inside


def draw(x: Tensor, temperatures: Tensor, keys: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Ids drawn from softmax(x / temperatures): [rows]; what each won with, x / temperatures + noise: [rows] float32.

    x: [rows, vocabulary], -inf where an id is excluded; temperatures: [rows], above 0; keys: [rows, 2].
    """
    temperatures = temperatures[:, None]
    # [rows, DEPTH, columns]
    scores = _filled(x, DEPTH).view(len(x), DEPTH, -1)
    columns = scores.shape[2]
    if x.device.type != "cpu" or columns <= max(CANDIDATES):
        return _draw_all(scores, temperatures, keys, words)
    lowest = [noise_bits(keys[i : i + ROWS], words).view(-1, DEPTH, columns).amin(1) for i in range(0, len(keys), ROWS)]
    bounds = (scores.amax(1).float() / temperatures).add_(gumbel(torch.cat(lowest)))
    drawn, won = x.new_empty(len(x), dtype=torch.int64), x.new_empty(len(x), dtype=torch.float32)
    pending = torch.arange(len(x))
    for count in CANDIDATES:
        some = scores if len(pending) == len(x) else scores[pending]
        winners, best, sure = _draw_within(some, bounds[pending], count, temperatures[pending], keys[pending], words)
        drawn[pending], won[pending] = winners, best
        pending = pending[~sure]
        if not len(pending):
            return drawn, won
    drawn[pending], won[pending] = _draw_all(scores[pending], temperatures[pending], keys[pending], words)
    return drawn, won


def draw_among(x: Tensor, columns: Tensor, temperatures: Tensor, keys: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw`, among few ids. x: [rows, few], of these columns, -1 where there is none."""
    ids = columns.clamp(min=0)
    bits = (words[0][ids] ^ keys[:, :1]) * (words[1][ids] ^ keys[:, 1:])
    noised = (x.float() / temperatures[:, None] + gumbel(bits)).masked_fill_(columns < 0, float("-inf"))
    won, place = noised.max(1)
    return ids.gather(1, place[:, None])[:, 0], won


def _draw_all(scores: Tensor, temperatures: Tensor, keys: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    noised = scores.flatten(1).float() / temperatures + gumbel(noise_bits(keys, words))
    winners = argmax(noised)
    return winners, noised.gather(1, winners[:, None])[:, 0]


def _draw_within(
    scores: Tensor, bounds: Tensor, count: int, temperatures: Tensor, keys: Tensor, words: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's winner among its `count` most promising columns, its score, and whether it is the winner of all.

    bounds: [rows, columns]; a column holds nothing above its best score plus its greatest noise.
    """
    top, columns = bounds.topk(count + 1)
    # In order, so that of equals the first id wins.
    columns = columns[:, :count].sort(1).values
    ids = (torch.arange(DEPTH)[:, None] * bounds.shape[1] + columns[:, None]).flatten(1)
    bits = (words[0][ids] ^ keys[:, :1]) * (words[1][ids] ^ keys[:, 1:])
    noised = scores.flatten(1).gather(1, ids).float() / temperatures + gumbel(bits)
    best, place = noised.max(1)
    return ids.gather(1, place[:, None])[:, 0], best, best >= top[:, count] + _MARGIN


def _filled(x: Tensor, multiple: int) -> Tensor:
    over = -x.shape[1] % multiple
    return pad(x, (0, over), value=float("-inf")) if over else x
