"""Golden examples: what each family writes, and what it means. Letters are those of the cases that
every family has; cases of one family are named."""

from __future__ import annotations

from dataclasses import dataclass

from tool_families import ALL, Family, call

from kvline_server.formats.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text

TRICKY = r'{"s":"} \"</tool_call>\" \\u00e9 😀"}'


@dataclass(frozen=True)
class Example:
    family: str
    case: str
    text: str
    events: tuple[Event, ...]
    finish: str = "stop"
    tools: bool = True
    in_reasoning: bool = False


# Arguments by case: as the family writes them, and as they come out.
JSON = {
    "A": ("{}", "{}"),
    "D": (TRICKY, TRICKY),
    "E": ('{"o": {"x": {"y": [{}]}}, "l": []}',) * 2,
    "L": ('{"n": 1e3, "i": -0, "z": null, "b": true}',) * 2,
    "N": ('{ "s" :"x",\n "n":  1.50, "a":[ ] }',) * 2,
    "unicode": ('{"ü": "\\ud83d\\ude00 \\u00e9\\n"}',) * 2,
}
PYTHON = {
    "A": ("", "{}"),
    "D": (
        "s='} \"</tool_call>\" \\\\u00e9 😀'",
        r'{"s": "} \"</tool_call>\" \\u00e9 😀"}',
    ),
    "E": ("o={\"x\": {'y': [{}]}}, l=[]", '{"o": {"x": {"y": [{}]}}, "l": []}'),
    "L": ("n=1e3, i=-0, z=None, b=True", '{"n": 1e3, "i": -0, "z": null, "b": true}'),
    "N": ("s = 'x',\n n=1.50, l=[1, 2,]", '{"s": "x", "n": 1.50, "l": [1, 2]}'),
    "unicode": ("ü='\\ud83d\\ude00 \\xe9\\n'", '{"ü": "\\ud83d\\ude00 \\u00e9\\n"}'),
    "strings": (
        r"""s="it's", ü='a\'b"c\d\x41\U0001f600'""",
        r'{"s": "it' + r"'" + r's", "ü": "a' + r"'" + r'b\"c\\d\u0041😀"}',
    ),
    "words": ("b=false, z=null, l=[True, None]", '{"b": false, "z": null, "l": [true, null]}'),
    "numbers": ("n=.5, i=1_000, l=[5., +1]", '{"n": 0.5, "i": 1000, "l": [5.0, 1]}'),
}


def xml(*parameters: tuple[str, str]) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)


XML = {
    "A": ("", "{}"),
    "D": (
        xml(("s", '} "</tool_call>" \\u00e9 😀')),
        r'{"s": "} \"</tool_call>\" \\u00e9 😀"}',
    ),
    "E": (xml(("o", '{"x": {"y": [{}]}}'), ("l", "[]")), '{"o": {"x": {"y": [{}]}}, "l": []}'),
    "L": (
        xml(("n", "1e3"), ("i", "-0"), ("z", "null"), ("b", "true")),
        '{"n": 1e3, "i": -0, "z": null, "b": true}',
    ),
    "M": (
        xml(("s", '\n <b> & "true"\n\n</parameter\n'), ("ü", "true")),
        r'{"s": "\n <b> & \"true\"\n\n</parameter\n", "ü": "true"}',
    ),
    "N": (xml(("s", " x "), ("o", '{"b" :1,  "a":2}')), '{"s": " x ", "o": {"b" :1,  "a":2}}'),
    "typed": (
        xml(("i", "10"), ("s", "10"), ("b", "True"), ("n", "ten"), ("l", "['a', None]")),
        '{"i": 10, "s": "10", "b": true, "n": "ten", "l": ["a", null]}',
    ),
    "undeclared": (xml(("x", "10")), '{"x": "10"}'),
    "empty": (xml(("s", "")), '{"s": ""}'),
    "no newlines": ("<parameter=s>x</parameter><parameter=i>1</parameter>", '{"s": "x", "i": 1}'),
}
ARGUMENTS = {"json": JSON, "python": PYTHON, "xml": XML}
# The beginning of a call that is cut within a string, and its arguments so far.
CUT = {
    "json": ('{"i": 1, "s": "par', '{"i": 1, "s": "par'),
    "python": ("i=1, s='par", '{"i": 1, "s": "par'),
    "xml": ("<parameter=i>\n1\n</parameter>\n<parameter=s>\npar", '{"i": 1, "s": "par'),
}
SIMPLE = {
    "json": ('{"i": 1}', '{"i": 1}'),
    "python": ("i=1", '{"i": 1}'),
    "xml": (xml(("i", "1")), '{"i": 1}'),
}
# Calls whose arguments break before any value of them has begun.
BROKEN = {
    "json": ["{'i': 1}", "{i: 1}", '{"i" 1}', '{"i": }', '{"i": one}', "[1]", "1", '"x"'],
    "python": ["1", "i:1", "i=one", "i=", "**x"],
    "xml": ["{}", "<parameter i=1>", "<parameter=i\n>", "text"],
}


def examples(name: str) -> list[Example]:
    family = ALL[name]
    out = [
        Example(name, case, family.write([("f", written)]), tuple(call("f", meant)))
        for case, (written, meant) in ARGUMENTS[family.written].items()
    ]
    out += calls(name, family)
    out += cut(name, family)
    if family.thinking is not None:
        out += reasoning(name, family)
    return out + OWN.get(name.partition("-")[0], [])


def calls(name: str, family: Family) -> list[Example]:
    written, meant = SIMPLE[family.written]
    empty = ARGUMENTS[family.written]["A"][0]
    two = family.write([("f", written), ("g", empty)])
    both = (*call("f", meant), *call("g", "{}", 1))
    one, simple = family.write([("f", written)]), tuple(call("f", meant))
    # Nobody declares the types of an unknown tool.
    unknown = tuple(call("no_tool", '{"i": "1"}' if family.written == "xml" else meant))
    answer = '{"name": "Bob", "parameters": {"age": 5}}'
    out = [
        Example(name, "B", two, both),
        Example(name, "H", family.write([("no_tool", written)]), unknown),
        Example(name, "Q", answer, (Text(answer),), tools=False),
        Example(name, "no call", "Just text.\n", (Text("Just text.\n"),)),
    ]
    if family.name != "Harmony":
        out.append(Example(name, "C", f"{one}\n\nDone.", (*simple, Text("\n\nDone."))))
    if family.among_text and family.name not in ("Harmony", "MistralV11"):
        text = f"Let me see.\n\n{one}\nand\n{one}\n"
        events = (Text("Let me see."), *simple, Text("\nand"), *call("f", meant, 1))
        out.append(Example(name, "C", text, events))
    return out


def cut(name: str, family: Family) -> list[Example]:
    written, meant = CUT[family.written]
    whole = family.write([("f", written + "¦")])
    text = whole[: whole.index("¦")]
    ended = Example(name, "F", text, tuple(call("f", meant, complete=False)), "length")
    simple, all_of_it = SIMPLE[family.written]
    unclosed = family.write([("f", simple)]).removesuffix(family.tail)
    out = [ended, Example(name, "G", unclosed, tuple(call("f", all_of_it)))]
    if family.written == "json":
        broken = tuple(call("f", meant, complete=False))
        out.append(Example(name, "F by the model", text, broken))
    return out


def reasoning(name: str, family: Family) -> list[Example]:
    thinking = family.thinking
    assert thinking is not None
    thought = f'{thinking.open}\nHm, {{"a"}}.\n\nSo.\n{thinking.close}\n\n'
    events: tuple[Event, ...] = (Reasoning('Hm, {"a"}.\n\nSo.'),)
    written, meant = SIMPLE[family.written]
    one, simple = family.write([("f", written)]), tuple(call("f", meant))
    return [
        Example(name, "reasoning", f"{thought}Yes.\n", (*events, Text("Yes.\n"))),
        Example(name, "reasoning, call", f"{thought}{one}", (*events, *simple)),
        Example(name, "no tools", f"{thought}Yes.", (*events, Text("Yes.")), tools=False),
        Example(name, "K", f"{thinking.open}\nHm, <b", (Reasoning("Hm, <b"),)),
        Example(
            name,
            "K cut",
            f"{thinking.open}Hm\n",
            (Reasoning("Hm\n"),),
            finish="length",
        ),
        Example(
            name,
            "opened by the prompt",
            f"\nHm.\n{thinking.close}\n\n{one}",
            (Reasoning("Hm."), *simple),
            in_reasoning=True,
        ),
        Example(
            name,
            "a call ends reasoning",
            f"{thinking.open}\nHm.\n{one}",
            (Reasoning("Hm."), *simple),
        ),
    ]


QUOTED = '{"name": "f", "parameters": "{\\"i\\": 1, \\"s\\": \\"a\\\\n\\\\\\"\\u00e9\\"}"}'
REVERSED = '{"arguments": {"s": "x"}, "name": "f"}'
BODY = '{"name": "f", "arguments": {"i": 1}}'


def own(family: str, *rows: tuple[str, str, tuple[Event, ...]]) -> list[Example]:
    return [Example(family, case, text, events) for case, text, events in rows]


ONE = tuple(call("f", '{"i": 1}'))
OWN = {
    "Llama3JSON": own(
        "Llama3JSON",
        ("P", QUOTED, tuple(call("f", '{"i": 1, "s": "a\\n\\"é"}'))),
        ("python_tag", '<|python_tag|>{"name": "f", "parameters": {"i": 1}}', ONE),
        ("C", 'Yes:\n<|python_tag|>{"name": "f", "parameters": {"i": 1}}', (Text("Yes:"), *ONE)),
        ("with a type", '{"type": "function", "name": "f", "parameters": {"i": 1}}', ONE),
        ("arguments", BODY, ONE),
        ("Q with tools", '{"name": "Bob", "age": 5}', (Text('{"name": "Bob", "age": 5}'),)),
        ("name alone", '{"name": "f"}', (Text('{"name": "f"}'),)),
        ("not first", f"No: {BODY}", (Text(f"No: {BODY}"),)),
        ("code", "<|python_tag|>print(1)", (Text("print(1)"),)),
    ),
    "Pythonic": own(
        "Pythonic",
        ("python_start", "<|python_start|>[f(i=1)]<|python_end|>", ONE),
        ("without a list", "<|python_start|>f(i=1)<|python_end|>", ONE),
        ("a link", "[f](http://x) is", (Text("[f](http://x) is"),)),
        ("a list", "[1, 2]", (Text("[1, 2]"),)),
        ("not first", "No: [f(i=1)]", (Text("No: [f(i=1)]"),)),
    ),
    "Hermes": [
        *own(
            "Hermes",
            ("reversed", f"<tool_call>{REVERSED}</tool_call>", tuple(call("f", '{"s": "x"}'))),
            ("no arguments", '<tool_call>{"name": "g"}</tool_call>', tuple(call("g", "{}"))),
            (
                "null",
                '<tool_call>{"name": "g", "arguments": null}</tool_call>',
                tuple(call("g", "{}")),
            ),
            ("no last brace", f"<tool_call>\n{BODY[:-1]}\n</tool_call>", ONE),
            ("one brace more", f"<tool_call>\n{BODY}}}\n</tool_call>", (*ONE, Text("}"))),
            ("more keys", f'<tool_call>{BODY[:-1]}, "id": [1]}}</tool_call>', ONE),
            (
                "named in reasoning",
                f"<think>Is it <tool_call> or not?</think>\n\n<tool_call>{BODY}</tool_call>",
                (Reasoning("Is it <tool_call> or not?"), *ONE),
            ),
        )
    ],
    "QwenXML": own(
        "QwenXML",
        (
            "one mark",
            f"<function=f>\n{xml(('i', '1'))}</function>\n</tool_call>",
            ONE,
        ),
        (
            "two in one",
            f"<tool_call><function=f>{xml(('i', '1'))}</function>"
            "<function=g></function></tool_call>",
            (*ONE, *call("g", "{}", 1)),
        ),
        (
            "text behind a parameter",
            f"<tool_call>\n<function=f>\n{xml(('i', '1'))}oops</function>\n",
            (*ONE, Text("\noops</function>")),
        ),
    ),
    "MistralV7": own(
        "MistralV7",
        ("R", f"[TOOL_CALLS][{BODY}]", ONE),
        ("with an id", f'[TOOL_CALLS] [{BODY[:-1]}, "id": "a1b2c3d4e"}}]', ONE),
        ("one object", f"[TOOL_CALLS] {BODY}", ONE),
    ),
    "MistralV11": own(
        "MistralV11",
        ("R", '[TOOL_CALLS] f [ARGS] {"i": 1}', ONE),
        ("without ARGS", '[TOOL_CALLS]f{"i": 1}', ONE),
        ("CALL_ID", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"i": 1}', ONE),
        ("C", 'Yes.[TOOL_CALLS]f[ARGS]{"i": 1}', (Text("Yes."), *ONE)),
    ),
    "Phi4Mini": own(
        "Phi4Mini",
        ("one object", f"<|tool_call|>{BODY}<|/tool_call|>", ONE),
        ("functools", f"functools[{BODY}]", ONE),
        ("a module", "functools is a module", (Text("functools is a module"),)),
    ),
    "Gemma3": own(
        "Gemma3",
        ("plain JSON", BODY, ONE),
        ("plain Python", "[f(i=1)]", ONE),
        ("tool_code", "So:\n```tool_code\nf(i=1)\n```", (Text("So:"), *ONE)),
        ("python", "```python\nf(i=1)\n```", ONE),
        ("other code", "```python\nprint(i=1)\n```", (Text("```python\nprint(i=1)\n```"),)),
        ("other JSON", '```json\n{"a": 1}\n```\n', (Text('```json\n{"a": 1}\n```\n'),)),
    ),
    "Harmony": own(
        "Harmony",
        (
            "S",
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I call."
            "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
            '<|message|>{"i": 1}<|call|>',
            (Reasoning("One.Two."), Text("I call."), *ONE),
        ),
        (
            "recipient in the role",
            ' to=functions.f<|channel|>commentary json<|message|>{"i": 1}',
            ONE,
        ),
        (
            "final",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes {}.\n<|return|>",
            (Reasoning("Hm."), Text("Yes {}.\n")),
        ),
        (
            "empty",
            "<|channel|>commentary to=functions.g<|message|><|call|>",
            tuple(call("g", "{}")),
        ),
        (
            "a tool of its own",
            "<|channel|>analysis to=python code<|message|>1+1<|call|>",
            (Reasoning("1+1"),),
        ),
        ("K", "<|channel|>analysis<|message|>Hm", (Reasoning("Hm"),)),
        ("no header", "Hello", (Text("Hello"),)),
    ),
}


def late_break() -> Example:
    """What was shown of arguments stays an argument, as it cannot be taken back."""
    events = (
        CallStart(0, "f"),
        CallArguments(0, '{"s": "a" b"}}\n'),
        CallEnd(0, False),
        Text(" ok"),
    )
    text = '<tool_call>\n{"name": "f", "arguments": {"s": "a" b"}}\n</tool_call> ok'
    return Example("Hermes", "late", text, events)
