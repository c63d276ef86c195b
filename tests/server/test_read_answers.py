"""Calls and reasoning of an answer, whole and streamed: what clients join from a stream is what the
whole answer has, of every family and wherever it is cut."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import pytest
from answered import (
    deltas,
    finish_of,
    joined,
    meant,
    model,
    pieces,
    reading,
    whole,
    without_ids,
    written,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_examples import Example, examples
from tool_families import ALL, FAMILIES, ids, read, tokens

from kvline_server.formats.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from kvline_server.http.answering import Answering
from kvline_server.http.message import call_id, message
from kvline_server.http.pieces import Piece
from kvline_server.http.reading import Reading

BIG = "KVLINE_FUZZ" in os.environ
HALF = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$")


def of_its_own(name: str) -> list[Example]:
    """Without those that are another's."""
    return [example for example in examples(name) if example.family == name]


GOLDEN = [example for name in ALL for example in of_its_own(name)]


def example_of(family: str, case: str) -> Example:
    return next(each for each in examples(family) if each.case == case)


@pytest.mark.parametrize("example", GOLDEN, ids=lambda e: f"{e.family}, {e.case}")
def test_a_stream_s_deltas_are_the_whole_answer(example: Example) -> None:
    name, expected = example.family, meant(example.events)
    for together in (1, 16):
        parts = pieces(name, written(example), example.finish, reading(example), together=together)
        answer = whole(parts)
        assert without_ids(message(answer, model(name))) == expected
        assert without_ids(joined(deltas(parts, name))) == expected
        assert answer.finish == finish_of(example)
        assert answer.tokens == len(written(example))
        assert not any(part.finish for part in parts[:-1])


@pytest.mark.parametrize("name", ALL)
def test_an_answer_that_is_cut_has_what_was_written(name: str) -> None:
    """At every token: `length`, nothing of the arguments that the whole does not have, and no half
    of an escape."""
    for example in of_its_own(name):
        output = written(example)
        for end in range(1, len(output), 1 if BIG else max(1, len(output) // 4)):
            parts = pieces(name, output[:end], "length", reading(example))
            answer = whole(parts)
            assert answer.finish == "length"
            shown = joined(deltas(parts, name))
            assert without_ids(shown) == without_ids(message(answer, model(name)))
            for part in deltas(parts, name):
                for call in part.get("tool_calls", ()):
                    arguments = call["function"]["arguments"].replace("\\\\", "")
                    assert not HALF.search(arguments), (example.case, end)


@pytest.mark.parametrize("name", ALL)
def test_the_only_call_that_is_wanted_is_cut_as_any_other(name: str) -> None:
    """`length` with a client that wants one call at most, unless that ended before the limit."""
    cut = 0
    for example in of_its_own(name):
        output = written(example)
        for end in range(1, len(output), 1 if BIG else max(1, len(output) // 8)):
            parts = pieces(name, output[:end], "length", reading(example, one_call=True))
            ends = [e for part in parts for e in part.events if isinstance(e, CallEnd)]
            expected = "tool_calls" if any(e.complete for e in ends) else "length"
            if len(parts) < end and expected == "length":
                expected = "stop"  # by the mark behind a call that is none
            assert whole(parts).finish == expected, (example.case, end)
            cut += expected == "length" and bool(ends)
    assert cut or name not in FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_shown_with_the_token_that_decides_it(name: str) -> None:
    """Decided: were the answer cut there, it would have the call."""
    for example in examples(name):
        calls = any(isinstance(event, CallStart) for event in example.events)
        if not calls or example.case == "empty":  # which only its end mark decides
            continue
        output, read_as = written(example), reading(example)
        parts = pieces(name, output, example.finish, read_as)
        kinds = [{type(event) for event in part.events} for part in parts]
        shown = next(at for at, kind in enumerate(kinds, 1) if CallStart in kind)
        before = whole(pieces(name, output[: shown - 1], "length", read_as))
        assert shown == 1 or not before.calls, example.case


def runs(parts: Iterable[Piece]) -> list[str]:
    """Texts that nothing else stands in."""
    made = [""]
    for event in (event for part in parts for event in part.written()):
        if isinstance(event, Text):
            made[-1] += event.text
        else:
            made.append("")
    return made


def finishes(parts: list[Piece], output: list[int], finish: str, read_as: Reading) -> list[str]:
    """Why an answer without a stop text may have ended."""
    ends = [e for part in parts for e in part.events if isinstance(e, CallEnd)]
    called = any(end.complete for end in ends)
    if finish == "length" and not (read_as.one_call and called):
        return ["length", "stop"] if len(parts) < len(output) else ["length"]
    return ["tool_calls" if called else "stop"]


@settings(max_examples=2000 if BIG else 25, deadline=None)
@given(st.data())
def test_any_tokens_are_the_same_streamed_and_whole(data: st.DataObject) -> None:
    """Also mixed ones, that no model wrote, with stop texts."""
    name = data.draw(st.sampled_from(sorted(ALL)))
    example = data.draw(st.sampled_from(of_its_own(name)))
    output = written(example)
    marks = st.sampled_from(sorted(ids(name).values()))
    for _ in range(data.draw(st.integers(0, 3))):
        output.insert(data.draw(st.integers(0, len(output))), data.draw(marks))
    del output[data.draw(st.integers(1, len(output))) :]
    stops = data.draw(st.lists(st.sampled_from(["\n\n", "Done", '"', "}", "e.", "a"]), max_size=2))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    read_as = reading(example, one_call=data.draw(st.booleans()))
    parts = pieces(name, output, finish, read_as, stops)
    answer = whole(parts)
    shown = joined(deltas(parts, name))
    assert without_ids(shown) == without_ids(message(answer, model(name)))
    assert (shown["content"] or "") == answer.text
    for run in runs(parts):
        assert not any(stop in run for stop in stops)
    assert len(answer.calls) <= 1 or not read_as.one_call
    assert parts[-1].stop is not None or answer.finish in finishes(parts, output, finish, read_as)
    again = whole(pieces(name, output, finish, read_as, stops, together=7))
    assert without_ids(message(again, model(name))) == without_ids(message(answer, model(name)))
    assert (again.finish, again.tokens) == (answer.finish, answer.tokens)


CALLS = "B"  # two of them


@pytest.mark.parametrize("name", FAMILIES)
def test_the_only_call_that_is_wanted_ends_the_answer(name: str) -> None:
    example = example_of(name, CALLS)
    output = written(example)
    parts = pieces(name, output, "stop", reading(example, one_call=True))
    answer = whole(parts)
    first = meant(example.events)["tool_calls"][0]["function"]
    assert [(c.name, c.arguments.getvalue()) for c in answer.calls] == [tuple(first.values())]
    assert answer.finish == "tool_calls" and len(parts) < len(output)


def text_and_call(stop: str, text: str) -> tuple[list[Event], str | None, int]:
    """-> the events up to the stop text, why it ended, and the tokens until then"""
    known = tokens("Hermes")
    output = known.tokenizer.encode(text, add_special_tokens=False).ids
    parts = pieces("Hermes", output, "length", reading(example_of("Hermes", "B")), [stop])
    found: list[Event] = [event for part in parts for event in part.written()]
    return found, parts[-1].finish, len(parts)


CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "END"}}\n</tool_call>'


def test_a_stop_text_is_one_of_content_alone() -> None:
    """Neither reasoning nor arguments end by it, nor text on both sides of a call."""
    events, finish, _ = text_and_call("END", f"<think>END</think>{CALL}\nEND more")
    assert finish == "tool_calls"
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "END"
    arguments = "".join(e.text for e in events if isinstance(e, CallArguments))
    assert arguments == '{"s": "END"}'
    assert "".join(e.text for e in events if isinstance(e, Text)).strip() == ""
    events, finish, _ = text_and_call("ab", f"a{CALL}b")
    assert finish == "length"
    assert "".join(e.text for e in events if isinstance(e, Text)) == "ab"


def test_what_may_begin_a_stop_text_comes_before_what_follows_it() -> None:
    events, _, _ = text_and_call("Xyz", f"aX{CALL}")
    kinds = [type(event) for event in events]
    assert "".join(e.text for e in events if isinstance(e, Text)) == "aX"
    assert kinds.index(CallStart) > max(i for i, kind in enumerate(kinds) if kind is Text)


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.thinking])
def test_tokens_of_reasoning_are_counted(name: str) -> None:
    example = example_of(name, "reasoning")
    thinking = ALL[name].thinking
    assert thinking is not None
    output, known = written(example), ids(name)
    begin, end = output.index(known[thinking.open]), output.index(known[thinking.close])
    for together in (1, 16):
        parts = pieces(name, output, "stop", reading(example), together=together)
        assert whole(parts).reasoning == end - begin


def test_reasoning_that_is_not_wanted_is_counted_and_not_shown() -> None:
    example = example_of("Hermes", "reasoning, call")
    parts = pieces("Hermes", written(example), "stop", reading(example, shows_reasoning=False))
    answer = whole(parts)
    assert answer.reasoning > 0 and not answer.thought.getvalue()
    shown = joined(deltas(parts, "Hermes"))
    assert "reasoning" not in shown and len(shown["tool_calls"]) == 1


def test_ids_of_calls_are_unique_and_as_their_templates_take_them() -> None:
    for name in FAMILIES:
        made = {call_id(Answering(ALL[name].format)) for _ in range(1000)}
        assert len(made) == 1000
        nine = name.startswith("Mistral")
        form = r"[a-zA-Z0-9]{9}" if nine else r"call_[0-9a-f]{24}"
        assert all(re.fullmatch(form, each) for each in made)


def test_without_a_reading_all_is_text() -> None:
    example = example_of("Hermes", "B")
    answer = whole(pieces("Hermes", written(example), "stop", None))
    assert answer.text == example.text and answer.finish == "stop"
    assert read("Hermes", [], "stop") == []
