"""Chat templates that take tools, in the styles of the families, small ones of our own: how each
offers tools, and writes calls and results into the history."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken

# JSON with lines in a system turn, the result as JSON, one call a turn.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\nToday: " + date_string + "\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one call at once") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|><|python_tag|>{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|end|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}"""

# One tool a line, results in a user's turn, thinking of the last turn alone.
QWEN = """{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer in <tool_call></tool_call>.<|end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
           not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|start|>' + message.role + '\\n' + content + '<|end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')
                .split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|start|>' + message.role }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- '\\n' + content }}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# XML, field by field; values raw, and JSON through `safe`.
QWEN_CODER = """{%- macro extra(json_dict, handled) %}
    {%- if json_dict is mapping %}
        {%- for key in json_dict if key not in handled %}
            {%- if json_dict[key] is mapping or (json_dict[key] is sequence and
                   json_dict[key] is not string) %}
                {{- '\\n<' ~ key ~ '>' ~ (json_dict[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
            {%- else %}
                {{- '\\n<' ~ key ~ '>' ~ (json_dict[key] | string) ~ '</' ~ key ~ '>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<|start|>system\\n<tools>" }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
        {%- if tool.description is defined %}
            {{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}
        {%- endif %}
        {{- '\\n<parameters>' }}
        {%- if tool.parameters is mapping and tool.parameters.properties is mapping %}
            {%- for name, fields in tool.parameters.properties | items %}
                {{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' }}
                {%- if fields.type is defined %}
                    {{- '\\n<type>' ~ (fields.type | string) ~ '</type>' }}
                {%- endif %}
                {{- extra(fields, ['name', 'type']) }}{{- '\\n</parameter>' }}
            {%- endfor %}
        {%- endif %}
        {{- extra(tool.parameters, ['type', 'properties']) }}
        {{- '\\n</parameters>' }}{{- extra(tool, ['type', 'name', 'description', 'parameters']) }}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined and
           message.tool_calls is iterable and message.tool_calls | length > 0 %}
        {{- '<|start|>' + message.role }}
        {%- if message.content is defined and message.content is string and
               message.content | trim | length > 0 %}
            {{- '\\n' + message.content | trim + '\\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- if tool_call.arguments is defined %}
                {%- for name, value in tool_call.arguments | items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {%- set value = value | tojson | safe if value is mapping or
                        (value is sequence and value is not string) else value | string %}
                    {{- value }}{{- '\\n</parameter>\\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}{{- '<|end|>\\n' }}
        {%- elif loop.last %}{{- '<|end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""

# JSON that it writes by hand, ids of calls, tools before the last user's message.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " }}
        {%- if loop.last and system_message is defined %}
            {{- system_message + "\\n\\n" }}
        {%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# Types of another language, from a table; the second of two named templates.
HERMES = """{%- macro json_to_python_type(spec) %}
    {%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if basic[spec.type] is defined %}{{- basic[spec.type] }}
    {%- elif spec.type == "array" %}{{- "list[" + json_to_python_type(spec.items) + "]" }}
    {%- elif spec.type == "object" %}
        {%- if spec.additionalProperties is defined %}
            {{- "dict[str, " + json_to_python_type(spec.additionalProperties) + ']' }}
        {%- else %}{{- "dict" }}{%- endif %}
    {%- elif spec.type is iterable %}
        {{- "Union[" }}
        {%- for t in spec.type %}
            {{- json_to_python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}
        {%- endfor %}
        {{- "]" }}
    {%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- '<|start|>system\\n<tools> ' }}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": ' }}
    {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for name, fields in tool.parameters.properties | items %}
        {{- name + ": " + json_to_python_type(fields) }}
        {%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ")" }}
    {%- if tool.return is defined %}{{- " -> " + json_to_python_type(tool.return) }}{%- endif %}
    {{- " - " + tool.description + "\\n\\n" }}
    {{- '", "parameters": ' }}
    {%- if tool.parameters.properties | length == 0 %}{{- "{}" }}
    {%- else %}{{- tool.parameters | tojson }}{%- endif %}
    {{- "}" }}{%- if not loop.last %}{{- "\\n" }}{%- endif %}
{%- endfor %}
{{- " </tools><|end|>\\n" }}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" or
           (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|start|>tool\\n<tool_response>\\n' }}{{- message.content }}
        {%- if not loop.last %}{{- '\\n</tool_response>\\n' }}
        {%- else %}{{- '\\n</tool_response>' }}{%- endif %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""

# TypeScript from schemas, channels, the effort, the thought before a call, the date.
GPT_OSS = """{%- macro render_type(spec, required, is_nullable=false) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}{{- render_type(spec['items'], required) + "[]" }}
        {%- else -%}{{- "any[]" }}{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.oneOf -%}
        {%- for variant in spec.oneOf -%}
            {{- render_type(variant, required) -}}
            {%- if variant.description %}{{- "// " + variant.description }}{%- endif -%}
            {%- if not loop.last %}{{- " | " }}{% endif -%}
        {%- endfor -%}
    {%- elif spec.type == "string" -%}
        {%- if spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
        {%- else -%}{{- "string" }}{%- endif -%}
    {%- elif spec.type == "number" or spec.type == "integer" -%}{{- "number" }}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}
        {%- for name, each in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}
            {{- ": " }}{{ render_type(each, spec.required or []) }}
            {%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}{{- "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro render_tools(namespace_name, tools) -%}
    {{- "## " + namespace_name + "\\n\\nnamespace " + namespace_name + " {\\n\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = " }}
        {%- if tool.parameters and tool.parameters.properties %}
            {{- "(_: {\\n" }}
            {%- for name, spec in tool.parameters.properties.items() %}
                {%- if spec.description %}{{- "// " + spec.description + "\\n" }}{%- endif %}
                {{- name }}
                {%- if name not in (tool.parameters.required or []) %}{{- "?" }}{%- endif %}
                {{- ": " }}{{- render_type(spec, tool.parameters.required or []) }}
                {%- if spec.default is defined -%}
                    {%- if spec.enum %}{{- ", // default: " + spec.default }}
                    {%- else %}{{- ", // default: " + spec.default | tojson }}{%- endif -%}
                {%- endif -%}
                {{- ",\\n" }}
            {%- endfor %}
            {{- "}) => any;\\n\\n" }}
        {%- else %}{{- "() => any;\\n\\n" }}{%- endif %}
    {%- endfor %}
    {{- "} // namespace " + namespace_name }}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n" }}
{{- "Reasoning: " + reasoning_effort + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" + developer_message }}
    {%- if tools -%}{{- "\\n\\n# Tools\\n\\n" }}{{- render_tools("functions", tools) }}{%- endif -%}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message -%}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking with tool calls") }}
            {%- elif message.content %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content }}
                {{- "<|end|>" }}
            {%- elif message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}
                {{- "<|end|>" }}
            {%- endif %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name }}
            {{- "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments | tojson }}{{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no tool call before") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary" }}
        {{- "<|message|>" + message.content | tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

# Values between marks of their own, keys in order.
GEMMA = """{%- macro value_of(argument) -%}
    {%- if argument is string -%}{{- '<escape>' + argument + '<escape>' -}}
    {%- elif argument is boolean -%}{{- 'true' if argument else 'false' -}}
    {%- elif argument is mapping -%}
        {{- '{' -}}
        {%- for key, value in argument | dictsort -%}
            {{- key -}}:{{- value_of(value) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif argument is sequence -%}
        [{%- for item in argument -%}
            {{- value_of(item) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}]
    {%- else -%}{{- argument -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}
    {{- '<|start|>developer\\n' -}}
    {%- for tool in tools -%}
        {{- '<start_function_declaration>declaration:' + tool['function']['name'] -}}
        {{- '{description:' + value_of(tool['function']['description']) -}}
        {{- ',parameters:' + value_of(tool['function']['parameters']) + '}' -}}
        {{- '<end_function_declaration>' -}}
    {%- endfor -%}
    {{- '<|end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|start|>' + role + '\\n' -}}
    {%- if message['role'] == 'tool' -%}
        {{- '<start_function_response>response:' + value_of(message['content']) -}}
        {{- '<end_function_response>' -}}
    {%- elif message['content'] -%}{{- message['content'] | trim -}}{%- endif -%}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<start_function_call>call:' + call['function']['name'] -}}
        {{- value_of(call['function']['arguments']) + '<end_function_call>' -}}
    {%- endfor -%}
    {{- '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>model\\n' -}}{%- endif -%}"""

# A call as Python, with keywords.
PYTHONIC = """{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- if loop.first and tools %}
        {{- tools | map(attribute='function') | list | tojson }}
    {%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '<|python_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '%s=%s' | format(key, value | tojson(ensure_ascii=true)) }}
                {%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']<|python_end|>' }}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}"""


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def plain(*texts: str) -> list[AddedToken]:
    """Added tokens that are not special, which an answer shows as text."""
    return [AddedToken(text, special=False, normalized=False) for text in texts]


CALLS = plain("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINKING = plain("<think>", "</think>")
DECLARED = [
    *("<escape>", "<start_function_call>", "<end_function_call>"),
    *("<start_function_declaration>", "<end_function_declaration>"),
    *("<start_function_response>", "<end_function_response>"),
]
BRACKETS = [
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]

# By family: the template, and the tokens that it writes beside <|start|> and <|end|>.
FAMILIES: dict[str, tuple[Any, list[AddedToken]]] = {
    "llama": (LLAMA, special("<|python_tag|>")),
    "qwen": (QWEN, [*CALLS, *THINKING]),
    "qwen-coder": (QWEN_CODER, [*CALLS, *plain("<function>")]),
    "mistral": (MISTRAL, special(*BRACKETS)),
    "hermes": ([{"name": "default", "template": "plain"}], [*CALLS]),
    "gpt-oss": (GPT_OSS, special("<|channel|>", "<|message|>", "<|call|>")),
    "gemma": (GEMMA, special(*DECLARED)),
    "pythonic": (PYTHONIC, special("<|python_start|>", "<|python_end|>")),
}
FAMILIES["hermes"][0].append({"name": "tool_use", "template": HERMES})
