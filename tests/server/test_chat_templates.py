"""Chat templates as transformers renders them, and what they may cost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chats import DOCUMENTS, EACH, SECONDS, TALK, TURNS, Make, encode, text_of, theirs

from kvline_server.http.chat_tokens import Asked, ChatTokens
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.renderers import Renderer
from kvline_server.http.template import ChatTemplate, environment
from kvline_server.http.template_files import RESERVED, ChatFiles, read_chat_files
from kvline_server.http.tokens import Tokens

FEATURES = {
    "plain": EACH,
    "blocks are trimmed": (
        "{% for m in messages %}\n    {% if m %}\n  x\n    {% endif %}\n{% endfor %}"
    ),
    "blanks are trimmed": (
        "{%- for m in messages -%}\n  {{- m.content | trim -}}  \n{%- endfor %}\n\n"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n"
        "{{ m.content }}{% set x = 'inside' %}{% endgeneration %}\n{% else %}"
        "{%- generation -%} {{ m.role }} {%- endgeneration -%}{% endif %}{{ x }}{% endfor %}"
    ),
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}"
    ),
    "date": "{{ strftime_now('%d %b %Y') }}",
    "date, guarded": (
        "{% if strftime_now is defined %}{% set d = strftime_now('%Y') %}{% else %}"
        "{% set d = 'never' %}{% endif %}{{ d }}"
    ),
    "tojson": "{{ messages | tojson }}",
    "tojson, ASCII": "{{ messages | tojson(ensure_ascii=True) }}",
    "tojson, lines": "{{ messages | tojson(indent=4) }}{{ messages | tojson(false, 2) }}",
    "tojson, close": "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "tools and documents": (
        "{{ tools is none }}{{ tools is defined }}{{ documents is none }}"
        "{% for d in documents or [] %}{{ d.title }}={{ d['text'] }} {{ d }}{% endfor %}"
    ),
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}[{{ unk_token }}]",
    "variables": (
        "{{ enable_thinking is defined }}{{ level | default('none') }}{{ list | join('+') }}"
    ),
    "generation prompt": EACH + "{% if add_generation_prompt %}assistant:{% endif %}",
    "namespaces": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}"
    ),
    "dict": "{{ dict(a=1, b='x') }}{{ dict.fromkeys(['k'], 2) }}{{ dict([('c', 3)]) }}",
    "macros": (
        "{% macro f(m, k='x') %}<{{ m.role ~ k }}>{% endmacro %}"
        "{{ f(messages[0]) }}{{ f(messages[1], 'y') }}"
    ),
    "texts": (
        "{{ messages[2].content.split('</think>')[-1].lstrip('\n') }}{{ messages[0].role | upper }}"
        "{{ messages[1].content.replace('é', 'e') | length }}"
        "{{ messages[0].content.startswith('Be') }}"
        "{{ messages[::-1] | map(attribute='role') | join(',') }}{{ messages[1].content[2:5] }}"
    ),
    "items": (
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
        "{{ messages[0] | items | list }}"
    ),
    "filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{{ messages | last }}"
    ),
    "escapes": "{% autoescape true %}{{ messages[1].content ~ '<' }}<{{ '<' }}{% endautoescape %}",
    "safe": (
        "{% set safe = messages[1].content | safe %}{{ safe }}{{ '<' + safe }}{{ safe + '<' }}"
        "{{ messages[1].content + safe }}{{ safe | replace('you', '<') }}{{ '%s' % safe }}"
        "{{ safe % () }}{{ safe ~ '<' }}{{ ['<', safe] | join('&') }}{{ safe | upper | trim }}"
    ),
    "repr": "{{ messages }}{{ messages[1].content | string }}{{ 'a' ~ 1 ~ none }}",
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_renders_as_in_transformers(name: str) -> None:
    template, special = FEATURES[name], {"bos_token": "<s>", "eos_token": "</s>"}
    for asked in (
        Asked(),
        Asked(add_generation_prompt=False, documents=DOCUMENTS),
        Asked(variables={"enable_thinking": False, "level": "high", "list": ["a", "b"]}),
    ):
        own = {**special, "tools": None, "add_generation_prompt": asked.add_generation_prompt}
        variables = {**asked.variables, "documents": asked.documents}
        text = ChatTemplate(template).render(TALK, own, variables)
        assert text == theirs(template, TALK, asked, **special)


def test_the_whole_way_gives_the_tokens_of_transformers_text(make_chat: Make) -> None:
    """Through the process that renders, and the tokenizer."""
    for name, template in FEATURES.items():
        chat = make_chat(template)
        documents = DOCUMENTS if "documents" in template else None  # the others are a 400
        asked = Asked(documents=documents, variables={"level": "high"})
        special = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
        text = theirs(template, TALK, asked, **special)
        assert encode(chat, TALK, asked=asked) == chat._tokens.encode(text), name


@pytest.mark.parametrize("content", ["Once upon", "Once upon a time  ", " \n x", "0"])
@pytest.mark.parametrize("template", [TURNS, TURNS.replace("m.content", "m.content | trim")])
def test_a_final_message_is_continued_as_in_transformers(
    make_chat: Make, template: str, content: str
) -> None:
    messages = [{"role": "user", "content": "tell"}, {"role": "assistant", "content": content}]
    asked = Asked(add_generation_prompt=False, continue_final_message=True)
    assert text_of(make_chat(template), messages, asked) == theirs(template, messages, asked)


def test_a_template_that_does_not_write_the_last_message_cannot_continue_it(
    make_chat: Make,
) -> None:
    asked = Asked(add_generation_prompt=False, continue_final_message=True)
    for template in ("fixed", "{{ messages[0].content }}", "{{ messages[-1].content | length }}"):
        with pytest.raises(BadRequest, match="cannot be continued"):
            encode(make_chat(template), TALK[1:], asked=asked)


def test_names_of_the_environment_are_reserved() -> None:
    assert set(environment().globals) <= RESERVED


def test_a_list_of_named_templates_has_a_default(make_chat: Make, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": EACH}]
    assert text_of(make_chat(named), TALK[3:]) == "user: bye\n"
    with pytest.raises(BadRequest, match=r"chat templates \(rag, tool_use\) none is the default"):
        encode(make_chat([{"name": n, "template": "T"} for n in ("tool_use", "rag")]), TALK)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "settings"}')
    assert read_chat_files(tmp_path).template == "file"


FAILURES = {
    "{{ 1 // 0 }}": "failed in line 1: ZeroDivisionError",
    "\n{{ messages[0].content + 1 }}": "failed in line 2: TypeError",
    "{% for i in range(10**7) %}{% endfor %}": "failed in line 1: OverflowError",
    "{{ nothing.at.all }}": "failed in line 1: 'nothing' is undefined",
    "{{ messages | tojson(what=1) }}": "failed in line 1: TypeError",
    "{{ raise_exception('roles must alternate') }}": "failed in line 1: roles must alternate",
    "{{ ''.__class__.__mro__ }}": "not allowed",
    "{{ messages.append(1) }}": "not allowed",
    "{% set ns = namespace(_x=1) %}": "not allowed",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "failed in line 1: RecursionError",
    "{{ 'a' * 10**10 }}": "memory",
    "{{ messages[0].content * 10**10 }}": "took more memory than it may",
    '{{ "\\ud800" }}': "surrogate",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "of CPU time",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10) | replace('b', 'a' * 100) | length }}": "memory",
}


@pytest.mark.parametrize("template", FAILURES)
def test_any_error_of_a_template_is_a_400_that_names_it(make_chat: Make, template: str) -> None:
    chat = make_chat(template)
    for _ in range(2):  # the process that renders is there again
        with pytest.raises(BadRequest, match="the chat template") as failed:
            encode(chat, TALK)
        assert FAILURES[template] in failed.value.message


def test_endless_templates_do_not_stop_chat(make_chat: Make) -> None:
    """Three at once, on the one process that a small container has for them."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    chat = make_chat("{% if endless %}" + endless + "{% endif %}" + EACH)
    encode(chat, TALK)
    failed: list[str] = []

    def ask() -> None:
        try:
            encode(chat, TALK, asked=Asked(variables={"endless": True}))
        except BadRequest as error:
            failed.append(error.message)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    begun = time.process_time(), time.monotonic()
    for thread in threads:
        thread.start()
    while len(failed) < 1:
        time.sleep(0.01)
    assert text_of(chat, TALK[3:]) == "user: bye\n"
    for thread in threads:
        thread.join()
    assert failed == ["the chat template took more than 0.2 s of CPU time"] * 3
    assert time.process_time() - begun[0] < 1  # this process only waits
    assert text_of(chat, TALK[3:]) == "user: bye\n"


def test_an_invalid_template_costs_chat_alone(make_chat: Make) -> None:
    for template, reason in {
        "{% for m in messages %}": "is invalid in line 1: Unexpected end of template",
        "a\n{% what %}": "is invalid in line 2: Encountered unknown tag 'what'",
        "{{ 7 ** (2 * 10 ** 7) }}": "took more than 2 s of CPU time",
    }.items():
        chat = make_chat(template)
        assert chat.problem().startswith(f"the chat template {reason}")
        with pytest.raises(BadRequest, match="use /v1/completions") as failed:
            encode(chat, TALK)
        assert reason in failed.value.message


@pytest.mark.parametrize(("template", "started"), [("{{ 7 ** (2 * 10 ** 7) }}", 1), (EACH, 3)])
def test_an_endless_compilation_is_tried_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, template: str, started: int
) -> None:
    """However many processes would render; where it ends, all are ready before the first chat."""
    starts, start = list[Renderer](), Renderer._start

    def counted(self: Renderer) -> subprocess.Popen[bytes]:
        starts.append(self)
        return start(self)

    monkeypatch.setattr(Renderer, "_start", counted)
    chat = ChatTokens(Tokens(tiny_model), ChatFiles(template), 3, SECONDS)
    for _ in range(2):
        assert bool(chat.problem()) == (started == 1)
    assert len(starts) == started


def test_a_long_template_is_compiled_where_texts_are_short(tiny_model: Path) -> None:
    """In a small container little memory is left to a rendering; a template of 70 KB needs more."""
    part = "{% if tools %}{{ '<' + messages[0].content | trim }}{% endif %}" * 1000
    tokens = Tokens(tiny_model, max_text=128 << 10)
    chat = ChatTokens(tokens, ChatFiles(part + EACH))
    assert chat.problem() == ""
    content = "\U0001f600" * 30_000
    assert encode(chat, [{"role": "user", "content": content}]) == tokens.encode(
        f"user: {content}\n"
    )
    with pytest.raises(BadRequest, match="this server tokenises 131072 at most"):
        encode(chat, [{"role": "user", "content": content * 5}])


def killed(renderer: Renderer) -> subprocess.Popen[bytes]:
    assert renderer._process is not None
    renderer._process.kill()
    return renderer._process


def test_a_renderer_that_is_killed_is_replaced(make_chat: Make) -> None:
    """Before its first answer, and after it."""
    chat = make_chat(EACH)
    renderers = chat._renderers
    assert renderers is not None
    renderer = renderers._idle.get()
    renderers._idle.put(renderer)
    killed(renderer).wait()
    with pytest.raises(BadRequest, match=r"the chat template ended its process \(-9\)"):
        encode(chat, TALK)
    for _ in range(2):
        assert text_of(chat, TALK[3:]) == "user: bye\n"
        killed(renderer)
        assert text_of(chat, TALK[3:]) == "user: bye\n"


def test_a_renderer_that_sends_no_frame_is_ended(
    make_chat: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(self: Renderer) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", r"printf '\377\377\377\377'; exec sleep 600"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(Renderer, "_start", start)
    chat = make_chat(EACH)
    with pytest.raises(BadRequest, match="the chat template sent a frame of 4294967295 bytes"):
        encode(chat, TALK)
    assert started[0].poll() == -9


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (EACH, False),
        ("{% set documents = [] %}{{ documents }}", False),
        ("{% macro m(documents) %}{{ documents }}{% endmacro %}{{ m(1) }}", False),
        ("{% for documents in messages %}{{ documents.role }}{% endfor %}", False),
        ("{{ messages[0].documents }}{# documents #}documents", False),
        ("{% macro m() %}{{ documents }}{% endmacro %}{{ m() }}", True),
        ("{% if documents is defined %}with{% endif %}", True),
        ("{% set documents = documents or [] %}{{ documents }}", True),
        ("{% generation %}{{ documents[0].a if documents }}{% endgeneration %}", True),
    ],
)
def test_documents_that_a_template_never_reads_are_refused(
    make_chat: Make, template: str, reads: bool
) -> None:
    """The prompt was the one without them."""
    chat = make_chat(template)
    nothings: tuple[Any, ...] = (None, [])
    for nothing in nothings:
        encode(chat, TALK[3:], asked=Asked(documents=nothing))
    if reads:
        encode(chat, TALK[3:], asked=Asked(documents=DOCUMENTS))
        return
    with pytest.raises(BadRequest, match="documents: the chat template does not read") as refused:
        encode(chat, TALK[3:], asked=Asked(documents=DOCUMENTS))
    assert (refused.value.param, refused.value.code) == ("documents", "unsupported_value")


def test_a_model_without_template_says_so(make_chat: Make) -> None:
    chat = make_chat(None)
    assert chat.problem() == ""
    with pytest.raises(BadRequest, match="no chat template"):
        encode(chat, TALK)


def test_today_is_the_date(make_chat: Make) -> None:
    before = datetime.now().date()
    text = text_of(make_chat("{{ strftime_now('%Y-%m-%d') }}"), TALK)
    assert str(before) <= text <= str(datetime.now().date())


def test_the_http_process_imports_no_jinja2() -> None:
    """Only those that render do."""
    code = "import sys, kvline_server.http.process; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


NESTED: list[Any] = []
for _ in range(32):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template": "x"}, "chat_template: is not a field that this server supports"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs: '{name}' is not a")
            for name in ("messages", "tools", "bos_token", "raise_exception", "documents", "dict")
        ),
        ({"chat_template_kwargs": {"a": NESTED}}, "chat_template_kwargs: lists and objects are"),
        ({"documents": [{"a": NESTED}]}, "documents: lists and objects are"),
        ({"documents": ["a"]}, "documents[0]: must be an object"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt: not together with continue_final_message",
        ),
    ],
)
def test_what_a_template_cannot_get_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    """H36."""
    with pytest.raises(BadRequest) as refused:
        parse(ChatRequest, {"model": "m", "messages": TALK, **fields})
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, True),
        ({"add_generation_prompt": False}, False),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": False, "add_generation_prompt": True}, True),
    ],
)
def test_a_prompt_ends_with_the_beginning_of_an_answer_unless_it_is_continued(
    fields: dict[str, Any], prompt: bool
) -> None:
    made = parse(ChatRequest, {"model": "m", "messages": TALK, **fields})
    assert made.generation_prompt() is prompt
