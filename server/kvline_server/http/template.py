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

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_title, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from kvline_server.http.traced import (
    CLIENT,
    HISTORY,
    OWN,
    Traced,
    as_text,
    constant,
    filled,
    join,
    origins,
    trace,
    written,
)

SHOWN = ("content", "reasoning", "reasoning_content", "thinking")


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


class Safe(Markup):
    """What `safe` gives, of known origin until it is changed: templates write JSON through it."""

    _origins: bytes

    @classmethod
    def of(cls, value: Any) -> Safe:
        text = as_text(value)
        made = cls(text)
        made._origins = origins(text)
        return made


class ChatTemplate:
    def __init__(self, source: str) -> None:
        """Raises TemplateFailed where the source is invalid."""
        made = environment()
        try:
            tree = made.parse(source)
            self.reads = meta.find_undeclared_variables(tree)  # what it takes from the context
            self._template = made.from_string(tree)
        except TemplateSyntaxError as error:
            reason = f"is invalid in line {error.lineno}: {error.message}"
            raise TemplateFailed(reason) from None
        except MemoryError:
            raise TemplateFailed("took more memory than it may when it was compiled") from None
        except Exception as error:
            raise TemplateFailed(f"is invalid: {_worded(error)}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        own: dict[str, Any],
        variables: dict[str, Any],
        continued: bool = False,
    ) -> Traced:
        """`own`: what the template gets from the server and the model's files; `variables`: from
        the client. `continued`: the text ends where the last message's content does, for an answer
        that goes on with it. Raises TemplateFailed."""
        last, tag = messages[-1]["content"] if continued else "", ""
        if continued:
            # Its blank shows whether the template strips the content.
            tag = f"CONTINUED{secrets.token_hex(8)} "
            messages = [*messages[:-1], messages[-1] | {"content": last + tag}]
        context = {**trace(own, OWN), **trace(variables, CLIENT)}
        try:
            text = self._template.render(context, messages=[_message(m) for m in messages])
        except SecurityError as error:
            raise TemplateFailed(f"used an operation that is not allowed: {error}") from None
        except MemoryError:
            raise TemplateFailed("took more memory than it may") from None
        except Exception as error:
            raise TemplateFailed(f"failed{_place(error)}: {_worded(error)}") from None
        assert isinstance(text, Traced)
        return _cut(text, tag, last) if continued else text


class Generator(CodeGenerator):
    """Writes which texts are the template's own, and joins without losing that."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.own({value!r})")
        elif isinstance(value, list | tuple | dict):
            self.write(f"environment.traced({value!r}, {OWN})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        if _escapes(frame):
            super().visit_TemplateData(node, frame)
        else:
            self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if _escapes(frame):
            return super().visit_Concat(node, frame)
        self.write("environment.concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(group)!r})"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _escapes(frame):
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")


class Environment(ImmutableSandboxedEnvironment):
    code_generator_class = Generator
    concat = staticmethod(join)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        guarded = super().wrap_str_format(value)
        form = getattr(value, "__self__", None)
        if guarded is None or not isinstance(form, Traced):
            return guarded

        def wrapper(*args: Any, **fields: Any) -> str:
            return filled(form, "{}", args, guarded(*args, **fields))

        return wrapper

    # For what Generator writes.
    own, traced, text = staticmethod(constant), staticmethod(trace), staticmethod(as_text)


def _escapes(frame: Frame) -> bool:
    """Text for HTML is another type, of unknown origin."""
    return frame.eval_ctx.volatile or bool(frame.eval_ctx.autoescape)


def environment() -> Environment:
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters.update(tojson=_to_json, join=pass_environment(_join), title=_title, safe=Safe.of)
    made.globals.update(
        raise_exception=_raise,
        strftime_now=_now,
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
) -> Traced:
    """Without the escapes for HTML of jinja2's own."""
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return written(text, CLIENT)


def _join(
    made: Environment, parts: Iterable[Any], between: str = "", attribute: str | int | None = None
) -> Traced:
    if attribute is not None:
        parts = map(make_attrgetter(made, attribute), parts)
    return as_text(between or Traced()).join(map(as_text, parts))


def _title(value: Any) -> Traced:
    text = as_text(value)
    return text.like(do_title(text))


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message's role is one of a few, and its fields have fixed names. Of an answer only what was
    shown as text has its tokens back; the calls in it hold what clients and tools had written."""
    theirs = dict.fromkeys(SHOWN, HISTORY) if given["role"] == "assistant" else {}
    theirs["role"] = OWN
    return {constant(name): trace(value, theirs.get(name, CLIENT)) for name, value in given.items()}


def _now(form: str) -> Traced:
    theirs = any(origins(form))  # other than OWN
    return written(datetime.now().strftime(form), CLIENT if theirs else OWN)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _check_public(names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"the name {name!r:.40} in a namespace")


def _cut(text: Traced, tag: str, content: str) -> Traced:
    at = text.rfind(tag.strip())
    if at < 0 or content.removesuffix(tag).strip() not in text:
        raise TemplateFailed("does not write the last message, so it cannot be continued")
    whole = text[at : at + len(tag)] == tag
    return text[:at] if whole else text[:at].rstrip()


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
