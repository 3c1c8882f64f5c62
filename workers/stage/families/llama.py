"""Llama 2 and 3.x. Options: attention bias (q, k, v and output), MLP bias, llama3 rope scaling, tied head."""

from __future__ import annotations

from workers.stage.families.names import Names

LLAMA = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
