"""Each family's golden examples, however their stream is cut."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tool_examples import BROKEN, SIMPLE, Example, examples, late_break
from tool_families import (
    ALL,
    FAMILIES,
    TOOLS,
    by_character,
    call,
    encoded,
    ids,
    joined,
    pieces,
    read,
    summed,
    tokens,
)
from waiting import within

from kvline_server.formats.events import CallArguments, CallStart, Event, Reasoning, Text
from kvline_server.formats.format import HERMES, THINK
from kvline_server.formats.lexer import NO_TOKEN, Piece
from kvline_server.formats.parser import Reads, parser

BIG = "KVLINE_FUZZ" in os.environ
LONG = 1_000_000 if BIG else 20_000  # characters
GOLDEN = [example for name in ALL for example in examples(name)] + [late_break()]


def reads(example: Example) -> Reads:
    family = ALL[example.family]
    tools = TOOLS if example.tools else ()
    return Reads(family.format, tools, family.thinking, example.in_reasoning)


def result(example: Example, given: Sequence[Piece], at_once: bool = True) -> tuple[Event, ...]:
    read_as = reads(example)
    return tuple(read(example.family, given, example.finish, at_once, reads=read_as))


@pytest.mark.parametrize("example", GOLDEN, ids=lambda e: f"{e.family}, {e.case}")
def test_an_example_is_read_however_it_is_cut(example: Example) -> None:
    given = encoded(example.family, example.text)
    assert result(example, given) == example.events
    assert result(example, given, at_once=False) == example.events
    assert result(example, joined(example.family, given)) == example.events
    assert result(example, by_character(example.family, given), at_once=False) == example.events


@pytest.mark.parametrize(
    "example", [e for e in GOLDEN if e.family in FAMILIES], ids=lambda e: f"{e.family}, {e.case}"
)
def test_marks_that_are_text_are_read_at_every_cut(example: Example) -> None:
    """A tokenizer without any of the marks."""
    text = example.text
    step = 1 if BIG else max(1, len(text) // 25)
    cuts = [[text], *([text[:at], text[at:]] for at in range(1, len(text), step))]
    expected = None
    for parts in cuts:
        given = [(NO_TOKEN, part) for part in parts]
        found = read(example.family, given, example.finish, known={}, reads=reads(example))
        expected = expected or found
        assert found == expected, parts
    # No tokenizer hides the mark of what turns out to be no call.
    hidden = (Text(text),) if example.case == "code" else example.events
    assert tuple(expected or ()) == hidden


@pytest.mark.parametrize("name", ALL)
def test_arguments_that_are_none_leave_text_and_no_call(name: str) -> None:
    """I: all that was written is content, but for special tokens."""
    family = ALL[name]
    for arguments in BROKEN[family.written]:
        text = family.write([("f", arguments)])
        given = encoded(name, text)
        shown = "".join(part for _, part in given)
        for parts in (given, by_character(name, given)):
            found = read(name, parts, at_once=False)
            assert not any(isinstance(event, CallStart) for event in found), arguments
            if family.name != "Harmony":  # whose headers are never shown
                assert found == [Text(shown)], arguments


@pytest.mark.parametrize("name", [name for name in FAMILIES if len(ids(name)) > 1])
def test_text_that_spells_a_token_is_text(name: str) -> None:
    """J: what a tool or a user wrote into the prompt, and the model repeats."""
    family = ALL[name]
    text = "See: " + family.write([("f", SIMPLE[family.written][0])])
    if not family.among_text:
        text = text.replace("See: ", "See: <|python_tag|>")
    plain = tokens(name).tokenizer
    spelled = [plain.encode(each, add_special_tokens=False).ids for each in text]
    given = pieces(name, [token for parts in spelled for token in parts])
    # <function= alone begins a call as well, and is no token of any tokenizer.
    read_as = Reads(family.format, TOOLS, family.thinking, constrained=True)
    assert read(name, given, at_once=False, reads=read_as) == [Text(text)]


@settings(max_examples=5000 if BIG else 200, deadline=None)
@drawn(st.data())
def test_text_that_need_not_be_read_is_what_it_would_be_read_as(data: st.DataObject) -> None:
    """Also where it is none that a model wrote."""
    example = data.draw(st.sampled_from(GOLDEN))
    name, given = example.family, encoded(example.family, example.text)
    if data.draw(st.booleans()):
        given = by_character(name, given)
    some = st.sampled_from(
        ["", " ", "\n", "a", '"', "\\", "\\ud83d", "<", "</parameter>", "é", "}"]
    )
    for _ in range(data.draw(st.integers(0, 6))):
        given.insert(data.draw(st.integers(0, len(given))), (NO_TOKEN, data.draw(some)))
    known = data.draw(st.sampled_from([ids(name), {}]))
    reads_as, finish = reads(example), data.draw(st.sampled_from(["stop", "length"]))
    made, other = parser(reads_as, known), parser(reads_as, known)
    found: list[Event] = []
    for token, text in given:
        kind = made.plain(token, text)
        if kind is None:
            found += made.feed([(token, text)])
        elif text:
            shown: dict[type[Event], Event] = {Text: Text(text), Reasoning: Reasoning(text)}
            found.append(shown.get(kind, CallArguments(made.calls - 1, text)))
    expected = other.feed(given) + other.end(finish)
    assert summed(found + made.end(finish)) == summed(expected)


def test_two_choices_do_not_share_anything() -> None:
    """O: one of them with calls."""
    reads_as = Reads(HERMES, TOOLS, THINK)
    one, other = parser(reads_as, {}), parser(reads_as, {})
    events: list[Event] = []
    others: list[Event] = []
    for each in '<tool_call>{"name": "g", "arguments": {}}</tool_call>':
        events += one.feed([(NO_TOKEN, each)])
        others += other.feed([(NO_TOKEN, "<")])
    assert events + one.end("stop") == call("g", "{}")
    text = "".join(e.text for e in [*others, *other.end("stop")] if isinstance(e, Text))
    assert text == "<" * 53 and (one.calls, other.calls) == (1, 0)


def test_a_call_is_shown_with_the_first_of_its_values_and_then_as_it_comes() -> None:
    made = parser(Reads(HERMES, TOOLS), {})
    made.feed([(NO_TOKEN, '<tool_call>\n{"name": "f", "arguments": {"s": ')])
    begun = made.feed([(NO_TOKEN, '"a')])
    assert [type(event).__name__ for event in begun] == ["CallStart", "CallArguments"]
    for part, shown in (("b", "b"), ("\\", ""), ("u00", ""), ("e9c", "\\u00e9c"), ("\\", "")):
        assert "".join(e.text for e in made.feed([(NO_TOKEN, part)]) if hasattr(e, "text")) == shown


def test_text_that_cannot_begin_a_mark_is_not_held_back() -> None:
    made = parser(Reads(HERMES, TOOLS, THINK), {})
    for part, shown in (
        ("Hi", "Hi"),
        (" <too", ""),
        ("k> x", " <took> x"),
        ("\n", ""),
        ("y", "\ny"),
    ):
        found = made.feed([(NO_TOKEN, part)])
        assert "".join(e.text for e in found if isinstance(e, Text)) == shown


def test_reasoning_is_read_without_a_format_of_calls() -> None:
    made = parser(Reads(None, thinking=THINK, in_reasoning=True), {})
    seen = []
    for part in ("a</thi", "nk>", "\n<tool_call>{}"):
        seen.append((made.feed([(NO_TOKEN, part)]), made.in_reasoning))
    assert seen == [([Reasoning("a")], True), ([], False), ([Text("<tool_call>{}")], False)]
    assert made.end("stop") == []


@pytest.mark.parametrize("unit", ["<", "<tool_call>", "[", "\\", "\n", "ab"])
@pytest.mark.parametrize("before", ["", '<tool_call>{"name": "f", "arguments": {"a": ["'])
def test_time_grows_with_the_text_and_not_faster(before: str, unit: str) -> None:
    """A long text of what begins marks, calls and escapes, in one piece and in many."""
    text = unit * (LONG // len(unit))
    with within(20):
        for parts in ([text], [text[at : at + 16] for at in range(0, len(text), 16)]):
            made = parser(Reads(HERMES, TOOLS, THINK), {})
            events = made.feed([(NO_TOKEN, part) for part in (before, *parts)])
            events += made.end("length")
            shown = sum(len(e.text) for e in events if isinstance(e, Text | CallArguments))
            assert abs(shown - len(text)) <= len(before)
