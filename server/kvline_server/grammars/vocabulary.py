"""A model's tokens as grammars see them: the tokenizer's, up to the model's vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

BITS = 32  # tokens of a word of a mask
# What llguidance says where the tokenizer has more tokens than the model, or fewer.
TOO_SMALL = re.compile(r"vocab size too small; \d+ vs (\d+)")
OUT_OF_RANGE = re.compile(r"EOS token ID \d+ is out of range \(vocab_size=(\d+)\)")


class TokenizerUnsupported(Exception):
    """Grammars need to know each token's bytes."""


class Vocabulary:
    def __init__(self, file: Path, size: int, ends: Iterable[int]) -> None:
        """Of a tokenizer.json; `size` is the model's, `ends` are the tokens that end an answer.
        Raises TokenizerUnsupported."""
        self.size = size
        self.tokenizer, has_ends = _opened(file, size, [end for end in ends if end < size])
        tokens = self.tokenizer.vocab_size
        self.words = -(-tokens // BITS)
        self.marks = np.array([*self._marks(min(size, tokens))], np.int64)
        bits = np.zeros(self.words * BITS, np.uint8)
        bits[:size] = 1
        self.everything: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
        # Without any of its own the tokenizer takes another token for one.
        wrong = [] if has_ends else self.tokenizer.eos_tokens
        bits[wrong] = 0
        self._own: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
        self.is_restricted = bool(wrong) or tokens > size  # masks have more than the model's

    def _marks(self, size: int) -> Iterator[int]:
        """Tokens that have a name and are no text."""
        for id in filter(self.tokenizer.is_special_token, range(size)):
            if self.tokenizer.decode_bytes([id]) not in (b"", f"<[{id}]>".encode()):
                yield id

    def restrict(self, row: NDArray[np.int32]) -> bool:
        """Takes out of a mask what is no token of the model's answers. -> whether any is left"""
        if not self.is_restricted:
            return True
        row &= self._own
        return bool(row.any())


def _opened(file: Path, size: int, ends: list[int]) -> tuple[LLTokenizer, bool]:
    """-> the tokenizer, and whether it knows any of the ends. Opening it takes seconds, and only
    its errors tell its size."""
    while True:
        try:
            return LLTokenizer(str(file), n_vocab=size, eos_token=ends or None), bool(ends)
        except BaseException as error:  # a panic is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            too_small, out = TOO_SMALL.search(str(error)), OUT_OF_RANGE.search(str(error))
            if too_small and int(too_small[1]) > size:
                size = int(too_small[1])
            elif out and any(end >= int(out[1]) for end in ends):
                ends = [end for end in ends if end < int(out[1])]
            else:
                raise TokenizerUnsupported(f"{file.name}: {str(error)[:300]}") from None
