"""200 tool schemas of rising nastiness, in every family: each is refused by the names of the tool
and of what cannot be kept, or accepted, and then each call of a random walk is valid.

KVLINE_FUZZ from 1,000 on tries each schema in all families; else in one that writes JSON, and in
those that do not.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from agent_schemas import AGENT_TOOLS
from nasty_schemas import COUNT, nasty_tools
from tool_families import EOS, FAMILIES, ids, tokens
from tool_walks import calls, check_valid, read, walk

from kvline_server.formats.grammar import Choice, grammar, schema_reason
from kvline_server.formats.keywords import ASSERTIONS, subschemas
from kvline_server.formats.lark import lacking
from kvline_server.formats.tools import Tool, ToolRefused
from kvline_server.grammars.compiled import GrammarRefused, compiled, explore
from kvline_server.grammars.grammar import Grammar, checked
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.options.grammars import SMALL

EVERYWHERE = int(os.environ.get("KVLINE_FUZZ", "39")) >= 1000
JSON = [name for name, family in FAMILIES.items() if family.written == "json"]
OTHERS = [name for name in FAMILIES if name not in JSON]
REQUIRED = Choice("required")
# What llguidance's words mean, where they have no keyword in them.
MEANT = {
    "integer range": {"minimum", "maximum"},
    "regex": {"pattern"},
    "Pointer": {"$ref"},
    "Resource": {"$ref", "$schema"},
    "anyOf is empty": {"enum"},
    "Regex is empty": {"enum", "const", "pattern"},
    "incompatible types": {"enum", "type"},
    "Unknown format": {"format"},
    "is of its type": {"enum"},
    "a value has </parameter>": {"enum"},
    "alternatives": {"anyOf", "oneOf"},
}
# How many are accepted at least; more is better.
ACCEPTED = {"json": 147, "QwenXML": 117, "Pythonic": 128}


@cache
def vocabulary(name: str) -> Vocabulary:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        tokens(name).tokenizer.save(str(file))
        size = tokens(name).tokenizer.get_vocab_size()
        return Vocabulary(file, size, [ids(name)[EOS]])


def served(name: str, tools: Iterable[Tool]) -> str:
    """The grammar, tried as a server tries it. Raises ToolRefused, GrammarRefused."""
    lark = grammar(FAMILIES[name].format, [*tools], REQUIRED, True, ids(name))
    given = Grammar("lark", checked(lark, "tools"))
    explore(compiled(given, vocabulary(name), SMALL.lexer_states), vocabulary(name))
    return lark


def check_walk(name: str, tools: Iterable[Tool], lark: str, chosen: random.Random) -> bool:
    """-> whether it came to an end"""
    offered = [*tools]
    walked, whole = walk(name, lark, chosen)
    found = calls(read(name, offered, walked, whole))
    check_valid(offered, found, strict=True)
    assert not whole or (found and all(complete for _, _, complete in found)), found
    return whole


def check_named(tool: Tool, refused: ToolRefused) -> None:
    """The message has the tool, and a keyword or a property of its schema."""
    assert refused.tool == tool.name and repr(tool.name) in str(refused)
    inside = [*subschemas(tool.parameters)]
    known = ASSERTIONS | {"$ref", "$schema", "format"}
    own = {key for schema in inside for key in schema if key in known}
    properties = [schema.get("properties", {}) for schema in inside]
    if any(value is False for each in properties for value in each.values()):
        own.add("not")  # as a grammar has `false`
    meant = {key for words, keys in MEANT.items() if words in refused.reason for key in keys}
    named = {key for key in own if re.search(rf"(?<!\w){re.escape(key)}(?!\w)", refused.reason)}
    a_property = any(repr(name) in refused.reason for each in properties for name in each)
    assert named or meant & own or a_property, refused


def tried(name: str, tool: Tool, chosen: random.Random) -> bool:
    """-> whether it is accepted"""
    try:
        lark = served(name, [tool])
    except ToolRefused as refused:
        check_named(tool, refused)
        return False
    except GrammarRefused as refused:
        check_named(tool, ToolRefused(tool.name, schema_reason(str(refused))))
        return False
    check_walk(name, [tool], lark, chosen)
    return True


def test_each_of_200_schemas_is_kept_or_refused_by_name() -> None:
    tools, accepted = nasty_tools(), Counter[str]()
    assert len(tools) == len({tool.name for tool in tools}) == COUNT
    for number, tool in enumerate(tools):
        json_family = JSON[number % len(JSON)]
        for name in FAMILIES if EVERYWHERE else (json_family, *OTHERS):
            try:
                kept = tried(name, tool, random.Random(number))
            except Exception as error:
                raise AssertionError(f"{name}: {tool.name}: {tool.parameters}") from error
            if name == json_family or name in OTHERS:
                accepted["json" if name == json_family else name] += kept
    print(f"accepted of {COUNT}: {dict(accepted)}")
    assert all(accepted[kind] >= least for kind, least in ACCEPTED.items()), accepted


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_tools_as_coding_agents_send_them_are_kept_in_one_request(name: str) -> None:
    sent = [{"name": tool.name, "parameters": tool.parameters} for tool in AGENT_TOOLS]
    assert 66_000 < len(json.dumps(sent, ensure_ascii=False).encode()) < 70_000
    lark = served(name, AGENT_TOOLS)
    ended = [check_walk(name, AGENT_TOOLS, lark, random.Random(seed)) for seed in range(3)]
    assert any(ended)


def test_a_string_in_a_list_may_have_the_mark_that_ends_a_parameter() -> None:
    value = ["a</parameter>b", {"c": '\\"</parameter>\n<parameter=x>\n'}]
    schema = {"type": "object", "properties": {"v": {"type": "array"}, "x": {"type": "array"}}}
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key in "vx"
    )
    given = tokens("QwenXML").tokenizer.encode(f"{text}</function>\n</tool_call>").ids
    ((_, arguments, complete),) = calls(read("QwenXML", [Tool("f", schema)], given, True))
    assert complete and json.loads(arguments) == {"v": value, "x": value}
    open_string = '<tool_call>\n<function=f>\n<parameter=v>\n[1, "a\n</parameter>\n</function>'
    given = tokens("QwenXML").tokenizer.encode(f"{open_string}\n</tool_call>").ids
    assert calls(read("QwenXML", [Tool("f", schema)], given, True)) == [
        ("f", json.dumps({"v": '[1, "a'}), True)
    ]


@pytest.mark.parametrize("text", ["a", "hello é ", "x\n</para ", "\n", "</parameter\n", "<</p"])
@pytest.mark.parametrize("name", ["QwenXML", "Hermes", "Pythonic"])
def test_a_text_of_a_length_is_kept_to_its_end(name: str, text: str) -> None:
    """A lexer has its limit, which is less than one state for all that a text may be."""
    schema = {"properties": {"s": {"type": "string", "maxLength": 1500}}, "required": ["s"]}
    value = text * (1400 // len(text))
    arguments = {"json": json.dumps({"s": value}, ensure_ascii=False)}
    arguments["python"] = f"s={json.dumps(value, ensure_ascii=False)}"
    arguments["xml"] = f"<parameter=s>\n{value}\n</parameter>\n"
    family, lark = FAMILIES[name], served(name, [Tool("f", schema)])
    written = family.write([("f", arguments[family.written])])
    given = tokens(name).tokenizer.encode(written, add_special_tokens=False).ids
    matcher = compiled(Grammar("lark", lark), vocabulary(name), SMALL.lexer_states)
    for token in given:
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize("mark", ["</parameter>", "<|", "<a"])
def test_a_text_that_lacks_a_mark_is_matched(mark: str) -> None:
    chosen, pattern = random.Random(0), re.compile(lacking(mark), re.DOTALL)
    parts = [*mark, mark[:2], mark[:-1], mark, "x", "\n", "é"]
    for _ in range(5000):
        text = "".join(chosen.choices(parts, k=chosen.randrange(9)))
        assert bool(pattern.fullmatch(text)) == (mark not in text), text
