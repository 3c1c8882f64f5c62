"""A replica's manager as a process: `python -m workers.manager`, started beside its stages."""

from __future__ import annotations

import zmq

from toka import process, sockets
from toka.config import Config
from toka.messages import ModelCard, StageReady
from toka.model import ModelConfig, ModelSource, open_model
from toka.placement import take_cores
from toka.trace import Recorder
from workers.agreement import agreement
from workers.endpoints import admitting
from workers.manager.loop import Loop
from workers.manager.matcher import Matcher
from workers.manager.pacing import Pacing
from workers.manager.scheduler import Scheduler
from workers.manager.stages import StageLost, Stages
from workers.manager.state import Limits
from workers.manager.uplink import Uplink


def context_length(config: Config, model: ModelConfig) -> int:
    """Most tokens of one sequence; ValueError where the setting is more than the model can do."""
    longest = model.max_position_embeddings
    if config.max_context > longest:
        raise ValueError(f"max_context: {config.max_context} tokens, but the model was made for {longest}")
    return config.max_context or longest


def microbatches(config: Config) -> int:
    """Steps that are on their way at once: one for each stage of a pipeline, and one that waits for the first."""
    return config.pp_size + 1 if config.pp_size > 1 else 1


def limits(config: Config, model: ModelConfig, ready: list[StageReady]) -> Limits:
    """What all stages have room for, within the settings."""
    pages = min(stage.pages for stage in ready)
    tokens = min(stage.max_tokens_per_step for stage in ready)
    return Limits(
        pages=pages,
        page_size=config.page_size,
        max_seqs=min(tokens, *(stage.max_seqs for stage in ready)),
        max_tokens_per_step=tokens,
        context_length=min(context_length(config, model), pages * config.page_size),
        vocab_size=model.vocab_size,
        prefill_chunk=config.prefill_chunk,
        microbatches=microbatches(config),
        passes=config.run_ahead,
        prefix_cache=config.prefix_cache,
        shared_prefix=config.shared_prefix,
    )


def serve(config: Config) -> None:
    source = open_model(config.model)
    longest = context_length(config, source.config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with admitting(context, config):
        manage(config, source, longest, context)
    context.term()


def manage(config: Config, source: ModelSource, longest: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """longest: most tokens of one sequence."""
    stages = Stages(context, config, agreement(config, source) if config.rendezvous else None)
    try:
        ready = stages.wait(config.start_timeout)
    except TimeoutError as error:
        process.fail(str(error))
    room = limits(config, source.config, ready)
    trace = Recorder("manager", f"manager {config.replica}", on=bool(config.trace))
    trace.name_track("loop")
    scheduler = Scheduler(room, source.config.eos_token_ids, trace)
    card = ModelCard(
        name=config.served_model_name or source.name,
        vocab_size=room.vocab_size,
        context_length=longest,
        kv_cache_tokens=room.pages * room.page_size,
        page_size=room.page_size,
        eos_token_ids=list(source.config.eos_token_ids),
        max_logprobs=config.max_logprobs,
    )
    endpoint = sockets.worker_endpoint(config.broker)
    matcher = Matcher(context, config)
    uplink = Uplink(context, endpoint, config.replica, card, scheduler.state, config.keys)
    process.settle()
    process.ready(f"{room.pages * room.page_size} KV tokens, {room.max_seqs} sequences")
    try:
        pacing = Pacing(config.run_ahead * microbatches(config), config.pp_size - 1)
        Loop(scheduler, stages, matcher, uplink, pacing, config.shutdown_timeout, trace).run()
    finally:
        trace.leave(config.run_dir)
    stages.close()
    matcher.close()
    uplink.close()


def main() -> None:
    take_cores()
    config = process.command_line("toka-manager", "schedules one replica", "worker")
    process.begin("manager", f"toka: manager {config.replica}", config)
    try:
        serve(config)
    except (ValueError, StageLost) as error:
        process.fail(str(error))


if __name__ == "__main__":
    main()
