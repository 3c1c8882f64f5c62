"""Toka: a throughput-first LLM inference server. This package holds what its processes share.

config      every setting, declared once
messages    every message that crosses a socket, and its encoding
sockets     ZeroMQ sockets with the same options everywhere
process     what every part does as a process: command line, name, logs, what it tells its supervisor
supervisor  starts parts, restarts the ones that die, ends them in order (`child`: one of them)
launcher    `toka`, the whole server on one machine
model       finds a model and reads its config, tokenizer and tensors, without torch
text        tokens to text and back
"""
