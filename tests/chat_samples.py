"""Chat templates written for this project that produce the formats of well-known models, and conversations for them."""

# ruff: noqa: E501  # long lines in templates

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the <b>weather</b> & 'more' \"é\"",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

USER = {"role": "user", "content": "Hi <b> & 'é' \U0001f600"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "turns": [USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "  and\n\nmore \n"}],
    "tool": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"t": 1}'},
    ],
    "twice": [USER, USER],
    "thoughts": [USER, {"role": "assistant", "content": "4", "reasoning": "2 + 2"}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "parts"}, {"type": "image"}]}],
}

CHATML = """{% for message in messages %}
{{- '<|im_start|>' ~ message.role + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "smollm2": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML,
    "llama2": """{% set ns = namespace(system='') %}
{% for m in messages %}
{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\\n' + m.content | trim + '\\n<</SYS>>\\n\\n' %}{% continue %}{% endif %}
{% if m.role == 'user' %}
{{- bos_token + '[INST] ' + ns.system + m.content | trim + ' [/INST]' }}{% set ns.system = '' %}
{%- elif m.role == 'assistant' %}
{{- ' ' + m.content | trim + ' ' + eos_token }}
{%- else %}{{ raise_exception('Only user, assistant and system roles are known, not ' ~ m.role) }}
{% endif %}
{% endfor %}""",
    "llama3": """{{ bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "llama31": """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' }}
{%- for tool in tools or [] %}
    {{- tool | tojson(indent=4) }}
    {{- '\\n\\n' }}
{%- endfor %}
{{- system + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eom_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}""",
    "mistral": """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}
{%- endif %}{% endfor %}""",
    "qwen": """{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}
{%- set index = (messages | length - 1) - loop.index0 %}
{%- if ns.open and m.role == "user" %}{% set ns.open = false %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set text = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is defined else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 < ns.last and thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- text.split('</think>')[-1].lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if m.content is string %}{% set text = m.content %}
{%- else %}{% set text %}{% for part in m.content or [] %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endset %}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + text | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "phi3": "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') and m.content %}"
    "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
    "zephyr": """{% for m in messages %}
{% if m.role in ['user', 'system'] %}
{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}
{% elif m.role == 'assistant' %}
{% generation %}{{ '<|assistant|>\\n' + m.content + eos_token }}{% endgeneration %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "deepseek": """{%- macro turn(m) -%}
{%- if m.role == 'user' -%}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' -%}{{ '<\uff5cAssistant\uff5c>' + m.content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endif -%}
{%- endmacro -%}
{{ bos_token }}{% for m in messages if m.content is string %}{{ turn(m) }}{% endfor %}
{%- if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}""",
    "granite": """{%- for document in documents or [] %}
{{- '<|start_of_role|>document ' + document | tojson + '<|end_of_role|>\\n' }}
{%- endfor %}
{%- for m in messages %}
{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' ~ m['content'] ~ '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant' }}
{%- if controls %}{{ ' ' + controls | tojson() }}{% endif %}{{ '<|end_of_role|>' }}{% endif %}
{%- endfor %}""",
    "harmony": """{%- macro kind(spec, depth=0) -%}
    {%- if spec.enum is defined -%}{{ '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type == 'array' -%}{{ kind(spec['items'], depth + 1) + '[]' if spec['items'] is mapping else 'any[]' }}
    {%- elif spec.type == 'object' and spec.properties is defined -%}
        {{- '{\n' }}
        {%- for name, inner in spec.properties.items() -%}
            {%- if inner.description %}{{ '// ' + inner.description + '\n' }}{% endif -%}
            {{- name + ('' if name in (spec.required or []) else '?') + ': ' + kind(inner, depth + 1) + ',\n' }}
        {%- endfor -%}
        {{- '}' }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}
    {%- else -%}{{ {'integer': 'number'}.get(spec.type, spec.type or 'any') }}
    {%- endif -%}
{%- endmacro -%}
{%- if messages[0].role in ('system', 'developer') -%}
    {%- set instructions, turns = messages[0].content, messages[1:] -%}
{%- else -%}
    {%- set instructions, turns = '', messages -%}
{%- endif -%}
{{- '<|start|>system<|message|>' ~ (model_identity if model_identity is defined else 'You are a model.') }}
{{- '\nCurrent date: ' ~ (current_date if current_date is defined else strftime_now('%Y-%m-%d')) }}
{{- '\n\nReasoning: ' ~ (reasoning_effort or 'medium') ~ '\n\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{ "\nCalls to these tools must go to the commentary channel: 'functions'." }}{% endif %}
{{- '<|end|>' }}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if instructions %}{{ '# Instructions\n\n' ~ instructions }}{% endif %}
    {%- if tools %}
        {{- ('\n\n' if instructions else '') ~ '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}
            {{- '// ' ~ tool.function.description ~ '\ntype ' ~ tool.function.name ~ ' = (' }}
            {{- ('_: ' ~ kind(tool.function.parameters)) if tool.function.parameters.properties else '' }}
            {{- ') => any;\n\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(called=none, answer=-1) %}
{%- for m in turns %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.answer = loop.index0 %}{% endif %}{% endfor %}
{%- for m in turns %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in (m.content or '') %}{{ raise_exception('a message of the assistant has tags of channels') }}{% endif %}
        {#- thoughts before the last answer are left out #}
        {%- if m.tool_calls %}
            {%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}
            {%- set thought = m.content or m.thinking %}
            {%- if thought and loop.index0 > ns.answer %}{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ thought ~ '<|end|>' }}{% endif %}
            {%- set call = m.tool_calls[0].function %}{% set ns.called = call.name %}
            {{- '<|start|>assistant<|channel|>commentary to=functions.' ~ call.name ~ ' <|constrain|>json<|message|>' }}
            {{- call.arguments | tojson }}{{ '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if ns.called is none %}{{ raise_exception('a result of a tool without a call') }}{% endif %}
        {{- '<|start|>functions.' ~ ns.called ~ ' to=assistant<|channel|>commentary<|message|>' ~ m.content | tojson ~ '<|end|>' }}
    {%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' ~ m.content ~ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    "of all features": """{%- set d = dict(a=1, **{'b': [1, 2.5, none, true]}) %}{{ d | tojson }} {{ d.items() | list }}
{{ dict.fromkeys('ab', 0) | tojson(sort_keys=true, separators=(',', ':')) }}
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }},{% endfor %}
{{ messages | map(attribute='role') | join('|') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
    {% if true %}
    indented
    {% endif %}
{{ '%s-%05.2f' % ('x', 3.14159) }} {{ '{:>5}'.format('y') }} {{ [3, 1, 2] | sort | first }} {{ missing is defined }}{{ missing }}
{{ '<&>"' }} {{ '<&>"' | e }} {{ 'a b' | title | replace(' ', '_') }} {{ 'x' is string }} {{ {'k': 'ü'} | tojson(ensure_ascii=true) }}
{%- filter upper %} loud {% endfilter %}{# a comment #}
{{ strftime_now('%Y') }} {{ (messages | last)['content'] | string | length }} {{ 7 // 2 }}{{ 2 ** 5 }}{{ 1 if none else 2 }}
""",
}

# The published format of the message "Hi".
PUBLISHED = {
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] Hi [/INST]",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Hi [/INST]",
    "gemma": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|user|>\nHi<|end|>\n<|assistant|>\n",
    "zephyr": "<|user|>\nHi</s>\n<|assistant|>\n",
}

HOSTILE = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "text times a number": "{{ 'a' * 10**10 }}",
    "a text doubled": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "output": "{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "lists of lists": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "nesting": "{{" + "(" * 6000 + "1" + ")" * 6000 + "}}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ strftime_now.__globals__['sys'] }}",
    "{{ namespace(__class__=1) }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ messages.insert(0, 1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages | map(attribute='__class__') | list | map(attribute='__mro__') | list | string | length / 0 }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]
