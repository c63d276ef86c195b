"""Answers of the golden examples: their tokens, their events as a message, and a stream's deltas
joined to one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tool_examples import Example
from tool_families import ALL, EOS, TOOLS, ids, tokens

from kvline_server.formats.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from kvline_server.formats.parser import Reads
from kvline_server.http.answering import Answering
from kvline_server.http.message import delta
from kvline_server.http.pieces import Answer, Piece, Writing
from kvline_server.http.reading import Reading
from kvline_server.ipc.messages import Delta
from kvline_server.ipc.sampling_params import SamplingParams

Fields = dict[str, Any]


def model(name: str) -> Answering:
    return Answering(ALL[name].format, ALL[name].thinking, ids(name))


def reading(example: Example, **fields: Any) -> Reading:
    family = ALL[example.family]
    tools = TOOLS if example.tools else ()
    reads = Reads(family.format, tools, family.thinking, example.in_reasoning)
    return Reading(reads, ids(example.family), **fields)


def written(example: Example) -> list[int]:
    """The tokens that a model writes, with the end where it ends by itself."""
    known = tokens(example.family).tokenizer
    made = list(known.encode(example.text, add_special_tokens=False).ids)
    return made if example.finish == "length" else [*made, ids(example.family)[EOS]]


def pieces(
    name: str,
    output: Sequence[int],
    finish: str,
    read: Reading | None,
    stops: Sequence[str] = (),
    together: int = 1,
) -> list[Piece]:
    """What is made of the output of one sequence, `together` tokens at a time."""
    writing = Writing(tokens(name), SamplingParams(1 << 20), list(stops), read)
    made: list[Piece] = []
    for start in range(0, len(output), together):
        made.append(Piece())
        for at, token in enumerate(output[start : start + together], start + 1):
            writing.add(made[-1], Delta(1, [token], finish if at == len(output) else None))
            if writing.ended:
                return made
    return made


def whole(parts: Iterable[Piece]) -> Answer:
    made = Answer()
    for part in parts:
        made.add(part)
    return made


def deltas(parts: Iterable[Piece], name: str) -> list[Fields]:
    shown = [delta(event, model(name)) for part in parts for event in part.written()]
    return [each for each in shown if each is not None]


def joined(given: Iterable[Fields]) -> Fields:
    """As clients do: texts are joined, a call's first delta has its id and name, and none later."""
    made: Fields = {"role": "assistant", "content": ""}
    calls: list[Fields] = []
    for each in given:
        made["content"] += each.get("content") or ""
        for name in ("reasoning", "reasoning_content"):
            if name in each:
                made[name] = made.get(name, "") + each[name]
        for part in each.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert set(part) == {"index", "id", "type", "function"}
                assert part["function"]["arguments"] == "" and part["function"]["name"]
                calls.append({"id": part["id"], "type": part["type"], **part["function"]})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                assert part["index"] == len(calls) - 1
                calls[-1]["arguments"] += part["function"]["arguments"]
    if calls:
        made["content"] = made["content"] or None
        made["tool_calls"] = [
            {
                "id": call["id"],
                "type": call["type"],
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return made


def without_ids(message: Fields) -> Fields:
    """Each answer has ids of its own."""
    calls = message.get("tool_calls")
    shown = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not calls:
        return shown
    return shown | {"tool_calls": [{**call, "id": "", "index": None} for call in calls]}


def meant(events: Iterable[Event]) -> Fields:
    """The message of an example's events."""
    text, thought, calls = "", "", []
    for event in events:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, Reasoning):
            thought += event.text
        elif isinstance(event, CallStart):
            calls.append({"name": event.name, "arguments": ""})
        elif isinstance(event, CallArguments):
            calls[-1]["arguments"] += event.text
    made: Fields = {"role": "assistant", "content": text}
    if thought:
        made |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        made["content"] = text or None
        made["tool_calls"] = [{"id": "", "type": "function", "function": call} for call in calls]
    return without_ids(made)


def finish_of(example: Example) -> str:
    called = any(isinstance(event, CallEnd) and event.complete for event in example.events)
    return "tool_calls" if called and example.finish == "stop" else example.finish
