"""What a request demands of its answer is compiled before the engine gets it, and kept until its
last sequence has ended: real processes of grammars, the routes, and an engine at command."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from grammar_kit import CALL, END, SIZE, Grammars, allowed, byte_level, write_model
from scripted import Scripted
from tokenizers import AddedToken, Tokenizer
from waiting import limit

from kvline_server.formats.grammar import each_alone
from kvline_server.grammars.compiler import Compiler, NotNow
from kvline_server.grammars.messages import Wanted
from kvline_server.http import guarantee
from kvline_server.options.grammars import MIB, GrammarBounds

pytestmark = pytest.mark.process
T = TypeVar("T")
Fields = dict[str, Any]
# In Hermes' form, with reasoning that a request may turn on and off.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if tools %}<tool_call> {{ tools | tojson }} arguments{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is true %}<think>\n{% elif enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SCHEMA: Fields = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON: Fields = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ODD: Fields = {"type": "object", "properties": {"l": {"type": "array", "uniqueItems": True}}}
LONG: Fields = {"type": "object", "description": "x" * 270_000}
CHAT: Fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: Fields = {"model": "tiny", "prompt": "hi"}
RESPONSES: Fields = {"model": "tiny", "input": "hi"}
MESSAGES: Fields = {"model": "tiny", "max_tokens": 99, "messages": CHAT["messages"]}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
CHATS, COMPLETIONS, ANSWERS, CLAUDE = ROUTES


def tokenizer() -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("<think>"), AddedToken("</tool_call>")])
    return made


def written(folder: Path, template: str = TEMPLATE) -> Path:
    write_model(folder, tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("guaranteed") / "model")


@pytest.fixture(scope="module")
def grammars(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    made = Grammars(model, tmp_path_factory.mktemp("grammars"))
    yield made
    made.stop()


@asynccontextmanager
async def served(model: Path, path: str | None) -> AsyncIterator[Scripted]:
    compiler = None if path is None else Compiler(path, limit(20))
    async with Scripted(model, vocabulary=SIZE, compiler=compiler).open() as made:
        yield made
    if compiler is not None:
        await compiler.close()


def run(model: Path, path: str | None, work: Callable[[Scripted], Awaitable[T]]) -> T:
    async def main() -> T:
        async with served(model, path) as made:
            return await work(made)

    return asyncio.run(main())


def tool(name: str = "f", schema: Fields = SCHEMA, **more: Any) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def named(name: str) -> Fields:
    return {"type": "function", "function": {"name": name}}


def takes(grammars: Grammars, key: bytes, text: str) -> bool:
    """Whether the grammar allows each token of the text, and its end behind it."""
    made, known = grammars.matchers(), tokenizer()
    made.begin(1, key)
    end, new = known.get_vocab()[END], list[int]()
    try:
        for token in known.encode(text).ids:
            made.ask([Wanted(1, new, [], 0)])
            assert not made.wait().failed
            if token not in allowed(made.table[0], SIZE):
                return False
            new = [token]
        made.ask([Wanted(1, new, [], 0)])
        assert not made.wait().failed
        return end in allowed(made.table[0], SIZE)
    finally:
        made.close()


VALID = '{"a": 1}'
HERMES = f'{CALL}\n{{"name": "f", "arguments": {VALID}}}\n</tool_call>'
THOUGHT = "<think>hm {\n</think>\n\n"
REST = "hm {\n</think>\n\n"
KINDS: list[tuple[str, Fields, list[str], list[str]]] = [
    (COMPLETIONS, {"response_format": JSON}, [VALID], ["{}", "no", THOUGHT + VALID]),
    (COMPLETIONS, {"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"], ["maybe"]),
    (COMPLETIONS, {"structured_outputs": {"regex": "[0-9]{3}"}}, ["123"], ["12"]),
    (COMPLETIONS, {"structured_outputs": {"grammar": 'root ::= "a" "b"'}}, ["ab"], ["a"]),
    (CHATS, {"response_format": JSON}, [VALID, THOUGHT + VALID], ["{}", REST + VALID, "<think>"]),
    (
        CHATS,
        {"structured_outputs": {"grammar": 'root ::= "a" "b"'}},
        ["ab", f"{THOUGHT}ab"],
        ["a", "\n\nab"],
    ),
    (
        CHATS,
        {"response_format": JSON, "chat_template_kwargs": {"enable_thinking": True}},
        [REST + VALID, f"</think>{VALID}"],
        [VALID, THOUGHT + VALID, f"hm{HERMES}</think>{VALID}", "hm"],
    ),
    (
        CHATS,
        {"response_format": JSON, "reasoning_effort": "none"},
        [VALID],
        [THOUGHT + VALID, REST + VALID],
    ),
    (
        CHATS,
        {"tools": [tool()], "tool_choice": "required"},
        [HERMES, THOUGHT + HERMES, f"{HERMES}\n{HERMES}"],
        ["no", VALID, HERMES.replace("1", "3")],
    ),
    (
        CHATS,
        {"tools": [tool(), tool("g")], "tool_choice": named("f"), "parallel_tool_calls": False},
        [HERMES],
        [HERMES.replace('"f"', '"g"'), f"{HERMES}\n{HERMES}"],
    ),
    (
        CHATS,
        {"tools": [tool(strict=True)], "chat_template_kwargs": {"enable_thinking": True}},
        [f"{REST}{HERMES}"],
        [f"hm{HERMES}", f"{REST}{HERMES.replace('1', '3')}"],
    ),
    (
        CHATS,
        {"tools": [tool(), tool("g", strict=True)], "response_format": JSON},
        [VALID, THOUGHT + VALID, HERMES.replace("1", "3"), THOUGHT + HERMES.replace('"f"', '"g"')],
        ["no", HERMES.replace('"f"', '"g"').replace("1", "3"), f"{HERMES}{VALID}"],
    ),
    (ANSWERS, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
     [VALID, THOUGHT + VALID], ["no"]),
    (CLAUDE, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, [VALID],
     ["no"]),
    (CLAUDE, {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
     [HERMES], [VALID]),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields", "valid", "invalid"), KINDS)
def test_the_engine_gets_a_grammar_that_takes_what_was_asked_for_and_nothing_else(
    model: Path,
    grammars: Grammars,
    route: str,
    fields: Fields,
    valid: list[str],
    invalid: list[str],
) -> None:
    async def work(made: Scripted) -> None:
        answering = asyncio.create_task(made.http.post(route, json={**ROUTES[route], **fields}))
        asked = await made.asked()
        key = asked.params.grammar
        assert key
        assert [text for text in valid if not takes(grammars, key, text)] == []
        assert [text for text in invalid if takes(grammars, key, text)] == []
        made.send(asked.id, [tokenizer().get_vocab()[END]])
        assert (await answering).status_code == 200

    run(model, grammars.path, work)


def test_every_choice_has_the_grammar_and_others_have_none(model: Path, grammars: Grammars) -> None:
    async def work(made: Scripted) -> None:
        body = {**CHAT, "n": 3, "response_format": JSON, "logit_bias": {"5": 1}, "logprobs": True}
        answering = asyncio.create_task(made.http.post(CHATS, json=body))
        several = [await made.asked()]
        made.send(several[0].id, [5], None)  # the others wait until its prompt is computed
        several += [await made.asked() for _ in range(2)]
        assert len({each.params.grammar for each in several}) == 1 and several[0].params.grammar
        plain: list[Fields] = [
            {"response_format": {"type": "text"}, "stop": "a"},
            {"tools": [tool()], "stop": "a"},  # may be called, and in any way
            {"tools": [tool(strict=True)], "tool_choice": "none"},
        ]
        for fields in plain:
            other = asyncio.create_task(made.http.post(CHATS, json={**CHAT, **fields}))
            asked = await made.asked()
            assert not asked.params.grammar
            made.send(asked.id, [5])
            assert (await other).status_code == 200
        answering.cancel()

    run(model, grammars.path, work)


FORM = "response_format.json_schema.schema"
DEEP: Fields = {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}
SLOW = {"type": "json_schema", "json_schema": {"name": "n", "schema": DEEP}}
REFUSED: list[tuple[str, Fields, str, str]] = [
    (CHATS, {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
     FORM, "a JSON schema"),
    (CHATS, {"response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": ODD}}}, FORM, "uniqueItems"),
    (COMPLETIONS, {"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "(?=a)"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar",
     "x"),
    (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "its JSON"),
    (CHATS, {"response_format": JSON, "structured_outputs": {"regex": "a"}},
     "structured_outputs", "one of the two"),
    (CHATS, {"response_format": {"type": "structural_tag", "format": {"type": "no"}}},
     "response_format.format.type", "expected one of"),
    # What takes too long only behind reasoning, or within a call.
    (CHATS, {"response_format": SLOW}, FORM, ""),
    (CHATS, {"response_format": SLOW, "chat_template_kwargs": {"enable_thinking": True}}, FORM, ""),
    (CHATS, {"tools": [tool("g", DEEP, strict=True)]}, "tools[0].function.parameters", "'g'"),
    (CHATS, {"response_format": JSON, "stop": ["a"]}, "stop", "is guaranteed"),
    (CHATS, {"response_format": JSON, "ignore_eos": True}, "ignore_eos", "is guaranteed"),
    (CHATS, {"response_format": JSON, "ignore_eos": True, "min_tokens": 3}, "min_tokens", "is gua"),
    (COMPLETIONS, {"response_format": JSON, "echo": True}, "echo", "is guaranteed"),
    (COMPLETIONS, {"response_format": JSON, "prompt_logprobs": 1, "max_tokens": 0}, "max_tokens",
     "is guaranteed"),
    (CHATS, {"tools": [tool(), tool("g", ODD)], "tool_choice": "required"},
     "tools[1].function.parameters", "'g' cannot be guaranteed: "),
    (CHATS, {"tools": [tool("g", ODD), tool(), tool("h", ODD, strict=True)]},
     "tools[2].function.parameters", "uniqueItems"),
    (CHATS, {"tools": [tool(), tool("g", LONG)], "tool_choice": "required"},
     "tools[1].function.parameters", "more than 262144 bytes of grammar"),
    (CHATS, {"tools": [tool("g", {"type": "array"})], "tool_choice": named("g")},
     "tools[0].function.parameters", "expected 'object'"),
    (CHATS, {"tools": [tool(strict=True)], "stop": "a"}, "stop", "is guaranteed"),
    (ANSWERS, {"text": {"format": {"type": "json_schema", "name": "n", "schema": ODD}}},
     "text.format.schema", "uniqueItems"),
    (ANSWERS, {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
     "text.format.name", "pattern"),
    (ANSWERS, {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "m", "tools": [
        {"type": "function", "name": "f", "parameters": ODD, "strict": True}]}]},
     "tools[1].tools[0].parameters", "uniqueItems"),
    (ANSWERS, {"tools": [{"type": "web_search"}, *[{"type": "function", "name": "f"}] * 2]},
     "tools[2].name", "another tool"),
    (ANSWERS, {"tools": [{"type": "function", "name": "f"}],
               "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "none of"),
    (ANSWERS, {"input": "x" * 100_000}, "input", "input: "),
    (CLAUDE, {"output_config": {"format": {"type": "json_schema", "schema": ODD}}},
     "output_config.format.schema", "uniqueItems"),
    (CLAUDE, {"tools": [{"type": "web_search_20250305", "name": "web_search"},
                        {"name": "f", "input_schema": ODD, "strict": True}]},
     "tools[1].input_schema", "uniqueItems"),
    (CLAUDE, {"tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}],
              "stop_sequences": ["a"]}, "stop_sequences", "is guaranteed"),
]  # fmt: skip


async def asked(made: Scripted, route: str, body: dict[str, Any]) -> httpx.Response:
    """Again where a grammar had too little of a busy machine to be tried."""
    end = time.monotonic() + limit(80)
    while True:
        answer = await made.http.post(route, json=body)
        if answer.status_code != 503 or time.monotonic() > end:
            return answer


def refused(route: str, answer: httpx.Response, param: str, words: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    message = error["message"].removeprefix("prompt is too long: ")
    assert message.startswith(f"{param}: ") and words in message
    if route != CLAUDE:
        assert error["param"] == param


def test_what_cannot_be_guaranteed_is_refused_by_the_client_s_field(
    model: Path, grammars: Grammars
) -> None:
    async def work(made: Scripted) -> None:
        for route, fields, param, words in REFUSED:
            answer = await asked(made, route, {**ROUTES[route], **fields})
            refused(route, answer, param, words)
        assert made.submitted.empty()

    run(model, grammars.path, work)


def test_the_loop_builds_no_grammar_of_a_tool_to_find_the_one_that_is_refused(
    model: Path, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def seen(*given: Any) -> Iterator[Any]:
        for each in each_alone(*given):
            threads.append(threading.get_ident())
            yield each

    async def work(made: Scripted) -> None:
        body = {**CHAT, "tools": [tool(), tool("g", ODD)], "tool_choice": "required"}
        answer = await made.http.post(CHATS, json=body)
        refused(CHATS, answer, "tools[1].function.parameters", "uniqueItems")
        assert len(threads) == 2 and threading.get_ident() not in threads

    monkeypatch.setattr(guarantee, "each_alone", seen)
    run(model, grammars.path, work)


def test_tools_need_a_format_that_is_known_and_has_a_mark_beside_a_form(
    grammars: Grammars, tmp_path: Path
) -> None:
    plain = written(tmp_path / "plain", TEMPLATE.replace("tools", "nothing"))
    llama = '{"name": function name, "parameters": dictionary} <|python_tag|>'
    bare = written(tmp_path / "bare", TEMPLATE.replace("<tool_call>", llama))

    async def work(made: Scripted) -> None:
        for fields in ({}, {"tool_choice": "required"}, {"tool_choice": "auto"}):
            body = {**CHAT, "tools": [tool()], **fields}
            refused(CHATS, await made.http.post(CHATS, json=body), "tools", "takes no tools")

    async def beside(made: Scripted) -> None:
        body = {**CHAT, "tools": [tool()], "response_format": JSON}
        answer = await made.http.post(CHATS, json=body)
        refused(CHATS, answer, "response_format.json_schema.schema", 'tool_choice "none"')

    run(plain, grammars.path, work)
    run(bare, grammars.path, beside)


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([tool("g", ODD, strict=True)], "tools[0].function.parameters", "'g' cannot be"),
        ([tool(), tool("g", ODD, strict=True)], "tools[1].function.strict", "uniqueItems"),
    ],
)
def test_the_only_tool_is_named_though_it_was_not_tried_alone(
    model: Path,
    grammars: Grammars,
    monkeypatch: pytest.MonkeyPatch,
    tools: list[Fields],
    param: str,
    words: str,
) -> None:
    async def busy(*_: object) -> None:
        raise NotNow("a busy machine")

    monkeypatch.setattr(guarantee, "_refused_tool", busy)

    async def work(made: Scripted) -> None:
        answer = await asked(made, CHATS, {**CHAT, "tools": tools})
        refused(CHATS, answer, param, words)

    run(model, grammars.path, work)


def test_without_processes_of_grammars_plain_requests_are_served(
    model: Path, tmp_path: Path
) -> None:
    body = {**CHAT, "response_format": JSON}

    async def none(made: Scripted) -> None:
        refused(CHATS, await made.http.post(CHATS, json=body), FORM, "no process")

    async def gone(made: Scripted) -> None:
        answer = await made.http.post(CHATS, json=body)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "connection" not in answer.headers
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("grammar_unavailable", FORM)
        plain = asyncio.create_task(made.http.post(CHATS, json=CHAT))
        made.send((await made.asked()).id, [5])
        assert (await plain).status_code == 200

    run(model, None, none)
    run(model, str(tmp_path / "no-socket"), gone)


def large(number: int) -> Fields:
    """Of 3 MiB, when it is compiled."""
    values = [f"{number}-{i:x}" * 6 for i in range(4000)]
    return {**COMPLETION, "structured_outputs": {"json": {"enum": values}}}


async def whole(made: Scripted, body: Fields) -> None:
    answering = asyncio.create_task(made.http.post(COMPLETIONS, json=body))
    made.send((await made.asked()).id, [5])
    assert (await answering).status_code == 200


async def streamed(made: Scripted, body: Fields) -> None:
    answering = asyncio.create_task(made.http.post(COMPLETIONS, json={**body, "stream": True}))
    made.send((await made.asked()).id, [5])
    answer = await answering
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")


async def failed(made: Scripted, body: Fields) -> None:
    answering = asyncio.create_task(made.http.post(COMPLETIONS, json=body))
    made.send((await made.asked()).id, [5], "error")
    assert (await answering).status_code == 500


async def aborted(made: Scripted, body: Fields) -> None:
    answering = asyncio.create_task(made.http.post(COMPLETIONS, json={**body, "stream": True}))
    await made.asked()
    answering.cancel()
    await asyncio.wait({answering})


def test_a_grammar_is_kept_while_its_request_is_answered_and_no_longer(
    model: Path, tmp_path: Path
) -> None:
    """There is room for a few: what one kept behind its end would be missed."""
    bounds = GrammarBounds(memory=28 * MIB, trial=16 * MIB, trials=1, threads=1)
    small = Grammars(model, tmp_path / "grammars", bounds)

    async def work(made: Scripted) -> None:
        bodies = map(large, range(100))
        for end in (whole, streamed, failed, aborted):
            for _ in range(5):
                await end(made, next(bodies))
        asking = []
        for _ in range(8):
            asking.append(asyncio.create_task(made.http.post(COMPLETIONS, json=next(bodies))))
            await asyncio.wait(
                {asking[-1], asyncio.ensure_future(made.asked())}, return_when="FIRST_COMPLETED"
            )
        full = [task.result() for task in asking if task.done()]
        assert full and {answer.status_code for answer in full} == {503}
        assert len(full) < 8, "some are kept"

    try:
        run(model, small.path, work)
    finally:
        small.stop()
