"""Chats with pictures, and the files that a tiny model with a tower needs for them."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from image_files import saved
from PIL import Image
from tokenizers import AddedToken, Tokenizer

Part = dict[str, Any]
PAD = "<|image_pad|>"
SIDE = 8  # pixels of a token's side
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|start|><|image_pad|><|end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write(source: Path, folder: Path) -> Path:
    """A copy of a model with a tower and a tokenizer, as one that takes images."""
    shutil.copytree(source, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(PAD, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    config = json.loads((folder / "config.json").read_text())
    config["image_token_id"] = tokenizer.token_to_id(PAD)
    (folder / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": config["vision_config"].get("temporal_patch_size", 2),
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": 64 * 64},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def part(image: Image.Image | bytes, kind: str = "PNG", **more: Any) -> dict[str, Any]:
    """A picture, or a file, as a part of a message."""
    data = image if isinstance(image, bytes) else saved(image, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    user = {"role": "user", "content": list(parts)}
    usual = {"model": "tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return {**usual, "messages": [{"role": "system", "content": "See."}, user], **fields}


def as_input(given: Part) -> Part:
    """A part of a chat's message as one of /v1/responses."""
    if given["type"] == "text":
        return {"type": "input_text", "text": given["text"]}
    url, detail = given["image_url"]["url"], given["image_url"].get("detail", "auto")
    return {"type": "input_image", "image_url": url, "detail": detail}


def as_block(given: Part) -> Part:
    """Likewise of /v1/messages."""
    if given["type"] == "text":
        return given
    head, _, data = given["image_url"]["url"].partition(",")
    kind = head.removeprefix("data:").removesuffix(";base64")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def responses(*parts: Part, result: list[Part] | None = None, **more: Any) -> tuple[str, Part]:
    """-> the path and the body of what `chat` asks, with a tool's result before it"""
    items: list[Part] = []
    if result is not None:
        output = list(map(as_input, result))
        items.append({"type": "function_call_output", "call_id": "c1", "output": output})
    items.append({"role": "user", "content": list(map(as_input, parts))})
    usual = {"model": "tiny", "max_output_tokens": 4, "temperature": 0, "instructions": "See."}
    return "/v1/responses", {**usual, "input": items, **more}


def messages(*parts: Part, result: list[Part] | None = None, **more: Any) -> tuple[str, Part]:
    blocks = list(map(as_block, parts))
    if result is not None:
        content = list(map(as_block, result))
        blocks.insert(0, {"type": "tool_result", "tool_use_id": "c1", "content": content})
    usual = {"model": "tiny", "max_tokens": 4, "temperature": 0, "system": "See."}
    return "/v1/messages", {**usual, "messages": [{"role": "user", "content": blocks}], **more}
