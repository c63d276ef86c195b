"""Conversations, templates, and transformers' rendering of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvline_server.http.chat_tokens import Asked, ChatTokens
from kvline_server.http.template_files import read_chat_files
from kvline_server.http.tokens import Tokens

SECONDS = 0.2  # of CPU time
Make = Callable[..., ChatTokens]
EACH = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be kind.\n"},
    {"role": "user", "content": "  Héllo <b> & 'you' \"there\" \U0001f600 "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi\u2028"},
    {"role": "user", "content": "bye"},
]
DOCUMENTS = [{"title": "A", "text": "first", "n": [1, 2.5, None, True]}]


def write(
    folder: Path,
    tokenizer: Tokenizer,
    template: Any,
    *added: AddedToken,
    settings: dict[str, Any] | None = None,
) -> ChatTokens:
    """Chat over a tokenizer, with a template and more added tokens."""
    folder.mkdir()
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "chat_template": template,
        "bos_token": "<|start|>",
        "eos_token": {"content": "<|end|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | (settings or {})))
    return ChatTokens(Tokens(folder), read_chat_files(folder), 1, SECONDS)


def theirs(template: str, messages: list[dict[str, Any]], asked: Asked, **special: Any) -> str:
    """transformers' rendering."""
    from transformers.utils import chat_template_utils  # takes a second

    made: Any = chat_template_utils.render_jinja_template(
        conversations=[messages],
        documents=None if asked.documents is None else list(asked.documents),
        tools=list(asked.tools) or None,
        chat_template=template,
        continue_final_message=asked.continue_final_message,
        add_generation_prompt=asked.add_generation_prompt,
        **{**special, **asked.variables},
    )
    return str(made[0][0])


def encode(
    chat: ChatTokens,
    messages: list[dict[str, Any]],
    most: int = 1 << 30,
    asked: Asked | None = None,
) -> list[int]:
    return chat.tokenise(chat.render(messages, asked or Asked()), most)


def text_of(chat: ChatTokens, messages: list[dict[str, Any]], asked: Asked | None = None) -> str:
    return chat._tokens.decode(encode(chat, messages, asked=asked))


def controls(chat: ChatTokens, ids: list[int]) -> list[str]:
    """The added tokens among them."""
    added = chat._tokens.tokenizer.get_added_tokens_decoder()
    return [added[id].content for id in ids if id in added]
