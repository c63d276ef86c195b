"""What a refused request's error says: the field, what is taken, and OpenAI's `code` and `param`.
Clients branch on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvline_server.http.body import parse_object
from kvline_server.http.chat import Chat
from kvline_server.http.chat_tokens import ChatTokens
from kvline_server.http.completions import Completion
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.errors import BadRequest, NotAllowed, TooMany, UnsupportedType
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.template_files import read_chat_files
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
CACHED = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
CONTEXT = 256


def refused(body: dict[str, Any]) -> BadRequest:
    kind: type[GenerationRequest] = ChatRequest if "messages" in body else CompletionRequest
    with pytest.raises(BadRequest) as caught:
        parse(kind, body)
    return caught.value


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"unheard_of": 1}, "unheard_of", "unknown_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_value"),
        ({"prediction": {}}, "prediction", "unsupported_value"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"n": "1"}, "n", "invalid_type"),
        ({"n": 9}, "n", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"top_p": 0}, "top_p", "decimal_below_min_value"),
        ({"user": "x" * 513}, "user", "string_above_max_length"),
        ({"stop": [""]}, "stop[0]", "string_below_min_length"),
        ({"stop": ["x"] * 17}, "stop", "array_above_max_length"),
        ({"stop": ["x", 5]}, "stop[1]", "invalid_type"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "object_above_max_prop"),
        ({"prompt_logprobs_format": "x"}, "prompt_logprobs_format", "invalid_value"),
        ({"stream_options": {"other": True}}, "stream_options.other", "unknown_parameter"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_field_has_openai_s_code(change: dict[str, Any], param: str, code: str) -> None:
    error = refused({**COMPLETION, **change})
    assert error.param == param
    assert error.code is not None and error.code.startswith(code)


def test_nested_fields_are_named_as_openai_does() -> None:
    error = refused({**CHAT, "messages": [{"role": "user", "content": "a"}, {"role": "robot"}]})
    assert (error.param, error.code) == ("messages[1].role", "invalid_value")
    error = refused({**CHAT, "messages": [{"role": "function", "content": "4", "name": "f"}]})
    assert error.code == "unsupported_value" and "send a tool's result as tool" in error.message
    assert error.param == "messages[0].role"
    error = refused({**CHAT, "messages": []})
    assert (error.param, error.code) == ("messages", "empty_array")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "refusal", "refusal": "no"},
    ],
    ids=lambda part: str(part["type"]),
)
def test_a_part_that_is_not_text_is_named_with_its_place(part: dict[str, Any]) -> None:
    """It was refused as content that should be a string, which a list of text parts is not."""
    content = [{"type": "text", "text": "Hi"}, part]
    error = refused({**CHAT, "messages": [{"role": "user", "content": content}]})
    assert error.param == "messages[0].content[1].type"
    taken = "only text and image_url parts are taken"
    assert error.message == f"{error.param}: {part['type']} is not supported here; {taken}"
    assert error.code == "unsupported_value"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (5, "must be a string or a list"),
        ([5], "[0]: must be an object"),
        ([{"type": "text"}], "[0].text: is required"),
        ([{"type": "text", "text": 5}], "[0].text: must be a string"),
        ([{"type": "\x00" * 900, "text": "a"}], "this kind of part is not supported"),
        ([], "must not be empty"),
    ],
)
def test_the_error_is_of_the_type_that_was_meant(content: Any, says: str) -> None:
    """A union's error is not that of its first type, whatever was sent."""
    error = refused({**CHAT, "messages": [{"role": "user", "content": content}]})
    assert error.message.startswith("messages[0].content") and says in error.message


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "the body is empty", None),
        (b" \n", "the body is empty", None),
        (b'{"model":\n  x}', "the body is not valid JSON: Expecting value, line 2, column 3", None),
        (b'{"n": ' + b"[" * 30_000, "the body has lists and objects too deep in each other", None),
        (b'{"n": ' + b"1" * 5000 + b"}", "the body has an integer of too many digits", None),
        (b"[1e400]", "the body must be a JSON object", None),
        (b'{"n": 1, "top_p": 1e400}', "top_p: the number 1e400 is out of range", "top_p"),
        (b'{"a": [{"b": -1e999}]}', "a: the number -1e999 is out of range", "a"),
        (b'{"\xff": 1}', "the body is not valid UTF-8 text", None),
        (
            b'{"n": 1, "messages": [{"content": "\\ud800"}]}',
            "messages: '\\ud800' is half of a surrogate pair, which no text may have",
            "messages",
        ),
        (b'{"\\udc00": 1, "\\udc00": 1}', "the key '\\udc00' stands twice", None),
        (
            b'{"a\\udc00": "b"}',
            "the body: '\\udc00' is half of a surrogate pair, which no text may have",
            None,
        ),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_a_body_that_cannot_be_read_says_what_is_wrong_and_where(
    body: bytes, message: str, param: str | None
) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_object(body)
    assert (caught.value.message, caught.value.param) == (message, param)


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_a_stop_text_without_a_tokenizer_is_refused(stop: Any) -> None:
    """No answer has a text that it could be found in."""
    limits = RequestLimits("tiny", 307, CONTEXT, 20, max_prompt_tokens=CONTEXT)
    generator = Generator(EngineClient(9), None, Traces(None))
    bodies: tuple[dict[str, Any], ...] = ({"stop": stop}, {"stop": []}, {})
    for body in bodies:
        request = parse(CompletionRequest, {**COMPLETION, "prompt": [1], **body})
        work = Completion("id", request, generator, limits, 0.0)
        if not request.stop:
            assert work.plan()
            continue
        with pytest.raises(BadRequest, match="stop: no tokenizer is loaded") as caught:
            work.plan()
        assert caught.value.param == "stop"


def test_as_many_stop_texts_as_evaluation_harnesses_send_are_taken() -> None:
    sixteen = [f"stop {i}" for i in range(16)]
    assert parse(CompletionRequest, {**COMPLETION, "stop": sixteen}).stops() == sixteen
    assert "more than 16 items" in refused({**COMPLETION, "stop": [*sixteen, "x"]}).message


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completions", "chat"])
def test_both_names_of_the_length_are_taken_on_both_routes(body: dict[str, Any]) -> None:
    kind: type[GenerationRequest] = ChatRequest if "messages" in body else CompletionRequest
    both = {"max_tokens": 3, "max_completion_tokens": 3}
    for given in ({"max_completion_tokens": 3}, {"max_tokens": 3}, both):
        assert parse(kind, {**body, **given}).most() == 3
    assert refused({**body, **both, "max_completion_tokens": 4}).param == "max_tokens"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"max_tokens": 8.0, "n": 2.0, "top_k": 40.0}, {"max_tokens": 8, "n": 2, "top_k": 40}),
        ({"seed": -1}, {}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"seed": -(2**63)}, {"seed": 0}),
        ({"stop": ""}, {}),
        ({"messages": [{"role": "user", "content": [CACHED]}]}, {}),
    ],
)
def test_other_spellings_of_a_request_mean_the_same(
    change: dict[str, Any], same: dict[str, Any]
) -> None:
    made, plain = (parse(ChatRequest, {**CHAT, **fields}) for fields in (change, same))
    assert made.messages[0].text() == plain.messages[0].text()
    left_out = {"messages"}
    assert made.model_dump(exclude=left_out) == plain.model_dump(exclude=left_out)
    assert all(isinstance(each, int) for each in (made.n, made.top_k, made.most() or 0))


LABELS: dict[str, Any] = {
    "user": "a",
    "safety_identifier": "a",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "store": True,
    "metadata": {"a": "b"},
    "client_metadata": {"turn": "{}" * 500},
    "stream_options": {"include_usage": True},  # without stream
}


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completions", "chat"])
def test_labels_are_taken(body: dict[str, Any]) -> None:
    kind: type[GenerationRequest] = ChatRequest if "messages" in body else CompletionRequest
    made, plain = parse(kind, {**body, **LABELS}), parse(kind, body)
    left_out = set(LABELS)
    assert made.model_dump(exclude=left_out) == plain.model_dump(exclude=left_out)


@pytest.mark.parametrize(
    ("change", "prompt", "most"),
    [
        ({}, "x" * 6, 16),
        ({"max_tokens": 32_000}, "x" * 6, CONTEXT - 6),
        ({"max_completion_tokens": 2**53}, "x" * (CONTEXT - 1), 1),
        ({}, "x" * (CONTEXT - 3), 3),
        ({"min_tokens": 17, "ignore_eos": True}, "x" * 6, 17),
        ({"max_tokens": 0, "echo": True}, "x" * CONTEXT, 0),
    ],
)
def test_a_completion_has_at_most_what_the_context_leaves(
    tiny_model: Path, change: dict[str, Any], prompt: str, most: int
) -> None:
    limits = RequestLimits("tiny", 307, CONTEXT, 20, CONTEXT, default_max_tokens=5)
    generator = Generator(EngineClient(9), Tokens(tiny_model), Traces(None))
    request = parse(CompletionRequest, {**COMPLETION, "prompt": prompt, **change})
    [(_, params)] = Completion("id", request, generator, limits, 0.0).plan()
    assert params.max_tokens == most


@pytest.mark.parametrize(
    ("change", "default", "most"),
    [
        ({}, None, 999),
        ({}, 5, 5),
        ({}, 10_000, 999),
        ({"max_tokens": 32_000}, 5, 999),
        ({"min_tokens": 9, "ignore_eos": True}, 5, 9),
        ({"min_tokens": 3, "ignore_eos": True}, 5, 5),
    ],
)
def test_a_chat_without_a_number_has_the_service_s_or_what_the_context_leaves(
    tiny_model: Path, change: dict[str, Any], default: int | None, most: int
) -> None:
    """999 stands for what the prompt leaves."""
    tokens = Tokens(tiny_model)
    chat = ChatTokens(tokens, read_chat_files(tiny_model))
    limits = RequestLimits("tiny", 307, CONTEXT, 20, CONTEXT, default_max_tokens=default)
    generator = Generator(EngineClient(9), tokens, Traces(None), chat)
    request = parse(ChatRequest, {**CHAT, **change})
    [(ids, params)] = Chat("id", request, generator, limits, 0.0).plan()
    assert params.max_tokens == (CONTEXT - len(ids) if most == 999 else most)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": "x" * CONTEXT}, "prompt"),
        ({"prompt": "x" * CONTEXT, "max_tokens": 1}, "prompt"),
        ({"prompt": "x" * 1000}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": [5] * 1000}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ],
)
def test_what_exceeds_the_context_has_one_code_however_long_it_is(
    tiny_model: Path, change: dict[str, Any], param: str
) -> None:
    """Agents shorten their history on it. The longest prompts, of which only the bytes are counted,
    had none."""
    limits = RequestLimits("tiny", 307, CONTEXT, 20, max_prompt_tokens=100_000)
    tokens = Tokens(tiny_model, max_text=10_000)
    chat = ChatTokens(tokens, read_chat_files(tiny_model))
    generator = Generator(EngineClient(9), tokens, Traces(None), chat)
    work: Chat | Completion
    if "messages" in change:
        work = Chat("id", parse(ChatRequest, {**CHAT, **change}), generator, limits, 0.0)
    else:
        request = parse(CompletionRequest, {**COMPLETION, **change})
        work = Completion("id", request, generator, limits, 0.0)
    with pytest.raises(BadRequest) as caught:
        work.plan()
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_other_refusals_have_their_codes() -> None:
    assert TooMany("x").code == "rate_limit_exceeded"
    assert NotAllowed("x").code == "method_not_supported"
    assert UnsupportedType("x").code == "unsupported_content_type"


def test_the_message_of_a_long_prompt_has_the_words_that_clients_search_for() -> None:
    """Some see no code: LangChain reads the text of OpenAI's error, which no longer has it."""
    error = BadRequest("prompt: 9 tokens, the context is 8", "prompt", "context_length_exceeded")
    assert error.body()["error"] == {
        "message": "prompt is too long: prompt: 9 tokens, the context is 8",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
