"""Which part of a model each stage of a replica holds: a run of its layers, and of these a slice.

Stages are numbered pipeline stage by pipeline stage, the ranks of tensor parallelism within each side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toka.config import Config
from toka.model import ModelConfig
from workers import endpoints


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of one stage."""

    layers: range
    """Numbers of its layers among all of the model's."""
    first: bool
    """Whether it embeds tokens."""
    last: bool
    """Whether it computes logits and samples."""
    rank: int = 0
    """Which slice of every sliced tensor it holds, ..."""
    ranks: int = 1
    """... of how many."""

    @property
    def answers(self) -> bool:
        """Whether the manager gets the results of steps from it."""
        return self.last and self.rank == 0

    def share(self, count: int) -> slice:
        """Which of `count` things are this rank's; where there are fewer than ranks, neighbours have the same one."""
        first = self.rank * count // self.ranks
        return slice(first, first + max(1, count // self.ranks))


@dataclass(frozen=True, slots=True)
class Seat:
    """A stage among those of its replica."""

    stage: int = 0
    stages: int = 1
    ranks: int = 1
    """Stages that share the same layers."""
    near: str = ""
    """The address where those that share layers, on one host, find each other, ..."""
    far: str = ""
    """... and where all do."""


def take_seat(config: Config, stage: int, token: str) -> Seat:
    """Of stage number `stage`; token: of this start of its replica, empty where it is alone."""
    near = f"file://{config.run_dir}/meet-{token}-{stage // config.tp_size}"
    return Seat(stage, config.pp_size * config.tp_size, config.tp_size, near, endpoints.meeting(config, token))


def whole(config: ModelConfig) -> Partition:
    return Partition(range(config.num_layers), first=True, last=True)


def local(config: ModelConfig, part: Partition) -> ModelConfig:
    """The model as its part is computed: layers, heads and MLP rows are those of `part`, all else is whole."""
    heads, kv_heads, inner = (
        part.share(count) for count in (config.num_heads, config.num_kv_heads, config.intermediate_size)
    )
    return replace(
        config,
        num_layers=len(part.layers),
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        intermediate_size=inner.stop - inner.start,
    )


def partition(config: Config, model: ModelConfig, stage: int) -> Partition:
    """The part of stage number `stage`; ValueError, with the numbers, where the sizes do not fit the model."""
    check(config, model)
    place, rank = divmod(stage, config.tp_size)
    counts = _given(config, model) if config.pp_layers else split(model, config.pp_size)
    start = sum(counts[:place])
    layers = range(start, start + counts[place])
    return Partition(layers, first=place == 0, last=place == config.pp_size - 1, rank=rank, ranks=config.tp_size)


def check(config: Config, model: ModelConfig) -> None:
    """ValueError, with the numbers, where pp_size, pp_layers or tp_size do not fit the model."""
    if config.pp_size > model.num_layers:
        raise ValueError(f"pp_size: {config.pp_size} stages, but the model has {model.num_layers} layers")
    if config.pp_layers:
        _given(config, model)
    ranks = config.tp_size
    for what, count in (
        ("attention heads", model.num_heads),
        ("rows in the MLP", model.intermediate_size),
        ("ids in the vocabulary", model.vocab_size),
    ):
        if count % ranks:
            raise ValueError(f"tp_size: {ranks} does not divide the model's {count} {what}")
    if model.num_kv_heads % ranks and ranks % model.num_kv_heads:
        raise ValueError(f"tp_size: {ranks} neither divides the model's {model.num_kv_heads} KV heads nor the reverse")


def split(model: ModelConfig, stages: int) -> list[int]:
    """Layers of each stage, so that the slowest takes as little time as can be.

    A layer costs what its products do, and the last stage has the LM head beside its layers.
    """
    if stages == 1:
        return [model.num_layers]
    heads = model.num_heads + 2 * model.num_kv_heads + model.num_heads
    layer = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)
    head = model.hidden_size * model.vocab_size
    others = stages - 1

    def slowest(last: int) -> int:
        return max(last * layer + head, -(-(model.num_layers - last) // others) * layer)

    last = min(range(1, model.num_layers - others + 1), key=slowest)
    each, more = divmod(model.num_layers - last, others)
    return [*(each + (number < more) for number in range(others)), last]


def _given(config: Config, model: ModelConfig) -> list[int]:
    counts = [int(each) if each.strip().isdecimal() else 0 for each in config.pp_layers.split(",")]
    if len(counts) != config.pp_size or min(counts) < 1 or sum(counts) != model.num_layers:
        raise ValueError(
            f"pp_layers: {config.pp_layers!r} should be pp_size={config.pp_size} numbers, none 0, "
            f"that add up to the model's {model.num_layers} layers"
        )
    return counts
