"""Memory of the HTTP process for large answers and prompts is bounded for every request."""

from __future__ import annotations

import base64
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from servers import Server

from kvline_server.http.admission import Admission
from kvline_server.http.chat_tokens import Asked, ChatTokens
from kvline_server.http.completions import legacy_logprobs, prompt_logprobs
from kvline_server.http.errors import BadRequest, TooMany
from kvline_server.http.later import Later, encode
from kvline_server.http.packed import ROWS, base64_arrays
from kvline_server.http.scores import chosen, cut, held, unpack
from kvline_server.http.template_files import read_chat_files
from kvline_server.http.tokens import PART, Tokens
from kvline_server.ipc.messages import PackedScores
from kvline_server.ipc.totals import KINDS

MIB = 1 << 20


def scores(count: int, top: int) -> PackedScores:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((count, top + 5)), axis=1)[:, :top].astype(np.int32)
    values = np.sort(-rng.random((count, top), np.float32), axis=1)[:, ::-1]
    return PackedScores(
        count,
        top,
        ids[:, 0].tobytes(),
        values[:, 0].tobytes(),
        np.ones(count, np.int32).tobytes(),
        ids.tobytes(),
        np.ascontiguousarray(values).tobytes(),
    )


def test_lists_encoded_in_chunks_equal_lists_encoded_at_once() -> None:
    for count in (0, 1, 31, 32, 33, 100):
        entries = [{"a": i, "b": ["\0", None, "ü"]} for i in range(count)]
        value = {"x": [1, Later(entries.copy)], "y": "\0", "z": Later(list)}
        text = b"".join(encode(value))
        assert json.loads(text) == {"x": [1, entries], "y": "\0", "z": []}
    assert len(list(encode({"a": [1, 2]}))) == 1
    with pytest.raises(TypeError):
        list(encode({"a": object()}))


def test_scores_are_cut_and_read_in_order() -> None:
    packed = scores(100, 3)
    whole = list(unpack([packed]))
    assert [(s.token, s.logprob) for s in whole] == list(chosen([packed]))
    assert list(unpack([cut(packed, 0, 40), cut(packed, 40, 200)])) == whole
    assert list(unpack([cut(packed, 100, 200)])) == []


def test_top_logprobs_of_a_long_prompt_are_never_all_python_objects() -> None:
    """8,192 tokens with 20 alternatives were 90 MiB; two such answers killed a 2 GiB container."""
    count, top = 8191, 20
    answer: Any = SimpleNamespace(prompt_scores=[scores(count, top)])
    request: Any = SimpleNamespace(prompt_logprobs=top, prompt_logprobs_format="json")
    texts: Any = SimpleNamespace(token_text=str)
    tracemalloc.start()
    made = prompt_logprobs(texts, request, answer)
    size, entries = 0, 0
    for piece in encode({"prompt_logprobs": made}):
        size, entries = size + len(piece), entries + piece.count(b'"rank"')
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert entries == count * top and size > 8 * MIB
    assert peak < 2 * MIB
    assert held(count, top) < 2 * MIB


def test_the_logprobs_of_an_echoed_prompt_are_encoded_while_they_are_sent() -> None:
    """Also without alternatives: each of n choices had whole lists of its own."""
    parts = [scores(6000, 1)] * 10
    offsets, texts = list(range(60_001)), SimpleNamespace(token_text=str)
    tracemalloc.start()
    made = legacy_logprobs(texts, parts, 0, 7, offsets)  # type: ignore[arg-type]
    entries = json.loads(b"".join(encode(made)))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for _ in encode({name: made[name] for name in ("tokens", "token_logprobs")}):
        pass
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert {len(entries[n]) for n in ("tokens", "token_logprobs", "text_offset")} == {60_001}
    assert peak < 2 * MIB


def test_base64_arrays_are_encoded_in_bounded_chunks() -> None:
    """The same bytes as at once, also where echo asked the engine for more columns."""
    for count, have, want in ((8191, 20, 20), (8191, 20, 7), (385, 3, 0), (1, 1, 1), (9, 2, 0)):
        packed = scores(count, have)
        parts = [cut(packed, 0, 1000), cut(packed, 1000, count)] if count > 1000 else [packed]
        pieces = list(encode(base64_arrays(parts, want)))
        value = json.loads(b"".join(pieces))
        ids = np.frombuffer(packed.top_ids, np.int32).reshape(count, have)[:, :want]
        assert value["top_ids"] == base64.b64encode(ids.tobytes()).decode()
        assert value["ranks"] == base64.b64encode(packed.ranks).decode()
        assert max(map(len, pieces)) <= ROWS * 4 * max(want, 1) * 4 / 3 + 64
    tracemalloc.start()
    for _ in encode(base64_arrays([packed := scores(8191, 20)], 20)):
        pass
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for _ in encode(base64_arrays([packed], 20)):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < MIB / 4


def test_admission_counts_unsent_logprobs_and_prompt_tokens() -> None:
    admission = Admission(max_held=10 * MIB)
    admission.open(16, 17_408)
    assert admission.max_tokens == 5 * 17_408  # not 16 requests' longest prompts, five times
    one = held(8192, 20)
    with pytest.raises(BadRequest, match="fewer tokens"), admission.room(8, 8192, 8 * one):
        pass
    with admission.room(1, 8192, 5 * one):
        with pytest.raises(TooMany), admission.room(1, 8192, 5 * one):
            pass
        with admission.room(1, 8192):  # a request without scores does not wait for them
            pass
    assert not any(admission.totals[kind] for kind in KINDS)


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenised(tiny_model: Path) -> None:
    """2 MB of emoji are 1.5 M tokens and took 260 MiB, to be refused."""
    tokens = Tokens(tiny_model)
    chat = ChatTokens(tokens, read_chat_files(tiny_model))
    seen: list[int] = []
    real = tokens.tokenizer

    class Counted:
        def encode(self, text: str, add_special_tokens: bool = True) -> Any:
            seen.append(len(text))
            return real.encode(text, add_special_tokens=add_special_tokens)

    tokens.tokenizer = Counted()  # type: ignore[assignment]
    with pytest.raises(BadRequest, match="more than 8192 tokens, which is the context"):
        tokens.encode("\U0001f600" * 500_000, 8192)
    assert seen == [PART]  # four tokens a character
    with pytest.raises(BadRequest, match="messages: more than 100 tokens"):
        chat.tokenise(
            chat.render([{"role": "user", "content": "\U0001f600" * 500_000}], Asked()), 100
        )
    seen.clear()
    assert len(tokens.encode("a" * 20_000, 20_000)) == 20_000  # what fits is never refused
    assert seen == [20_000]  # so few bytes are tokenised once
    seen.clear()
    tokens.encode("\u00e9" * 20_000, 19_999)
    assert seen == [PART, PART, 20_000 - 2 * PART, 20_000]


@pytest.mark.process
def test_a_scored_prompt_comes_whole_and_its_room_is_given_back(server: Server) -> None:
    """In pieces, with as many entries as the prompt has tokens, echoed or not."""
    prompt = [(7 * i) % 300 for i in range(200)]
    for _ in range(20):
        body = server.complete(prompt=prompt, max_tokens=1, prompt_logprobs=20, seed=1)
    assert len(body["choices"][0]["prompt_logprobs"]) == 200
    body = server.complete(prompt=prompt, max_tokens=3, echo=True, logprobs=5, temperature=0)
    logprobs = body["choices"][0]["logprobs"]
    assert {len(logprobs[name]) for name in logprobs} == {203}
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) >= 5
    finished = [r for r in server.probe("/metrics")[1].splitlines() if 'end="finished"' in r]
    assert finished
