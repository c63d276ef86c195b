"""The two shapes of every GPU figure: Llama-3.1-8B and Qwen3-0.6B, with random weights."""

from __future__ import annotations

from kvline_server.model.config import ModelConfig

LLAMA8B = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    max_position=131072,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)
QWEN06B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    max_position=40960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tied_embeddings=True,
    qk_norm=True,
)
SHAPES = {"llama8b": LLAMA8B, "qwen06b": QWEN06B}
