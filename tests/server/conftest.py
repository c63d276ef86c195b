"""Tiny models made on the spot, by the library whose answers are the reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import Server, serving

VOCABULARY = 307  # no power of two, larger than the bytes
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    # Wide enough for the GEMMs of real models: oneDNN has another for less than 512 columns.
    "wide": ("Llama", {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a random model of a family, made once a session."""
    made: dict[str, Path] = {}

    def make(family: str, sharded: bool = False) -> Path:
        key = f"{family}-{sharded}"
        if key not in made:
            made[key] = _make(tmp_path_factory.mktemp(key), family, sharded)
        return made[key]

    return make


def _make(folder: Path, family: str, sharded: bool) -> Path:
    import transformers

    name, extra = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**(SMALL | extra))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
    model.save_pretrained(folder, max_shard_size="40KB" if sharded else "5GB")
    return folder


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[..., Path]) -> Path:
    """A llama with a byte-level tokenizer and a chat template: enough to serve."""
    folder = make_model("llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server over the tiny model, ready; one a module."""
    with serving(Server(tiny_model, tmp_path_factory.mktemp("server"))) as made:
        yield made


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def begin(**options: Any) -> Server:
        made.append(Server(**{"model": tiny_model, "scratch": tmp_path, **options}).start())
        return made[-1]

    yield begin
    for server in made:
        server.stop()


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
