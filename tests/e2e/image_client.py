"""Run inside the cluster's network: the unchanged openai client sends pictures to a Service."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))

from waiting import limit


def main(url: str, model: str, *files: str) -> None:
    client: Any = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=limit(60)
    )
    answers = [ask(client, model, data_url(file)) for file in files]
    try:
        refused = str(ask(client, model, "https://example.com/picture.png"))
    except openai.BadRequestError as error:
        refused = str(error)
    print(json.dumps({"answers": answers, "refused": refused}))


def data_url(file: str) -> str:
    return "data:image/png;base64," + base64.b64encode(Path(file).read_bytes()).decode()


def ask(client: Any, model: str, url: str) -> dict[str, Any]:
    text = {"type": "text", "text": "What is this?"}
    content = [{"type": "image_url", "image_url": {"url": url}}, text]
    made = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    (choice,) = made.choices
    return {
        "tokens": [each.token for each in choice.logprobs.content],
        "logprobs": [each.logprob for each in choice.logprobs.content],
        "usage": made.usage.model_dump(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
