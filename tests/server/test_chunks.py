"""A stream's chunks, whose constant parts are encoded once, are those of a plain encoder."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvline_server.http import stream
from kvline_server.http.chat import Chat
from kvline_server.http.completions import Completion
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.image_store import Held
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.tokenizer_files import open_chat
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.ipc.messages import Delta, PackedScores
from kvline_server.ipc.sampling_params import SamplingParams

TEXT = 'a"\\\n\t\0 é\x85\u2028\u2029 \U0001f600</x>'
OUTPUT = TEXT * 2
LIMITS = RequestLimits("a/model\0\u2028é", 258, 512, 5, 1000)
LINE_BREAKS = {c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
USAGES: list[dict[str, bool] | None] = [None]
USAGES += [
    {"include_usage": include, "continuous_usage_stats": each}
    for include, each in itertools.product((False, True), repeat=2)
]


def scores(token: int, top: int) -> PackedScores:
    ids = array("i", [(token + i) % 256 for i in range(top)]).tobytes()
    values = array("f", [-0.1 - i for i in range(top)]).tobytes()
    one = array("i", [token]).tobytes()
    return PackedScores(1, top, one, array("f", [-0.1]).tobytes(), bytes(4), ids, values)


def merged(parts: list[PackedScores]) -> PackedScores:
    names = ("tokens", "values", "ranks", "top_ids", "top_values")
    columns = (b"".join(getattr(part, name) for part in parts) for name in names)
    return PackedScores(len(parts), parts[0].top, *columns)


class Scripted(EngineClient):
    """OUTPUT for each sequence, in deltas of one token and of several, which come alone and not."""

    def __init__(self, tokens: Tokens, finish: str) -> None:
        super().__init__(1000)
        self.ids = tokens.tokenizer.encode(OUTPUT).ids
        self.finish = finish

    async def generate(
        self, tokens: list[int], params: SamplingParams, images: Held | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        ids, sizes = iter(self.ids), itertools.cycle((1, 3, 1, 2))
        groups = iter(lambda: list(itertools.islice(ids, next(sizes))), [])
        deltas = [Delta(1, group, cached=16) for group in groups]
        deltas[-1].finish = self.finish
        for delta in deltas if params.logprobs is not None else []:
            delta.scores = merged([scores(id, params.logprobs or 0) for id in delta.tokens])
        deltas[0].prompt_scores = [scores(t, params.prompt_logprobs or 0) for t in tokens[1:]]
        step = 1
        while deltas:
            batch, deltas, step = deltas[:step], deltas[step:], step % 3 + 1
            yield batch
            await asyncio.sleep(0)


def played(kind: type[Any], generator: Generator, body: dict[str, Any]) -> tuple[Any, list[bytes]]:
    request = parse(ChatRequest if kind is Chat else CompletionRequest, body)
    work = kind("req-1", request, generator, LIMITS, 0.0)

    async def story() -> list[bytes]:
        return [event async for event in stream.events(work, work.plan(), ExitStack())]

    return work, asyncio.run(story())


def plain(work: Any, choices: list[Any], usage: Any) -> bytes:
    """A chunk as one document, in OpenAI's order."""
    document = {"id": work.id, "object": work.chunk_kind, "created": work.created}
    document |= {"model": LIMITS.served_name, "system_fingerprint": None, "choices": choices}
    document |= {} if usage == "absent" else {"usage": usage}
    text = msgspec.json.encode(document).decode()
    for raw, escaped in LINE_BREAKS.items():
        text = text.replace(raw, escaped)
    return b"data: " + text.encode() + b"\n\n"


@pytest.mark.parametrize("kind", [Completion, Chat])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("options", USAGES)
def test_chunks_are_those_of_a_plain_encoder(
    kind: type[Any], finish: str, options: dict[str, bool] | None, tiny_model: Path
) -> None:
    tokens = Tokens(tiny_model)
    engine = Scripted(tokens, finish)
    generator = Generator(engine, tokens, Traces(None), open_chat(tiny_model, tokens))
    for top, n, echo in itertools.product((None, 0, 2), (1, 3), (False, True)):
        body: dict[str, Any] = {"model": "m", "n": n, "stream": True, "stream_options": options}
        if kind is Chat:
            logprobs = {} if top is None else {"logprobs": True, "top_logprobs": top}
            body |= {"messages": [{"role": "user", "content": "hi"}], **logprobs}
        else:
            body |= {"prompt": "hello", "max_tokens": 400, "logprobs": top, "echo": echo}
        if kind is Chat and echo:
            continue
        work, events = played(kind, generator, body)
        assert events.pop() == b"data: [DONE]\n\n"
        if options is not None and options["include_usage"]:
            last = json.loads(events[-1].removeprefix(b"data: "))
            assert events.pop() == plain(work, [], last["usage"])
            assert last["usage"]["completion_tokens"] == n * len(engine.ids)
        texts, ends, entries = [""] * n, [""] * n, [0] * n
        for event in events:
            document = json.loads(event.removeprefix(b"data: "))
            usage = document.get("usage", "absent")
            assert event == plain(work, document["choices"], usage)
            if options is None or not any(options.values()):
                assert usage == "absent"
            elif not options["continuous_usage_stats"]:
                assert usage is None
            else:
                assert 0 <= usage["completion_tokens"] <= n * len(engine.ids)
            (choice,) = document["choices"]
            index, words = choice["index"], choice.get("delta", choice)
            texts[index] += words.get("text", words.get("content", ""))
            ends[index] += choice["finish_reason"] or ""
            found = choice["logprobs"] or {}
            entries[index] += len(found.get("tokens", found.get("content", ())))
        # The end token is no part of the text.
        shown = OUTPUT if finish == "length" else OUTPUT[:-1]
        assert texts == [("hello" if echo else "") + shown] * n
        assert ends == [finish] * n
        listed = len(engine.ids) + (5 if echo else 0)
        assert entries == [0 if top is None else listed] * n
