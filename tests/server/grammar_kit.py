"""Small tokenizers, the processes of grammars over a model's folder, and random answers."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from servers import launch_config
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from waiting import eventually, limit

from kvline_server.grammars.matchers import Matchers
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.options.grammars import SMALL, GrammarBounds
from kvline_server.options.options import Options
from kvline_server.options.timeouts import Timeouts
from kvline_server.parent.children import Child, listen_for_grammars, start_grammars

TEXT = """{"name": "Ada", "age": 36, "tags": ["math", "engine"], "nested": {"value": null}, "ok":
true, "no": false, "n": -12.5e3} the function and the tool were called with an answer in a row.\n"""
START, END, CALL, THINK = "<|start|>", "<|end|>", "<tool_call>", "</think>"
SIZE = 640  # of the model's vocabulary, beyond the tokenizer's


def byte_level() -> Tokenizer:
    """Byte-level BPE with some merges, as of Llama 3 or Qwen, and four added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(CALL), AddedToken(THINK)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """BPE with bytes as a fall-back, as of Llama 2 or Gemma."""
    letters = sorted({*TEXT, "\u2581"} - {" ", "\n"})
    tokens = ["<unk>", START, END, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += ["\u2581t", "he", "\u2581the"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    model = models.BPE(
        {token: id for id, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, size: int = SIZE) -> Path:
    """All of a model that grammars read."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": [end_of(tokenizer)],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vocabulary(folder: Path, tokenizer: Tokenizer, size: int = SIZE) -> Vocabulary:
    write_model(folder, tokenizer, size)
    return Vocabulary(folder / "tokenizer.json", size, [end_of(tokenizer)])


def end_of(tokenizer: Tokenizer) -> int:
    return int(tokenizer.get_vocab()[END])


def allowed(row: np.ndarray, size: int) -> list[int]:
    """Tokens of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
    assert not bits[size:].any(), "only tokens of the model"
    return np.flatnonzero(bits[:size]).tolist()


def choose(rng: random.Random, tokens: list[int], texts: Vocabulary, hurry: bool) -> int:
    """One of them; in a hurry one that may close what is open, if there is any."""
    if hurry:
        ends = [t for t in tokens if texts.tokenizer.is_special_token(t)]
        closing = [t for t in tokens if texts.tokenizer.decode_bytes([t])[:1] in (b'"', b"}", b"]")]
        tokens = ends or closing or tokens
    return rng.choice(tokens)


@dataclass
class Grammars:
    """The processes, as the parent starts them."""

    folder: Path  # of the model
    scratch: Path
    bounds: GrammarBounds = SMALL
    rows: int = 64
    silent: float = 60.0  # seconds until a process without a pulse is replaced
    child: Child = field(init=False)

    def __post_init__(self) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        config = self.scratch / "launch.json"
        config.write_text(launch_config(self.folder).dumps())
        self.path = str(self.scratch / "socket")
        self.listener = listen_for_grammars(Path(self.path))
        self.rows_file = os.memfd_create("rows")
        timeouts = Timeouts(grammars=self.silent)
        self.options = Options(config=config, state_dir=self.scratch, timeouts=timeouts)
        self.start()

    def start(self) -> None:
        self.child = start_grammars(self.options, self.bounds, self.listener, self.rows_file)

    def matchers(self, seconds: float | None = None) -> Matchers:
        made = Matchers(self.path, self.rows_file, self.rows, seconds or limit(10))
        assert made.attach(limit(30))
        return made

    def forked(self) -> list[int]:
        """Processes that the first one has now: the one that fills masks, then those that try."""
        pid = self.child.process.pid
        with suppress(OSError):  # it has ended
            found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            return [int(child) for child in found.split()]
        return []

    def filling(self) -> int:
        """The process that fills masks."""
        return int(eventually(self.forked, on="server")[0])

    def replaced(self, old: int) -> int:
        """Once another one fills masks."""
        return int(eventually(lambda: [p for p in self.forked() if p != old], on="server")[0])

    def stop(self) -> None:
        self.child.kill()
        self.child.channel.connection.close()
        self.listener.close()
        os.close(self.rows_file)


def memory(pid: int) -> int:
    """Bytes of a process that it shares with no other."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Private_")
    )


def wake(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
