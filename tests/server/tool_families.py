"""Each family of models: a tokenizer with its marks, and calls as it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvline_server.formats.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from kvline_server.formats.format import (
    BRACKETS,
    GEMMA3,
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL_V7,
    MISTRAL_V11,
    PHI4_MINI,
    PYTHONIC,
    QWEN_XML,
    THINK,
    Format,
    Thinking,
)
from kvline_server.formats.lexer import NO_TOKEN, Piece
from kvline_server.formats.parser import Reads, parser
from kvline_server.formats.tools import Tool
from kvline_server.http.tokens import Tokens

EOS = "<|eos|>"
# What the tokenizers have learned their merges from: calls of all families.
CORPUS = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 10}}, {"name": "f"}',
    "get_weather(city='Paris', days=10, ok=True, none=None), f(s=\"x\")",
    "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "[TOOL_CALLS] f[ARGS] <|channel|>analysis commentary to=functions.f final <|message|>",
    "<think>\nLet me see what the user wants.\n</think>\n\nThe answer is: ```json ```python",
]
TOOLS = (
    Tool(
        "f",
        {
            "type": "object",
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "number"},
                "i": {"type": "integer"},
                "b": {"type": "boolean"},
                "o": {"type": "object"},
                "l": {"type": "array"},
                "z": {"type": "null"},
                "ü": {"type": "string"},
            },
        },
    ),
    Tool("g", {"type": "object", "properties": {}}),
)

Calls = Sequence[tuple[str, str]]  # names, with arguments as the family writes them


@dataclass(frozen=True)
class Family:
    format: Format
    write: Callable[[Calls], str]
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()  # added tokens that are not special
    thinking: Thinking | None = None
    written: str = "json"  # how arguments are: json, python or xml
    tail: str = ""  # what is left out where no closing mark is written
    among_text: bool = True  # whether text may stand before a call

    @property
    def name(self) -> str:
        return str(self.format.name)


def json_calls(
    between: str, key: str = "arguments", before: str = "", after: str = ""
) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        each = [f'{{"name": {json.dumps(n)}, "{key}": {a}}}' for n, a in calls]
        return before + between.join(each) + after

    return write


def marked(form: str, between: str = "") -> Callable[[Calls], str]:
    """A form with NAME and ARGUMENTS in it."""
    return lambda calls: between.join(
        form.replace("NAME", name).replace("ARGUMENTS", arguments) for name, arguments in calls
    )


def harmony(calls: Calls) -> str:
    return (
        "<|end|><|start|>assistant".join(
            f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}"
            for n, a in calls
        )
        + "<|call|>"
    )


HERMES_CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>"
FAMILIES = {
    each.name: each
    for each in (
        Family(
            LLAMA3_JSON,
            json_calls("; ", "parameters"),
            special=("<|python_tag|>", "<|eom_id|>"),
            among_text=False,
        ),
        Family(
            PYTHONIC,
            lambda calls: f"[{', '.join(f'{n}({a})' for n, a in calls)}]",
            special=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
            written="python",
            among_text=False,
            tail="]",
        ),
        Family(
            HERMES,
            marked(HERMES_CALL, "\n"),
            plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
            thinking=THINK,
            tail="\n</tool_call>",
        ),
        Family(
            QWEN_XML,
            marked(XML_CALL, "\n"),
            plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
            thinking=THINK,
            written="xml",
            tail="</function>\n</tool_call>",
        ),
        Family(
            MISTRAL_V7,
            json_calls(", ", before="[TOOL_CALLS] [", after="]"),
            special=("[TOOL_CALLS]",),
            tail="]",
        ),
        Family(
            MISTRAL_V11,
            marked("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
            special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
            thinking=BRACKETS,
        ),
        Family(
            PHI4_MINI,
            json_calls(", ", before="<|tool_call|>[", after="]<|/tool_call|>"),
            plain=("<|tool_call|>", "<|/tool_call|>"),
            tail="]<|/tool_call|>",
        ),
        Family(GEMMA3, json_calls("\n", "parameters", "```json\n", "\n```"), tail="\n```"),
        Family(
            HARMONY,
            harmony,
            special=(
                "<|start|>",
                "<|channel|>",
                "<|constrain|>",
                "<|message|>",
                "<|end|>",
                "<|call|>",
                "<|return|>",
            ),
            tail="<|call|>",
        ),
    )
}
# The same formats where the tokenizer has some of their marks as text.
VARIANTS = {
    "Hermes-text": replace(FAMILIES["Hermes"], plain=()),
    "QwenXML-text": replace(FAMILIES["QwenXML"], plain=("<think>", "</think>")),
    "MistralV11-text": replace(FAMILIES["MistralV11"], special=("[TOOL_CALLS]",), thinking=None),
    "Phi4Mini-special": replace(
        FAMILIES["Phi4Mini"], plain=(), special=("<|tool_call|>", "<|/tool_call|>")
    ),
}
ALL = {**FAMILIES, **VARIANTS}


@cache
def tokens(name: str) -> Tokens:
    """A real byte-level BPE of some 400 tokens."""
    family = ALL[name]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([line for line in CORPUS for _ in range(20)], trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in (EOS, *family.special)])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    with TemporaryDirectory() as folder:
        made.save(str(Path(folder) / "tokenizer.json"))
        return Tokens(Path(folder))


@cache
def ids(name: str) -> dict[str, int]:
    added = tokens(name).tokenizer.get_added_tokens_decoder()
    return {token.content: id for id, token in added.items()}


def pieces(name: str, tokens_of_text: Iterable[int]) -> list[Piece]:
    stream = tokens(name).stream()
    out = [(token, stream.push(token)) for token in tokens_of_text]
    return [*out, (NO_TOKEN, stream.flush())]


def encoded(name: str, text: str) -> list[Piece]:
    return pieces(name, tokens(name).tokenizer.encode(text, add_special_tokens=False).ids)


def by_character(name: str, given: Sequence[Piece]) -> list[Piece]:
    """Each character by itself, but marks that are tokens."""
    marks = set(ids(name).values())
    out: list[Piece] = []
    for token, text in given:
        out += [(token, text)] if token in marks else [(token, each) for each in text]
    return out


def joined(name: str, given: Sequence[Piece]) -> list[Piece]:
    """All text between two marks at once."""
    marks, out, text = set(ids(name).values()), [], ""
    for token, part in given:
        if token in marks:
            out += [(NO_TOKEN, text), (token, part)]
            text = ""
        else:
            text += part
    return [*out, (NO_TOKEN, text)]


def read(
    name: str,
    given: Iterable[Piece],
    finish: str = "stop",
    at_once: bool = True,
    known: dict[str, int] | None = None,
    reads: Reads | None = None,
) -> list[Event]:
    family = ALL[name]
    made = parser(
        reads or Reads(family.format, TOOLS, family.thinking), ids(name) if known is None else known
    )
    events: list[Event] = []
    for each in [list(given)] if at_once else [[piece] for piece in given]:
        events += made.feed(each)
    return summed([*events, *made.end(finish)])


def summed(events: Iterable[Event]) -> list[Event]:
    """Parts of one text as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text | Reasoning) and type(last) is type(event):
            assert isinstance(last, Text | Reasoning)
            out[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            assert event.index == last.index
            out[-1] = CallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def call(name: str, arguments: str, index: int = 0, complete: bool = True) -> list[Event]:
    return [
        CallStart(index, name),
        CallArguments(index, arguments),
        CallEnd(index, complete),
    ]
