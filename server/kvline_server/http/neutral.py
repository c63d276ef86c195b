"""Unsupported request fields, and their values that have no effect.

Client libraries send many fields at their defaults. A null, or a value from these tables, changes
no answer, so it is removed before validation; any other value is rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvline_server.http.validation import UnsupportedValue

Neutral = Mapping[str, tuple[Any, ...]]

EVERY: Neutral = {
    "bad_words": ([],),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
}
COMPLETION: Neutral = {
    **EVERY,
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "suffix": ("",),
}
CHAT: Neutral = {
    **EVERY,
    "add_special_tokens": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
RESPONSES: Neutral = {
    "background": (False,),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
ANTHROPIC: Neutral = {
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
TOKENIZE_CHAT: Neutral = {"add_special_tokens": (False,)}
MESSAGE: Neutral = {
    "annotations": ([],),
    "provider_specific_fields": ({}, {"refusal": None}),  # LiteLLM's
}
TOOL_CALL: Neutral = {"provider_specific_fields": ({},)}
# Of OpenAI's API, with no value that asks for nothing.
UNSERVED = {"audio", "container", "prediction", "web_search_options"}
STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,)}


def without(value: dict[str, Any], neutral: Neutral) -> dict[str, Any]:
    """`value` without nulls and neutral fields. Raises UnsupportedValue for any other value of a
    field in `neutral`, and for one in UNSERVED."""
    kept = {}
    for name, item in value.items():
        if item is None:
            continue
        if name in UNSERVED:
            raise UnsupportedValue(f"{name}: is not supported here; leave it out")
        if name not in neutral:
            kept[name] = item
        elif not any(_same(item, taken) for taken in neutral[name]):
            taken = " or ".join(json.dumps(v) for v in neutral[name])
            raise UnsupportedValue(f"{name}: is not supported here; leave it out, or send {taken}")
    return kept


def _same(one: Any, other: Any) -> bool:
    """Equality as in JSON: true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
