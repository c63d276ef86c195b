"""Structural tags, in which parts of an answer follow a schema or a regex, as a Lark grammar.

Both of vLLM's forms: `structures` and `triggers`, and xgrammar's tree of formats. Free text ends
where a trigger begins; so nothing can follow free text but a tag's own end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvline_server.grammars import lark
from kvline_server.grammars.grammar import (
    MAX_DEPTH,
    Grammar,
    GrammarInvalid,
    checked,
    depth,
    object_of,
    schema_text,
)
from kvline_server.grammars.source import with_whitespace

MAX_TAGS = 1024
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """An expression, and whether it ends with text that has no end of its own."""

    expression: str
    open: bool = False


@dataclass(frozen=True, slots=True)
class Tag:
    begin: str
    content: Piece
    ends: list[str]


def structural_tag(fields: Fields, whitespace: str, known: lark.Marks, param: str) -> Grammar:
    """Raises GrammarInvalid."""
    if depth(fields) > MAX_DEPTH:
        raise GrammarInvalid(f"more than {MAX_DEPTH} objects and lists in each other", param)
    made = _Rules(whitespace, known)
    if "structures" in fields or "triggers" in fields:
        top = made.structures(fields, param)
    else:
        _only(fields, {"type", "format"}, param)
        top = made.piece(fields.get("format"), f"{param}.format")
    text = "\n".join([f"start: {top.expression}", *made.lines, f"TEXT: {lark.ANY_TEXT}"])
    return Grammar("lark", checked(text, param))


@dataclass(slots=True)
class _Rules:
    whitespace: str
    known: lark.Marks
    lines: list[str] = field(default_factory=list)

    def structures(self, fields: Fields, param: str) -> Piece:
        """vLLM's first form."""
        _only(fields, {"type", "structures", "triggers"}, param)
        tags = []
        for each, where in _list(fields, "structures", param):
            structure = object_of(each, where)
            _only(structure, {"begin", "schema", "end"}, where)
            content = self._json(structure.get("schema"), f"{where}.schema")
            ends = [_text(structure, "end", where)]
            tags.append((Tag(_text(structure, "begin", where), content, ends), where))
        return self._triggered(tags, _texts(fields, "triggers", param), False, False, param)

    def piece(self, value: Any, param: str) -> Piece:
        fields = object_of(value, param)
        kinds: dict[str, Callable[[Fields, str], Piece]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._separated,
        }
        made = kinds.get(str(fields.get("type")))
        if made is None:
            got = repr(fields.get("type"))[:40]
            raise GrammarInvalid(f"expected one of {', '.join(kinds)}; got {got}", f"{param}.type")
        return made(fields, param)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _json(self, schema: Any, param: str) -> Piece:
        text = with_whitespace(schema_text(schema, param), self.whitespace)
        return Piece(self._rule(f"%json {text}"))

    def _const(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type", "value"}, param)
        return Piece(lark.literal(_text(fields, "value", param), self.known))

    def _schema(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type", "json_schema"}, param)
        return self._json(fields.get("json_schema"), f"{param}.json_schema")

    def _regex(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type", "pattern"}, param)
        return Piece(lark.regex(_text(fields, "pattern", param)))

    def _any_text(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type"}, param)
        return Piece("TEXT", open=True)

    def _sequence(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type", "elements"}, param)
        pieces = [self.piece(each, where) for each, where in _list(fields, "elements", param)]
        if any(piece.open for piece in pieces[:-1]):
            message = "text without an end is served as the last element only, or within a tag"
            raise GrammarInvalid(message, f"{param}.elements")
        return Piece(" ".join(piece.expression for piece in pieces), pieces[-1].open)

    def _or(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type", "elements"}, param)
        pieces = [self.piece(each, where) for each, where in _list(fields, "elements", param)]
        body = " | ".join(piece.expression for piece in pieces)
        return Piece(self._rule(body), any(piece.open for piece in pieces))

    def _tag(self, fields: Fields, param: str) -> Piece:
        tag = self._read_tag(fields, param)
        begin = lark.literal(tag.begin, self.known)
        return Piece(f"{begin} {self._ended(tag, param)}")

    def _read_tag(self, value: Any, param: str) -> Tag:
        fields = object_of(value, param)
        _only(fields, {"type", "begin", "content", "end"}, param)
        end = fields.get("end")
        ends = _texts(fields, "end", param) if isinstance(end, list) else None
        ends = ends or [_text(fields, "end", param)]
        content = self.piece(fields.get("content"), f"{param}.content")
        return Tag(_text(fields, "begin", param), content, ends)

    def _ended(self, tag: Tag, param: str) -> str:
        """A tag's content and its end. Free text ends with the first text that is an end."""
        if not tag.content.open:
            ends = self._rule(" | ".join(lark.literal(end, self.known) for end in tag.ends))
            return f"{tag.content.expression} {ends}"
        if tag.content.expression != "TEXT" or not all(tag.ends):
            message = "text without an end is served as a tag's whole content, before an end"
            raise GrammarInvalid(message, f"{param}.content")
        return self._rule(" | ".join(self._up_to(end, f"{param}.end") for end in tag.ends))

    def _up_to(self, end: str, param: str) -> str:
        """Free text, and the literal at its end."""
        first, *rest = lark.parts(end, self.known)
        if not first.startswith('"'):
            return " ".join(("TEXT", first, *rest))
        if rest:
            message = "what ends free text has no special token but at its beginning"
            raise GrammarInvalid(message, param)
        return self._rule(f"TEXT {first}", "[lazy]")

    def _triggered_tags(self, fields: Fields, param: str) -> Piece:
        _only(fields, {"type", "triggers", "tags", "at_least_one", "stop_after_first"}, param)
        tags = [(self._read_tag(e, where), where) for e, where in _list(fields, "tags", param)]
        flags = _flag(fields, "at_least_one", param), _flag(fields, "stop_after_first", param)
        return self._triggered(tags, _texts(fields, "triggers", param), *flags, param)

    def _triggered(
        self,
        tags: list[tuple[Tag, str]],
        triggers: list[str],
        at_least_one: bool,
        stop_after_first: bool,
        param: str,
    ) -> Piece:
        """Text in which a trigger begins one of the tags that begin with it."""
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag, where in tags:
            own = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
            if len(own) != 1:
                message = f"expected to begin with one of the triggers, begins with {len(own)}"
                raise GrammarInvalid(message, f"{where}.begin")
            rest = lark.literal(tag.begin[len(own[0]) :], self.known)
            bodies[own[0]].append(f"{rest} {self._ended(tag, where)}")
        groups = []
        for at, (trigger, own) in enumerate(bodies.items()):
            if not own:
                raise GrammarInvalid("no tag begins with it", f"{param}.triggers[{at}]")
            head = self._up_to(trigger, f"{param}.triggers[{at}]")
            groups.append(self._rule(f"{head} {self._rule(' | '.join(own))}"))
        one = " | ".join(groups)
        if stop_after_first:
            return Piece(self._rule(one if at_least_one else f"{one} | TEXT"), not at_least_one)
        return Piece(f"({one}){'+' if at_least_one else '*'} TEXT", open=True)

    def _separated(self, fields: Fields, param: str) -> Piece:
        names = {"type", "tags", "separator", "at_least_one", "stop_after_first"}
        _only(fields, names, param)
        pieces = [
            self._tag(object_of(e, where), where) for e, where in _list(fields, "tags", param)
        ]
        tag = self._rule(" | ".join(piece.expression for piece in pieces))
        separator = lark.literal(_text(fields, "separator", param), self.known)
        body = tag
        if not _flag(fields, "stop_after_first", param):
            body = f"{tag} ({separator} {tag})*"
        if not _flag(fields, "at_least_one", param):
            body = f"({body})?"
        return Piece(self._rule(body))


def _only(fields: Fields, names: set[str], param: str) -> None:
    if unknown := sorted(fields.keys() - names):
        raise GrammarInvalid("this field is not served here", f"{param}.{unknown[0]}")


def _text(fields: Fields, name: str, param: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise GrammarInvalid("expected a text", f"{param}.{name}")
    return value


def _flag(fields: Fields, name: str, param: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise GrammarInvalid("expected true or false", f"{param}.{name}")
    return value


def _list(fields: Fields, name: str, param: str) -> list[tuple[Any, str]]:
    """Its items, each with its field."""
    value, where = fields.get(name), f"{param}.{name}"
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
        raise GrammarInvalid(f"expected a list of 1 to {MAX_TAGS}", where)
    return [(each, f"{where}[{at}]") for at, each in enumerate(value)]


def _texts(fields: Fields, name: str, param: str) -> list[str]:
    """Each once, none empty."""
    found = [each for each, _ in _list(fields, name, param)]
    if not all(isinstance(each, str) and each for each in found):
        raise GrammarInvalid("expected texts that are not empty", f"{param}.{name}")
    return list(dict.fromkeys(found))
