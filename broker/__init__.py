"""The broker: queues shards of requests and gives them to replicas, over ZeroMQ ROUTER sockets.

registry    who is there (frontends, replicas) and what each holds
queue       shards that wait for a replica
prefixes    which prompts' pages a replica has cached
policy      which replica a shard goes to
core        dispatch, loss and liveness over these three; no sockets, and a clock that is given
recovery    after a restart: rebuild the registry from what frontends and replicas hold
frontends   what each message of a frontend leads to
replicas    what each message of a replica leads to
server      the sockets, the clock and the signals around all that
"""
