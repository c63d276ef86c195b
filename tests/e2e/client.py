"""Run inside the cluster's network: the unchanged openai client against a Service."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))

from waiting import limit


def main(url: str, model: str) -> None:
    client: Any = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=limit(60)
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(
        model=model, messages=question, max_tokens=24, temperature=0, logprobs=True, top_logprobs=2
    )
    pieces = client.chat.completions.create(
        model=model, messages=question, max_tokens=24, temperature=0, stream=True
    )
    streamed = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    prompts = client.completions.create(
        model=model, prompt=["The capital of France is", "1 2 3 4"], max_tokens=4, temperature=0
    )
    echo = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=0, echo=True, logprobs=1
    )
    try:
        client.completions.create(model=model, prompt="x", max_tokens=-1)
        refused = ""
    except openai.BadRequestError as error:
        refused = str(error)
    scored = echo.choices[0].logprobs
    print(
        json.dumps(
            {
                "models": [m.id for m in client.models.list()],
                "chat": chat.choices[0].message.content,
                "logprobs": len(chat.choices[0].logprobs.content),
                "streamed": streamed,
                "completions": [c.text for c in prompts.choices],
                "echo": echo.choices[0].text,
                "scored": scored.token_logprobs,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
