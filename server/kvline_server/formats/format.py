"""How each family of models writes its tool calls, and its reasoning: descriptions, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvline_contract.launch import ToolCallParser


class Body(StrEnum):
    """What is written between the marks of a call."""

    JSON = "{name, arguments}, or a list of them"
    NAMED = "a name, then arguments as JSON"
    PYTHON = "f(a=1), or a list of them"
    XML = "<function=f><parameter=a>1</parameter></function>"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a grammar has calls written: `before` the first, each `call` with $name and $arguments,
    `between` two of them, `after` the last. Marks in these texts are tokens where the tokenizer
    has them."""

    call: str
    before: str = ""
    between: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a call may begin with."""

    mark: str  # empty: calls begin an answer, with the character `first`
    body: Body
    close: str = ""  # the mark behind the calls, which may be missing
    first: str = ""
    trained: bool = True  # models write this mark for calls alone
    layout: Layout | None = None  # where a grammar writes calls so


@dataclass(frozen=True, slots=True)
class Format:
    name: ToolCallParser  # of spec.engine
    openings: tuple[Opening, ...]
    inner: tuple[str, ...] = ()  # marks within a call

    def marks(self) -> set[str]:
        outer = (mark for each in self.openings for mark in (each.mark, each.close))
        return {mark for mark in (*outer, *self.inner) if mark}

    def written(self) -> tuple[Opening, ...]:
        """What a grammar writes, and nothing else."""
        return tuple(each for each in self.openings if each.layout is not None)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning."""

    open: str
    close: str


THINK = Thinking("<think>", "</think>")
BRACKETS = Thinking("[THINK]", "[/THINK]")

NAME_AND_ARGUMENTS = '{"name": "$name", "arguments": $arguments}'
NAME_AND_PARAMETERS = '{"name": "$name", "parameters": $arguments}'
PYTHON_CALLS = Layout("$name($arguments)", before="[", between=", ", after="]")
XML_CALL = Layout(
    "<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>", between="\n"
)

LLAMA3_JSON = Format(
    ToolCallParser.LLAMA3_JSON,
    (
        Opening(
            "",
            Body.JSON,
            first="{",
            trained=False,
            layout=Layout(NAME_AND_PARAMETERS, between="; "),
        ),
        Opening("<|python_tag|>", Body.JSON),
        Opening("<|python_start|>", Body.JSON, "<|python_end|>"),
    ),
)
PYTHONIC = Format(
    ToolCallParser.PYTHONIC,
    (
        Opening("", Body.PYTHON, first="[", trained=False, layout=PYTHON_CALLS),
        Opening("<|python_start|>", Body.PYTHON, "<|python_end|>"),
        Opening("<|python_tag|>", Body.PYTHON),
    ),
)
HERMES = Format(
    ToolCallParser.HERMES,
    (
        Opening(
            "<tool_call>",
            Body.JSON,
            "</tool_call>",
            layout=Layout(f"<tool_call>\n{NAME_AND_ARGUMENTS}\n</tool_call>", between="\n"),
        ),
    ),
)
QWEN_XML = Format(
    ToolCallParser.QWEN_XML,
    (
        Opening("<tool_call>", Body.XML, "</tool_call>", layout=XML_CALL),
        # Some write the second mark alone.
        Opening("<function=", Body.XML, "</tool_call>"),
    ),
)
MISTRAL_V7 = Format(
    ToolCallParser.MISTRAL_V7,
    (
        Opening(
            "[TOOL_CALLS]",
            Body.JSON,
            layout=Layout(NAME_AND_ARGUMENTS, before="[TOOL_CALLS] [", between=", ", after="]"),
        ),
    ),
)
MISTRAL_V11 = Format(
    ToolCallParser.MISTRAL_V11,
    (Opening("[TOOL_CALLS]", Body.NAMED, layout=Layout("[TOOL_CALLS]$name[ARGS]$arguments")),),
    inner=("[ARGS]", "[CALL_ID]"),
)
PHI4_MINI = Format(
    ToolCallParser.PHI4_MINI,
    (
        Opening(
            "<|tool_call|>",
            Body.JSON,
            "<|/tool_call|>",
            layout=Layout(
                NAME_AND_ARGUMENTS,
                before="<|tool_call|>[",
                between=", ",
                after="]<|/tool_call|>",
            ),
        ),
        Opening("functools", Body.JSON),
    ),
)
GEMMA3 = Format(
    ToolCallParser.GEMMA3,
    (
        Opening(
            "",
            Body.JSON,
            first="{",
            trained=False,
            layout=Layout(NAME_AND_PARAMETERS, between="\n"),
        ),
        Opening("", Body.PYTHON, first="[", trained=False, layout=PYTHON_CALLS),
        *(
            Opening(f"```{word}", body, "```", trained=False)
            for word, body in (
                ("json", Body.JSON),
                ("tool_call", Body.JSON),
                ("tool_code", Body.PYTHON),
                ("python", Body.PYTHON),
            )
        ),
    ),
)
# Its messages have channels, which harmony.py reads.
HARMONY = Format(
    ToolCallParser.HARMONY,
    (),
    inner=(
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
)
FORMATS: dict[ToolCallParser, Format] = {
    each.name: each
    for each in (
        LLAMA3_JSON,
        PYTHONIC,
        HERMES,
        QWEN_XML,
        MISTRAL_V7,
        MISTRAL_V11,
        PHI4_MINI,
        GEMMA3,
        HARMONY,
    )
}
