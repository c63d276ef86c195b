"""Which format a model has, from what its chat template writes."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum

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

_COMMENT = re.compile(r"\{#.*?#\}", re.S)
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.S)
_TOOLS = re.compile(r"\btools\b")
# A list of calls as prompts describe it, and as templates write it.
_PYTHON_LIST = re.compile(r"\[\s*\w+\(\w+\s*=|format\(?.*\bfunc_name1\(|\[func(tion)?_name")
_NAME_AND_PARAMETERS = re.compile(r'\\?"name\\?": .{0,80}?\\?"parameters\\?":', re.S)
_IN_WORDS = re.compile(r'in the (following )?(JSON )?format:?\s*`?\{\s*\\?"name')
_MARK = re.compile(r"<\|[^|<>]+\|>")
_LLAMA = ("<|start_header_id|>", "<|header_start|>", "<|python_tag|>")
# Those of families that no parser here knows, which also write marks that one does.
_OTHERS = (
    "<arg_key>",
    "<start_function_call>",
    "<|tool_call>",
    "<function_calls>",
    "<seed:tool_call>",
    "<minimax:tool_call>",
    "<|tool_calls_section_begin|>",
    "\uff5ctool\u2581call",
    "\uff5cDSML\uff5c",
    "<|tool_call_start|>",
    "<TOOLCALL>",
    "<tool_calls>",
    "<|START_ACTION|>",
)


class NoFormat(StrEnum):
    """Why a model takes no tools here."""

    TAKES_NONE = "this model's chat template takes no tools"
    UNKNOWN = (
        "this model's chat template writes tool calls in a format that no parser here knows; "
        "spec.engine.toolCallParser names one"
    )


def detect(template: str, added: Collection[str]) -> Format | NoFormat:
    """`added`: the texts of the tokenizer's added tokens."""
    text = _COMMENT.sub("", template)
    if not any(_TOOLS.search(code) for code in _CODE.findall(text)):
        return NoFormat.TAKES_NONE
    if any(mark in text for mark in _OTHERS):
        return NoFormat.UNKNOWN
    if "<|channel|>" in text and "<|message|>" in text:
        return HARMONY
    if "<function=" in text and "<parameter=" in text:
        return QWEN_XML
    if "<tool_call>" in text:
        return HERMES if "arguments" in text else NoFormat.UNKNOWN
    if "[TOOL_CALLS]" in text:
        return MISTRAL_V11 if "[ARGS]" in text else MISTRAL_V7
    if {"<|tool_call|>", "<|/tool_call|>"} <= {*added, *_MARK.findall(text)}:
        return PHI4_MINI
    if "functools[" in text:
        return PHI4_MINI
    return _prompted(text)


def _prompted(text: str) -> Format | NoFormat:
    """Formats without marks of their own, which the template describes in words."""
    in_python = _PYTHON_LIST.search(text) is not None
    in_json = _NAME_AND_PARAMETERS.search(text) is not None
    if "<start_of_turn>" in text and (in_python or in_json):
        return GEMMA3
    if in_python:
        return PYTHONIC
    # Others write the tools themselves so, and calls in some other way.
    of_llama = any(mark in text for mark in _LLAMA) or _IN_WORDS.search(text) is not None
    return LLAMA3_JSON if in_json and of_llama else NoFormat.UNKNOWN


def detect_thinking(template: str, added: Collection[str]) -> Thinking | None:
    """None where the model writes no marks around its reasoning; harmony has channels instead."""
    for thinking in (BRACKETS, THINK):
        if thinking.close in template or {thinking.open, thinking.close} <= set(added):
            return thinking
    return None


def in_reasoning(thinking: Thinking | None, prompt: str, continued: str = "") -> bool:
    """Whether an answer to the rendered `prompt` begins within reasoning; `continued`: what the
    prompt already has of that answer."""
    if thinking is None:
        return False
    if continued:
        return continued.rfind(thinking.open) > continued.rfind(thinking.close)
    return prompt.rstrip().endswith(thinking.open)
