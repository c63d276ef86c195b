"""Instructor, by the call of a named tool, by a schema, and by JSON alone."""

from __future__ import annotations

from typing import Any, Literal

import asked
import instructor
import openai
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # as else the model may add to it without end
    city: Literal["Paris", "Rome"]


def ask(mode: Any, prompt: str, key: str = asked.KEY) -> Any:
    client = openai.OpenAI(base_url=asked.V1, api_key=key, max_retries=0)
    made: Any = instructor.from_openai(client, mode=mode)
    given: Any = {"messages": asked.user(prompt), "max_retries": 0}
    return made.chat.completions.create(model=asked.MODEL, response_model=City, **given)


def failing(prompt: str, key: str = asked.KEY) -> object:
    """Its error has the client's behind it."""

    def call() -> object:
        try:
            return ask(instructor.Mode.TOOLS, prompt, key)
        except Exception as error:
            found: BaseException = error
            while not isinstance(found, openai.APIStatusError) and found.__cause__:
                found = found.__cause__
            raise found from None

    return asked.failure(call)


asked.answer(
    {
        "named": lambda: ask(instructor.Mode.TOOLS, asked.FREE).model_dump(),
        "schema": lambda: ask(instructor.Mode.JSON_SCHEMA, asked.FREE).model_dump(),
        "json_object": lambda: ask(instructor.Mode.JSON, asked.OBJECT).model_dump(),
        "too_long": lambda: failing(asked.TOO_LONG),
        "wrong_key": lambda: failing(asked.TEXT, "wrong"),
        "full": lambda: failing(asked.TEXT),
    }
)
