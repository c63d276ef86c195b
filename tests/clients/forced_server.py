"""A real server over a tiny model with random weights: a byte-level BPE, a chat template that takes
tools and reasons, a context of 65,536 tokens, an API key, and outputs that tests have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import families
from outputs import OUTPUTS
from servers import Server
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_templates import QWEN

from kvline_contract.launch import CapacityOptions, EngineOptions, LoadFormat

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 65_536
VOCABULARY = 600
SPECIAL = ("<|start|>", "<|end|>")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
KEY = "the-servers-own-key"
TURN = "<|start|>assistant"
HELD = 128  # sequences that the server takes at once, with four running


@dataclass(frozen=True, slots=True)
class Served:
    server: Server
    ids: dict[str, list[list[int]]]  # of each forced output's turns, with the end token

    @property
    def url(self) -> str:
        return self.server.url


def tokenizer() -> Tokenizer:
    """Trained on the licence, whose words never change."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    room = VOCABULARY - len(SPECIAL) - len(MARKS)
    trainer = trainers.BpeTrainer(vocab_size=room, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((ROOT / "LICENSE").read_text().splitlines(), trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return made


def write_model(folder: Path) -> Tokenizer:
    """config.json and the tokenizer's files; the weights are drawn at load."""
    made = tokenizer()
    (end,) = made.encode("<|end|>", add_special_tokens=False).ids
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    config = families.SMALL | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "vocab_size": made.get_vocab_size(),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": QWEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def write_outputs(
    file: Path, model: Path, made: Tokenizer, outputs: Mapping[str, tuple[str, ...]]
) -> dict[str, list[list[int]]]:
    """For faults/forced.py. -> the token ids of each turn, by name"""
    ids = {
        name: [made.encode(text + ends, add_special_tokens=False).ids for text in turns]
        for name, turns in outputs.items()
        for ends in ["" if name == "thought" else "<|end|>"]
    }
    read = {"tokenizer": str(model / "tokenizer.json"), "turn": TURN, "outputs": ids}
    file.write_text(json.dumps(read))
    return ids


def make(folder: Path, outputs: Mapping[str, tuple[str, ...]] = OUTPUTS) -> Served:
    """Not started yet."""
    model, forced, key = folder / "model", folder / "forced.json", folder / "key"
    ids = write_outputs(forced, model, write_model(model), outputs)
    key.write_text(KEY)
    server = Server(
        model,
        folder / "server",
        EngineOptions(
            max_model_len=CONTEXT,
            max_prefill_tokens=512,  # whose steps behind the longest context take seconds
            max_running_requests=4,
            default_max_tokens=256,
        ),
        CapacityOptions(kv_tokens=2 * CONTEXT, headroom_mib=8),
        load=LoadFormat.RANDOM,
        faults={"KVLINE_FORCED": str(forced)},
        key=key,
        http_processes=1,
    )
    return Served(server, ids)
