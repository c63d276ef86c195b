"""Request bodies from the protocol's own fields, at their edges: never a 5xx, never an exception.

The schema that pydantic has of a request says what each field may be; a body is a plain request
with a few fields put at, just inside and just outside of that, or to something else altogether.
"""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Server
from waiting import limit

from kvline_server.http.errors import BadRequest
from kvline_server.http.neutral import CHAT, COMPLETION, Neutral
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.protocol.strict import parse

Json = Any
PLAIN: dict[str, dict[str, Json]] = {
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    },
}
KINDS: dict[str, tuple[type[GenerationRequest], Neutral]] = {
    "/v1/completions": (CompletionRequest, COMPLETION),
    "/v1/chat/completions": (ChatRequest, CHAT),
}
OTHER: list[Json] = [None, True, 0, -1, 1.5, 10**30, -1e308, "x", "", [], {}, [[]], [None], {"": 0}]
TEXTS = ["", " ", "\n", "a", "\x00", "\uffff", "é😀", "<|end|>", "e\u0301" * 8, "\u2028"]
PROMPTS: list[Json] = [
    [0],
    [306],
    [307],
    [-1],
    [[0], [1]],
    ["a", [1]],
    [[]],
    [5] * 256,
    ["a"] * 129,
]


TEXT_OR_NUMBER: st.SearchStrategy[Json] = st.sampled_from([*TEXTS, 0, 0.5, True, None])


def edges(schema: dict[str, Json], known: dict[str, Json], ok: bool) -> st.SearchStrategy[Json]:
    """Values at the edges of a JSON schema: inside where `ok`, else often just outside."""
    if "$ref" in schema:
        return edges(known[schema["$ref"].rpartition("/")[2]], known, ok)
    if "anyOf" in schema:
        return st.one_of([edges(arm, known, ok) for arm in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _numbers(schema, ok)
    if kind == "string":
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", 256)
        texts = ["x" * longest, *TEXTS] if ok else ["x" * (longest + 1), ""]
        return st.sampled_from([t for t in texts if not ok or shortest <= len(t) <= longest])
    if kind == "array":
        least, most = schema.get("minItems", 0), min(schema.get("maxItems", 4), 4)
        items = edges(schema.get("items", {}), known, ok)
        return st.lists(items, min_size=least, max_size=most if ok else most + 1)
    if kind == "object":
        return _objects(schema, known, ok)
    return st.none() if kind == "null" else st.booleans()


def _numbers(schema: dict[str, Json], ok: bool) -> st.SearchStrategy[Json]:
    whole = schema["type"] == "integer"
    low: float = schema["minimum" if "minimum" in schema else "exclusiveMinimum"]
    high: float = schema["maximum"]
    if whole:
        return st.sampled_from([low, low + 1, high - 1, high] if ok else [low - 1, high + 1])
    if not ok:
        return st.sampled_from([math.nextafter(low, -9), math.nextafter(high, 1e9), 5e-324, 1e-38])
    above = math.nextafter(low, high)
    edge = [above, math.nextafter(high, low), high, *([low] if "minimum" in schema else [])]
    return st.sampled_from([*edge, 1e-9] if above < 1e-9 else edge) | st.floats(above, high)


def _objects(schema: dict[str, Json], known: dict[str, Json], ok: bool) -> st.SearchStrategy[Json]:
    if "properties" not in schema:
        keys = ["0", "256", "257", "306"] if ok else ["307", "-1", "x", "", "9" * 10]
        of = schema["additionalProperties"]
        values = TEXT_OR_NUMBER if of is True else edges(of, known, ok)  # True: any JSON
        return st.dictionaries(st.sampled_from(keys), values, max_size=4)
    fields = {name: edges(item, known, ok) for name, item in schema["properties"].items()}
    wanted = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(wanted, optional=fields)


def bodies(path: str) -> st.SearchStrategy[dict[str, Json]]:
    """A plain request with some fields at inner edges, and every other time one beside them."""
    kind, neutral = KINDS[path]
    schema = kind.model_json_schema()
    known = schema.get("$defs", {})
    inner, outer = (
        {name: edges(item, known, ok) for name, item in schema["properties"].items()}
        for ok in (True, False)
    )
    if "prompt" in inner:
        inner["prompt"] = st.sampled_from([t for t in TEXTS if t]) | st.text(min_size=1, max_size=9)
        outer["prompt"] = st.sampled_from(PROMPTS)
    del inner["model"]
    inner |= {"max_tokens": st.integers(1, 6), "min_tokens": st.just(0)}
    scored = {"logprobs": 2 if "prompt" in inner else True}
    inner |= {name: st.sampled_from(values) for name, values in neutral.items()}
    outer |= dict.fromkeys([*neutral, "unknown"], st.nothing())

    def field(name: str, of: dict[str, st.SearchStrategy[Json]]) -> st.SearchStrategy[Json]:
        return st.tuples(st.just(name), of[name] if of is inner else of[name] | odd)

    odd = st.sampled_from(OTHER)
    asked = st.sampled_from(sorted(inner)).flatmap(lambda name: field(name, inner))
    beside = st.sampled_from(sorted(outer)).flatmap(lambda name: field(name, outer))
    return st.builds(
        lambda first, some, one: {**PLAIN[path], **first, **dict(some), **dict(one)},
        st.sampled_from([{}, scored]),
        st.lists(asked, max_size=6, unique_by=lambda pair: pair[0]),
        st.just([]) | st.lists(beside, min_size=1, max_size=1),
    )


BODIES = {path: bodies(path) for path in PLAIN}


@pytest.mark.parametrize("path", PLAIN)
@given(data=st.data())
@settings(max_examples=150)
def test_a_body_is_accepted_or_rejected_by_field(path: str, data: st.DataObject) -> None:
    try:
        parse(KINDS[path][0], data.draw(BODIES[path]))
    except BadRequest as refused:
        assert refused.param and len(refused.message) < 500


def finite(text: str) -> Json:
    raise AssertionError(f"{text} in an answer")


def check_whole(answer: dict[str, Json], body: dict[str, Json]) -> None:
    """What is counted is listed, and what is cached was asked."""
    used, choices = answer["usage"], answer["choices"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert 0 <= used["prompt_tokens_details"]["cached_tokens"] < used["prompt_tokens"]
    assert [c["index"] for c in choices] == list(range(len(choices)))
    assert all(c["finish_reason"] in ("stop", "length") for c in choices)
    scored = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    entries = sum(len(s["content"] if "content" in s else s["tokens"]) for s in scored)
    echoed = 0
    if body.get("echo"):
        echoed = used["prompt_tokens"] * (body.get("n") or 1)
    if scored:
        assert entries == used["completion_tokens"] + echoed
    for listed in scored:
        assert len({len(v) for v in listed.values() if v is not None}) == 1


def check_stream(lines: list[str], body: dict[str, Json]) -> None:
    """Its events, put together, keep the rule of entries too."""
    assert lines[-1] == "data: [DONE]"
    entries, used = 0, None
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "), parse_constant=finite)
        assert "error" not in event
        used = event.get("usage") or used
        for listed in (c.get("logprobs") for c in event["choices"]):
            if listed is not None:
                entries += len(listed["content"] if "content" in listed else listed["tokens"])
    if used is not None and body.get("logprobs") not in (None, False):
        echoed = used["prompt_tokens"] * (body.get("n") or 1) if body.get("echo") else 0
        assert entries == used["completion_tokens"] + echoed


@pytest.mark.process
@pytest.mark.parametrize("path", PLAIN)
@given(data=st.data())
@settings(max_examples=50)
def test_no_body_causes_a_5xx(server: Server, path: str, data: st.DataObject) -> None:
    """H16, H17, H20, H26, H27, H28, H32: every body gets a complete answer or a 4xx."""
    body = data.draw(BODIES[path])
    raw = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}{path}", content=raw, headers=headers, timeout=limit(60))
    if answer.status_code == 200 and body.get("stream"):
        check_stream([line for line in answer.text.split("\n") if line], body)
    elif answer.status_code == 200:
        check_whole(json.loads(answer.text, parse_constant=finite), body)
    else:
        assert answer.status_code in (400, 404), (answer.status_code, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) <= 1024
    assert httpx.get(f"{server.url}/health", timeout=limit(5)).status_code == 200
