"""Streams that no model was trained to write: cut and mutated examples of all families.

KVLINE_FUZZ is how many are tried.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence

from tool_examples import examples
from tool_families import ALL, TOOLS, by_character, encoded, ids, read

from kvline_server.formats.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from kvline_server.formats.lexer import NO_TOKEN, Piece
from kvline_server.formats.parser import Reads

STREAMS = int(os.environ.get("KVLINE_FUZZ", "390"))
ODD = [
    *"{}[]()<>\"'\\,:;=\n \t|`/0-1.eéntu\x00\u2028\ud7ff😀",
    "```",
    "\\u",
    "\\ud83d",
    "\\x4",
    "null",
]
SOURCES = {
    name: [by_character(name, encoded(name, example.text)) for example in examples(name)]
    for name in ALL
}


def test_a_mutated_stream_is_read_without_an_error_or_invention_however_it_is_cut() -> None:
    names = list(ALL)
    for number in range(STREAMS):
        chosen = random.Random(number)
        name = names[number % len(names)]
        family = ALL[name]
        atoms = mutated(name, chosen)
        reads = Reads(
            family.format,
            TOOLS,
            family.thinking,
            in_reasoning=chosen.random() < 0.2,
            constrained=chosen.random() < 0.2,
        )
        finish = chosen.choice(("stop", "length"))
        found = read(name, atoms, finish, reads=reads)
        for _ in range(2):
            again = read(name, cut(name, atoms, chosen), finish, at_once=False, reads=reads)
            assert again == found, (number, name)
        check_order(found, number)
        check_written(found, atoms, number)


def mutated(name: str, chosen: random.Random) -> list[Piece]:
    atoms = list(chosen.choice(SOURCES[name]))
    if chosen.random() < 0.3:
        atoms += chosen.choice(SOURCES[name])
    marks = [*ids(name).items()]
    for _ in range(chosen.choice((0, 1, 1, 2, 3, 8))):
        at = chosen.randrange(len(atoms) + 1)
        kind = chosen.randrange(6)
        end = min(len(atoms), at + chosen.choice((1, 1, 2, 5, 20)))
        if kind == 0:
            del atoms[at:end]
        elif kind == 1:
            atoms[at:at] = atoms[at:end]
        elif kind == 2:
            text, token = chosen.choice(marks)
            special = text in ALL[name].special or text == "<|eos|>"
            atoms.insert(at, (token, "" if special else text))
        elif kind == 3:
            atoms[at:at] = [(NO_TOKEN, each) for each in chosen.choice(marks)[0]]
        elif kind == 4:
            atoms[at:end] = [
                (NO_TOKEN, chosen.choice(ODD)) for _ in range(chosen.choice((1, 1, 3)))
            ]
        else:
            del atoms[at:]
    return atoms


def cut(name: str, atoms: Sequence[Piece], chosen: random.Random) -> list[Piece]:
    """The same stream in other pieces."""
    marks, out, text = set(ids(name).values()), [], ""
    often = chosen.choice((0.0, 0.1, 0.5, 1.0))
    for token, part in atoms:
        if token in marks:
            out += [(NO_TOKEN, text), (token, part)]
            text = ""
            continue
        text += part
        if chosen.random() < often:
            out.append((NO_TOKEN, text))
            text = ""
    return [*out, (NO_TOKEN, text)]


def check_order(events: Sequence[Event], number: int) -> None:
    """Calls begin and end one after the other, and are JSON where they are complete."""
    arguments, begun, is_open = "", 0, False
    for event in events:
        if isinstance(event, CallStart):
            assert not is_open and event.index == begun and event.name, number
            arguments, begun, is_open = "", begun + 1, True
        elif isinstance(event, CallArguments):
            assert is_open and event.index == begun - 1, number
            arguments += event.text
        elif isinstance(event, CallEnd):
            assert is_open and event.index == begun - 1, number
            is_open = False
            assert not event.complete or isinstance(json.loads(arguments), dict), number
        assert not isinstance(event, Text | Reasoning) or (event.text and not is_open), number
    assert not is_open, number


def check_written(events: Sequence[Event], atoms: Sequence[Piece], number: int) -> None:
    """Each letter and digit stands in the stream, in this order; names too."""
    raw = "".join(part for _, part in atoms)
    letters = iter(comparable(readings(raw)))
    for event in events:
        if isinstance(event, CallStart):
            assert event.name in raw or json.dumps(event.name)[1:-1] in raw, number
        elif not isinstance(event, CallEnd):
            text = event.text
            if isinstance(event, CallArguments):
                text = re.sub(r"\\(u[0-9a-fA-F]{4}|.)", "", text)
            assert all(letter in letters for letter in comparable(text)), (number, event)


def readings(raw: str) -> str:
    """With what its escapes, words and numbers may become beside them."""
    raw = re.sub(
        r"\\(?:u|x|U000)([0-9a-fA-F]{2,5})",
        lambda m: m[0] + "".join(chr(int(m[1][:n], 16)) + m[1][n:] for n in range(2, 6)),
        raw,
    )
    return raw.replace("None", "Nonenull").replace(".", "0.0")


def comparable(text: str) -> str:
    return "".join(each for each in text.casefold() if each.isalnum())


def test_the_check_of_invented_text_fails_where_text_is_invented() -> None:
    atoms = [(NO_TOKEN, "abc")]
    check_written([Text("ac")], atoms, 0)
    for wrong in ("acb", "abcc", "x"):
        try:
            check_written([Text(wrong)], atoms, 0)
        except AssertionError:
            continue
        raise AssertionError(wrong)
