"""A model's chat template in the environment that transformers gives it, so that a prompt is the
one the model was trained with (transformers' documentation, «Writing a chat template»).

Runs in template_process.py alone: a template can be endless, and a model's file is not trusted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LONGEST_WORD = 64
CUTTERS = {"replace", "split", "rsplit", "partition", "rpartition", "join"}
CUTTERS |= {"removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "trim"}
CASES = {"lower", "upper", "title", "capitalize", "swapcase", "casefold"}


class TemplateFailed(Exception):
    """The message goes on after «the chat template »."""


class Generation(Extension):
    """`{% generation %}`, which marks what training counts, and changes no text. The body is a
    scope of its own, as in transformers: what it sets ends with it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("text"), [], [], body).set_lineno(line)

    @staticmethod
    def text(caller: Callable[[], str]) -> str:
        return caller()


class PublicNamespace(Namespace):
    """Takes no name that begins with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        _check_public(values)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public((name,))
        super().__setitem__(name, value)


class Dictionaries:
    """`dict` without what the type itself would give away."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Raises TemplateFailed where the source is invalid."""
        made = environment()
        try:
            tree = made.parse(source)
            self._template = made.from_string(source)
        except TemplateSyntaxError as error:
            reason = f"is invalid in line {error.lineno}: {error.message}"
            raise TemplateFailed(reason) from None
        except MemoryError:
            raise TemplateFailed("took more memory than it may when it was compiled") from None
        except Exception as error:
            raise TemplateFailed(f"is invalid: {_worded(error)}") from None
        self.words = sorted(_words(tree))
        self.removed = sorted(_removed(tree))
        # Whether it may write a text in another case: then other texts become control tokens.
        self.changes_case = bool(CASES.intersection(_names(tree)))

    def render(self, context: dict[str, Any], continued: bool = False) -> str:
        """`continued`: the text ends where the last message's content does, for an answer that goes
        on with it. Raises TemplateFailed."""
        tag = ""
        if continued:
            # Its blank shows whether the template strips the content.
            tag = f"CONTINUED{secrets.token_hex(8)} "
            *before, last = context["messages"]
            context = context | {"messages": [*before, last | {"content": last["content"] + tag}]}
        try:
            text = self._template.render(context)
        except SecurityError as error:
            raise TemplateFailed(f"used an operation that is not allowed: {error}") from None
        except MemoryError:
            raise TemplateFailed("took more memory than it may") from None
        except Exception as error:
            raise TemplateFailed(f"failed{_place(error)}: {_worded(error)}") from None
        return _cut(text, tag, context["messages"][-1]["content"]) if continued else text


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=PublicNamespace,
        dict=Dictionaries(),
    )
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML of jinja2's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _check_public(names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the name {name!r:.40} in a namespace")


def _cut(text: str, tag: str, content: str) -> str:
    at = text.rfind(tag.strip())
    if at < 0 or content.removesuffix(tag).strip() not in text:
        raise TemplateFailed("does not write the last message, so it cannot be continued")
    whole = text[at : at + len(tag)] == tag
    return text[:at] if whole else text[:at].rstrip()


def _words(tree: nodes.Template) -> set[str]:
    """Texts and names that the template itself has: what it compares values with."""
    found = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    found.update(node.attr for node in tree.find_all(nodes.Getattr))
    return {word for word in found if len(word) <= LONGEST_WORD}


def _removed(tree: nodes.Template) -> set[str]:
    """Texts that it may take out of others, whose rest then stands together."""
    found: set[str] = set()
    named = [
        (call.node.attr, call.args)
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr)
    ]
    named += [(each.name, each.args) for each in tree.find_all(nodes.Filter)]
    for name, given in named:
        if name in CUTTERS:
            texts = (each.value for each in given if isinstance(each, nodes.Const))
            found.update(text for text in texts if isinstance(text, str) and text)
    return found


def _names(tree: nodes.Template) -> set[str]:
    filters = {node.name for node in tree.find_all(nodes.Filter)}
    return filters | {node.attr for node in tree.find_all(nodes.Getattr)}


def _place(error: Exception) -> str:
    """The line, which jinja2 writes into the traceback."""
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return f" in line {line}" if line else ""


def _worded(error: Exception) -> str:
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:300]
