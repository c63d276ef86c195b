"""Structural tags accept the texts that they describe and no others, for a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_kit import CALL, START, THINK, byte_level, vocabulary

from kvline_server.grammars.asked import asked
from kvline_server.grammars.compiled import compiled
from kvline_server.grammars.grammar import Grammar, GrammarInvalid
from kvline_server.grammars.lark import literal, marks, regex
from kvline_server.grammars.vocabulary import Vocabulary

ADDED = byte_level().get_added_tokens_decoder()
KNOWN = marks((id, token.content, token.special) for id, token in ADDED.items())
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
FREE = {"type": "any_text"}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("tags") / "model", byte_level())


def tag(begin: str, end: Any = "</t>", content: Any = INTEGER) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def formed(**fields: Any) -> Grammar:
    made = asked(None, {"structural_tag": {"type": "structural_tag", "format": fields}}, KNOWN)
    assert made is not None
    return made


def ends(known: Vocabulary, grammar: Grammar, text: str) -> bool | None:
    """Whether an answer may end behind the text; None where the text is not allowed."""
    tokens = known.tokenizer.tokenize_str(text, parse_special=True)
    matcher = compiled(grammar, known, 10_000).deep_copy()
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return None
    return matcher.is_accepting()


TRIGGERED = {"type": "triggered_tags", "triggers": ["<t"], "tags": [tag("<t1>"), tag("<t2>")]}
SEQUENCE = [
    {"type": "const_string", "value": 'a/b "q" ü\n\t'},
    {"type": "regex", "pattern": "x/y+\n"},
    {"type": "or", "elements": [{"type": "const_string", "value": t} for t in ("", "z")]},
]
CALLED = {"triggers": [CALL], "tags": [tag(f"{CALL}\nx", THINK)], "type": "triggered_tags"}


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (
            TRIGGERED,
            {"": True, "hey": True, "a<t1>5</t> b<t2>6</t>": True, "<t": False, "<t3": None}
            | {"<t1>x": None, "<t1>5</t": False, "a < b": True},
        ),
        (TRIGGERED | {"at_least_one": True}, {"": False, "hey": False, "a<t1>5</t>b": True}),
        (
            TRIGGERED | {"stop_after_first": True},
            {"hey": True, "a<t1>5</t>": True, "a<t1>5</t>b": None},
        ),
        (
            TRIGGERED | {"stop_after_first": True, "at_least_one": True},
            {"hey": False, "a<t1>5</t>": True, "a<t1>5</t>b": None},
        ),
        (  # both marks are tokens, which are no text
            CALLED,
            {"hey": True, f"hey{CALL}\nx5{THINK} more": True, f"hey{CALL}y": None, THINK: None},
        ),
        (
            {"type": "sequence", "elements": SEQUENCE},
            {'a/b "q" ü\n\tx/yyy\nz': True, 'a/b "q" ü\n\tx/y\n': True, "a/c": None},
        ),
        (
            {"type": "sequence", "elements": [tag("<think>", "</end>", FREE), INTEGER]},
            {"<think>a </en </end>5": True, "<think></end>5": True, "<think></end>a": None},
        ),
        (
            {"type": "sequence", "elements": [tag("<think>", [THINK, "</x>"], FREE), INTEGER]},
            {f"<think>a{THINK}5": True, "<think>a</x>5": True, "<think>5": False},
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<a>"), tag("<b>")], "separator": ", "},
            {"": True, "<a>1</t>": True, "<a>1</t>, <b>2</t>": True, "<a>1</t><b>": None},
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<a>")], "separator": "\n"}
            | {"at_least_one": True, "stop_after_first": True},
            {"": False, "<a>1</t>": True, "<a>1</t>\n": None},
        ),
        (tag("<a>", ["</a>", "."]), {"<a>1.": True, "<a>1</a>": True, "<a>1,": None}),
        (tag("<a>", ""), {"<a>1": True, "<a>": False}),
    ],
)
def test_texts_of_a_format(
    known: Vocabulary, form: dict[str, Any], texts: dict[str, bool | None]
) -> None:
    grammar = formed(**form)
    assert {text: ends(known, grammar, text) for text in texts} == texts


def test_texts_of_structures(known: Vocabulary) -> None:
    structures = [
        {"begin": "<f=foo>", "schema": OBJECT, "end": "</f>"},
        {"begin": "<f=bar>", "schema": {"type": "array"}, "end": "</f>"},
    ]
    form = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    grammar = asked(form, None, KNOWN)
    assert grammar is not None and grammar == asked(None, {"structural_tag": form}, KNOWN)
    texts = {
        "hello": True,
        'I call <f=foo>{"a": 1}</f> and <f=bar>[]</f>.': True,
        "<f=baz": None,
        '<f=foo>{"a": 1, "b": 2}': False,  # without its end
        '<f=foo>{"b": 2, "a": 1}': None,  # properties have the schema's order
        '<f=foo>{"a": "x"': None,
    }
    assert {text: ends(known, grammar, text) for text in texts} == texts


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"type": "grammar", "grammar": "root"}, "type", "expected one of const_string"),
        ({"type": "const_string"}, "value", "expected a text"),
        ({"type": "const_string", "value": "a", "case": 1}, "case", "not served"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes", "not served"),
        ({"type": "sequence", "elements": []}, "elements", "a list of 1 to"),
        ({"type": "sequence", "elements": [FREE, INTEGER]}, "elements", "last element only"),
        ({"type": "or", "elements": [INTEGER, {"type": "regex"}]}, "elements[1].pattern", "a text"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema", "a JSON schema"),
        (tag("<a>", "", FREE), "content", "before an end"),
        (tag("<a>", f"x{THINK}", FREE), "end", "special token"),
        (tag("<a>", 3), "end", "expected a text"),
        (TRIGGERED | {"triggers": ["<u"]}, "tags[0].begin", "begins with 0"),
        (TRIGGERED | {"triggers": ["<t", "<t1"]}, "tags[0].begin", "begins with 2"),
        (TRIGGERED | {"triggers": ["<t", "q"]}, "triggers[1]", "no tag begins with it"),
        (TRIGGERED | {"triggers": [""]}, "triggers", "not empty"),
        (TRIGGERED | {"at_least_one": "yes"}, "at_least_one", "true or false"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(
    form: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(GrammarInvalid) as error:
        formed(**form)
    assert error.value.param == f"structured_outputs.structural_tag.format.{param}"
    assert words in str(error.value)


def test_marks_are_what_llguidance_takes_for_no_text(known: Vocabulary) -> None:
    assert {CALL, THINK, START} <= KNOWN.keys()
    for text, id in KNOWN.items():
        assert known.tokenizer.is_special_token(id), text
    assert literal(f'a"{CALL}\n', KNOWN) == f'"a\\"" <[{KNOWN[CALL]}]> "\\n"'
    assert literal("", KNOWN) == literal("", {}) == '""'


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"), (r"\\/", "\\/")],
)
def test_a_regex_is_the_same_within_a_grammar(known: Vocabulary, pattern: str, text: str) -> None:
    assert ends(known, Grammar("regex", pattern), text) is True
    assert ends(known, Grammar("lark", f"start: {regex(pattern)}"), text) is True
