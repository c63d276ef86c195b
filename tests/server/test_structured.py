"""Answers of a real server over a random model, which would write anything: what they must look
like they do, to the end or to where they are cut."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from servers import Server, serving
from tokenizers import AddedToken, Tokenizer
from waiting import limit

from kvline_contract.launch import EngineOptions

pytestmark = pytest.mark.process
Fields = dict[str, Any]
# In Hermes' form, with reasoning that a request may turn on and off.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if tools %}<tool_call> arguments{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is true %}<think>\n{% elif enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SCHEMA: Fields = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["a", "b", None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "list"],
    "additionalProperties": False,
}
JSON: Fields = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
OFF: Fields = {"chat_template_kwargs": {"enable_thinking": False}}
F: Fields = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
G: Fields = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(each) for each in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engine = EngineOptions(max_model_len=512, max_running_requests=4)
    with serving(Server(model, tmp_path_factory.mktemp("server"), engine)) as made:
        yield made
        made.rests()


def answers(server: Server, route: str = "chat/completions", **fields: Any) -> list[Fields]:
    """The choices of a request."""
    prompt: Fields = {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "tiny", **(prompt if "chat" in route else {"prompt": "hi"}), **fields}
    answer = server.client.post(f"{server.url}/v1/{route}", json=body, timeout=limit(60))
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"])


def test_every_choice_follows_the_schema(server: Server) -> None:
    made = answers(server, response_format=JSON, n=4, seed=1, logprobs=True, **OFF)
    for choice in made:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["logprobs"]["content"]
    assert len({choice["message"]["content"] for choice in made}) > 1


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-9]{3}-[a-f]+?x"}, "[0-9]{3}-[a-f]+x"),
        ({"grammar": 'start: "a" ("b" | "c")~3'}, "a[bc]{3}"),
        ({"json": {"enum": [1, "x"]}}, '1|"x"'),
    ],
)
@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 1, "logit_bias": {"5": 50}}])
def test_other_forms_are_kept_with_every_option(
    server: Server, fields: Fields, form: str, penalties: Fields
) -> None:
    for choice in answers(
        server, "completions", structured_outputs=fields, max_tokens=99, n=3, **penalties
    ):
        assert re.fullmatch(form, choice["text"]) and choice["finish_reason"] == "stop"


def test_a_cut_answer_is_the_beginning_of_a_valid_one(server: Server) -> None:
    regex = {"regex": "(ab){20}"}
    [choice] = answers(server, "completions", structured_outputs=regex, max_tokens=5)
    assert (choice["text"], choice["finish_reason"]) == ("ababa", "length")


def test_a_stream_follows_its_schema(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    body |= {"response_format": JSON, **OFF}
    url, text, finish = f"{server.url}/v1/chat/completions", "", []
    with server.client.stream("POST", url, json=body, timeout=limit(60)) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
                finish.append(choice["finish_reason"])
    jsonschema.validate(json.loads(text), SCHEMA)
    assert finish[-1] == "stop"


def calls(choice: Fields) -> list[tuple[str, Any]]:
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in made]


def test_calls_that_are_demanded_are_valid(server: Server) -> None:
    asked: Fields = {"tools": [F], "tool_choice": "required", "parallel_tool_calls": False, **OFF}
    named = {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [G, F]}
    for fields in (asked, asked | named):
        for choice in answers(server, n=4, seed=2, **fields):
            [(name, arguments)] = calls(choice)
            assert name == "f"
            jsonschema.validate(arguments, SCHEMA)


def test_strict_tools_are_called_with_what_is_valid_or_not_at_all(server: Server) -> None:
    """The mark of a call is made likely: without that a random model would hardly begin one."""
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    tokens = server.client.post(
        f"{server.url}/tokenize", json={"prompt": "<tool_call>", "model": "tiny"}
    ).json()["tokens"]
    bias = {str(token): 100 for token in tokens}
    fields: Fields = {"tools": [strict], "parallel_tool_calls": False, "logit_bias": bias, **OFF}
    for choice in answers(server, n=4, seed=3, max_tokens=300, **fields):
        for call in choice["message"].get("tool_calls") or []:
            assert call["function"]["name"] == "f"
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert choice["message"].get("tool_calls")


def test_an_answer_follows_its_schema_behind_reasoning(server: Server) -> None:
    """Which a budget ends, within a character as a rule."""
    on: Fields = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 20}
    for choice in answers(server, response_format=JSON, n=4, seed=4, **on):
        assert choice["finish_reason"] == "stop" and choice["message"]["reasoning_content"]
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_what_is_refused_leaves_the_server_as_it_was(server: Server) -> None:
    many = {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}
    for schema in (many, {"type": "array", "uniqueItems": True}):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {"model": "tiny", "prompt": "hi", "response_format": form, "stream": True}
        answer = server.client.post(f"{server.url}/v1/completions", json=body, timeout=limit(20))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
    assert answers(server, "completions", max_tokens=2)
