"""Answers of models in every format, and the parts of their messages."""

# ruff: noqa: E501, RUF001  # long texts; the names of DeepSeek's tokens

from __future__ import annotations

from typing import Any, NamedTuple

SCHEMAS: dict[str, dict[str, Any]] = {
    "get-time.v2": {"properties": {"city": {"type": "string"}}},
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
    "stop": {"type": "object", "properties": {}},
}


class Golden(NamedTuple):
    """A text, and the parts of its message. Calls are names and arguments as text."""

    form: str
    text: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    notes: int = 0
    errors: int = 0


OSLO = ("weather", '{"city": "Oslo"}')
RIGA = ("weather", '{"city": "Riga", "days": 2}')
QUOTED = ("weather", r'{"city": "a \"b\" }]</tool_call> \\"}')
GOLDEN = {
    # text and reasoning
    "plain": Golden("none", " Hi <b> there.\n", " Hi <b> there.\n"),
    "empty": Golden("hermes", "", ""),
    "reasoning": Golden("hermes", "<think>\nhm, 2 < 3\n</think>\n\nyes <b>\n", "yes <b>\n", "hm, 2 < 3"),
    "reasoning alone": Golden("none", "\n<think>hm</think>\n", "", "hm"),
    "reasoning that is cut": Golden("none", "<think>hm </thi", "", "hm </thi"),
    "no reasoning": Golden("none", "<think></think>yes", "yes", ""),
    "a second tag": Golden("none", "<think>a</think>b <think>c</think>", "b <think>c</think>", "a"),
    "a late tag": Golden("none", "plain <think>not reasoning</think>", "plain <think>not reasoning</think>"),
    "calls are not read": Golden(
        "none", '<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>'
    ),
    # Hermes, Qwen
    "hermes": Golden(
        "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', calls=(OSLO,)
    ),
    "hermes, two": Golden(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Riga", "days": 2}, "name": "weather"}\n</tool_call>\n',
        "Let me see.",
        calls=(OSLO, RIGA),
    ),
    "hermes, reasoning": Golden(
        "hermes",
        '<think>\nI call <tool_call>.\n</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        reasoning="I call <tool_call>.",
        calls=(("stop", "{}"),),
    ),
    "hermes, tags in a string": Golden(
        "hermes", '<tool_call>{"name": "weather", "arguments": ' + QUOTED[1] + "}</tool_call>", calls=(QUOTED,)
    ),
    "hermes, text between and after": Golden(
        "hermes",
        'A <tool_call>{"name": "stop"}</tool_call> B <tool_call>{"name": "stop", "arguments": null}</tool_call>C',
        "A\nB\nC",
        calls=(("stop", "{}"), ("stop", "{}")),
    ),
    "hermes, arguments in a string": Golden(
        "hermes", r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>', calls=(OSLO,)
    ),
    "hermes, as in OpenAI's API": Golden(
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "weather", "parameters": {"city": "Oslo"}}}</tool_call>',
        calls=(OSLO,),
    ),
    "hermes, a list": Golden(
        "hermes",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "stop", "arguments": {}}]</tool_call>',
        calls=(OSLO, ("stop", "{}")),
    ),
    "hermes, no JSON": Golden(
        "hermes", "Yes <tool_call>weather Oslo</tool_call> no", "Yes <tool_call>weather Oslo</tool_call> no", notes=1
    ),
    "hermes, no name": Golden(
        "hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', notes=1
    ),
    "hermes, an empty name": Golden(
        "hermes", '<tool_call>{"name": ""}</tool_call>.', '<tool_call>{"name": ""}</tool_call>.', notes=1
    ),
    "hermes, a brace too many": Golden(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}}</tool_call>', calls=(OSLO,), notes=1
    ),
    "hermes, a brace too few": Golden(
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call>', calls=(OSLO,), errors=1
    ),
    "hermes, no number of JSON": Golden(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        calls=(("weather", '{"days": NaN}'),),
        errors=1,
    ),
    "hermes, escapes in keys and names": Golden(
        "hermes",
        r'<tool_call>{"n\u0061me": "w\u0065ather", "arguments": {"city": "Oslo"}}</tool_call>',
        calls=(OSLO,),
    ),
    "hermes, a call in open reasoning": Golden(
        "hermes", '<think>a <tool_call>{"name": "stop"}</tool_call>', "", 'a <tool_call>{"name": "stop"}</tool_call>'
    ),
    "hermes, marks of other formats": Golden(
        "hermes",
        '[TOOL_CALLS]x <|python_tag|><tool_call>{"name": "stop"}</tool_call>',
        "[TOOL_CALLS]x <|python_tag|>",
        calls=(("stop", "{}"),),
    ),
    "hermes, cut": Golden(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Os',
        calls=(("weather", '{"city": "Os'),),
        errors=1,
    ),
    "hermes, a key twice": Golden(
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "at": {"x": 1, "x": 2}}}</tool_call>',
        calls=(("weather", '{"city": "Oslo", "at": {"x": 1, "x": 2}}'),),
        notes=1,
    ),
    "hermes, cut before the name": Golden("hermes", 'Hm <tool_call>{"na', 'Hm <tool_call>{"na', notes=1),
    "hermes, cut in the tag": Golden("hermes", "Hm <tool_ca", "Hm <tool_ca"),
    "hermes, no closing tag": Golden(
        "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}', calls=(OSLO,)
    ),
    "hermes, arguments in Python": Golden(
        "hermes",
        '<tool_call>{"name": "stop", "arguments": {\'a\': 1}}</tool_call>',
        calls=(("stop", "{'a': 1}"),),
        errors=1,
    ),
    # Qwen3-Coder, GLM
    "qwen3-coder": Golden(
        "qwen3-coder",
        "I see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo <b>\n2\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=tags>\n['a', \"b\"]\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "I see.",
        calls=(
            ("weather", '{"city": "Oslo <b>\\n2", "days": 3, "exact": true, "tags": ["a", "b"]}'),
            ("stop", "{}"),
        ),
    ),
    "qwen3-coder, no tool_call": Golden(
        "qwen3-coder", "<function=other>\n<parameter=n>\n1\n</parameter>\n</function>", calls=(("other", '{"n": "1"}'),)
    ),
    "qwen3-coder, cut in a text": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1\n</parameter>\n<parameter=city>\nOs",
        calls=(("weather", '{"days": 1, "city": "Os'),),
        errors=1,
    ),
    "qwen3-coder, cut in a number": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1",
        calls=(("weather", '{"days": 1'),),
        errors=1,
    ),
    "qwen3-coder, cut between parameters": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<param",
        calls=(("weather", '{"city": "Oslo"'),),
        errors=1,
    ),
    "qwen3-coder, cut before the first": Golden(
        "qwen3-coder", "<tool_call>\n<function=stop>\n", calls=(("stop", "{"),), errors=1
    ),
    "glm, cut": Golden(
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os",
        calls=(("weather", '{"city": "Os'),),
        errors=1,
    ),
    "qwen3-coder, closing tags in a text": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=other>\n<parameter=a>\nthe tag </function>\n</tool_call> ends it\n</parameter>\n"
        "<parameter=b>\n</function>\n</parameter>\n</function>\n</tool_call>\nDone.",
        "Done.",
        calls=(("other", r'{"a": "the tag </function>\n</tool_call> ends it", "b": "</function>"}'),),
    ),
    "qwen3-coder, parameters that are not closed": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=weather>\n<parameter=city>\nRiga\n</parameter>\n<parameter=days>\n2\n</function>\n</tool_call>\n",
        calls=(OSLO, RIGA),
    ),
    "qwen3-coder, cut behind a closing tag in a text": Golden(
        "qwen3-coder",
        "<tool_call>\n<function=other>\n<parameter=a>\nthe tag </function> ends",
        calls=(("other", '{"a": "the tag </function> ends'),),
        errors=1,
    ),
    "glm, a closing tag in a text": Golden(
        "glm",
        "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>say </tool_call> here</arg_value>\n</tool_call>",
        calls=(("other", '{"a": "say </tool_call> here"}'),),
    ),
    "qwen3-coder, not a number": Golden(
        "qwen3-coder",
        "<tool_call><function=weather><parameter=days>many</parameter></function></tool_call>",
        calls=(("weather", '{"days": "many"}'),),
    ),
    "glm": Golden(
        "glm",
        "<think>hm</think><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        reasoning="hm",
        calls=(("weather", '{"city": "Oslo", "days": 2}'),),
    ),
    # Llama 3
    "llama3": Golden("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', calls=(OSLO,)),
    "llama3, two": Golden(
        "llama3",
        '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "stop", "parameters": {}}',
        calls=(OSLO, ("stop", "{}")),
    ),
    "llama3, python_tag": Golden(
        "llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', calls=(OSLO,)
    ),
    "llama3, an unknown tool": Golden(
        "llama3", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}'
    ),
    "llama3, JSON": Golden("llama3", ' {"city": "Oslo", "n": [1]}\n', ' {"city": "Oslo", "n": [1]}\n'),
    "llama3, a set": Golden("llama3", "{1, 2} is a set", "{1, 2} is a set"),
    "llama3, later": Golden("llama3", 'A call: {"name": "weather"}', 'A call: {"name": "weather"}'),
    # Mistral
    "mistral, old": Golden(
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "weather", "arguments": {"city": "Riga", "days": 2}}]',
        calls=(OSLO, RIGA),
    ),
    "mistral, new": Golden(
        "mistral",
        'Sure.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]stop[ARGS]{}',
        "Sure.",
        calls=(OSLO, ("stop", "{}")),
    ),
    "mistral, id": Golden("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "Oslo"}', calls=(OSLO,)),
    "mistral, reasoning": Golden(
        "mistral", '[THINK]hm[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', reasoning="hm", calls=(OSLO,)
    ),
    "mistral, no arguments": Golden("mistral", "[TOOL_CALLS]stop[ARGS]", calls=(("stop", "{}"),)),
    # Gemma
    "gemma4": Golden(
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:weather{city:<|"|>Os}lo<|"|>,days:3,exact:true,'
        'tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|><|tool_call>call:stop{}<tool_call|>',
        reasoning="hm",
        calls=(("weather", '{"city": "Os}lo", "days": 3, "exact": true, "tags": ["a", "b"]}'), ("stop", "{}")),
    ),
    "gemma4, a tag in a string": Golden(
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a <tool_call|> }b<|"|>}<tool_call|>',
        calls=(("weather", '{"city": "a <tool_call|> }b"}'),),
    ),
    "functiongemma": Golden(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>New York<escape>,where:{lat:1.5,note:north}}<end_function_call>",
        calls=(("weather", '{"city": "New York", "where": {"lat": 1.5, "note": "north"}}'),),
    ),
    "functiongemma, cut": Golden(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>New",
        calls=(("weather", "{city:<escape>New"),),
        errors=1,
    ),
    "gemma, tool_code": Golden(
        "gemma",
        "Let me see.\n```tool_code\nprint(weather('Oslo', days=2))\n```",
        "Let me see.",
        calls=(("weather", '{"city": "Oslo", "days": 2}'),),
    ),
    "gemma, a list": Golden(
        "gemma",
        "[weather(city='Oslo, \"N\\')'), stop()]",
        calls=(("weather", '{"city": "Oslo, \\"N\')"}'), ("stop", "{}")),
    ),
    "gemma, a comment": Golden(
        "gemma", "```tool_code\n# it's in {Oslo}\nweather(city='Oslo')  # \"\n```", calls=(OSLO,)
    ),
    "gemma, JSON": Golden("gemma", '{"name": "weather", "parameters": {"city": "Oslo"}}', calls=(OSLO,)),
    "gemma, no call": Golden("gemma", "[see (1)] is a list", "[see (1)] is a list"),
    "gemma, unknown code": Golden("gemma", "```tool_code\nx + 1\n```", "```tool_code\nx + 1\n```", notes=1),
    # others
    "llama4": Golden("llama4", "[weather(city='Oslo')]", calls=(OSLO,)),
    "lfm2": Golden("lfm2", "<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>Wait.", "Wait.", calls=(OSLO,)),
    "lfm2, names that Python does not have": Golden(
        "lfm2",
        "<|tool_call_start|>[get-time.v2(city='is-it(1)'), class(a=1), a:b()]<|tool_call_end|>",
        calls=(("get-time.v2", '{"city": "is-it(1)"}'), ("class", '{"a": 1}'), ("a:b", "{}")),
    ),
    "llama4, a hyphen": Golden("llama4", "[get-time.v2(city='x')]", calls=(("get-time.v2", '{"city": "x"}'),)),
    "llama4, a difference": Golden("llama4", "[see-it (1-2)] is a list", "[see-it (1-2)] is a list"),
    "lfm2, reserved names": Golden(
        "lfm2",
        "<|tool_call_start|>[weather(city='from=1', from='a', class=None)]<|tool_call_end|>",
        calls=(("weather", '{"city": "from=1", "from": "a", "class": null}'),),
    ),
    "lfm2, a tag in a string": Golden(
        "lfm2",
        "<|tool_call_start|>[weather(city='<|tool_call_end|>')]<|tool_call_end|>",
        calls=(("weather", '{"city": "<|tool_call_end|>"}'),),
    ),
    "phi4-mini": Golden(
        "phi4-mini", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>', calls=(OSLO,)
    ),
    "phi4-mini, functools": Golden(
        "phi4-mini", 'functools[{"name": "weather", "arguments": {"city": "Oslo"}}]', calls=(OSLO,)
    ),
    "gemma, as it was told": Golden(
        "gemma", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', calls=(OSLO,)
    ),
    "gemma, a block of JSON": Golden(
        "gemma", '```json\n{"name": "weather", "parameters": {"city": "Oslo"}}\n```', calls=(OSLO,)
    ),
    "gemma, another block of JSON": Golden("gemma", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
    "seed": Golden(
        "seed",
        "<seed:think>hm</seed:think>Hm.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Riga</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        "Hm.",
        "hm",
        calls=(RIGA,),
    ),
    "deepseek-v3.2": Golden(
        "deepseek-v3.2",
        '<think>hm</think>Hm.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true"> 3 <b>\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">{"a": [null]}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Hm.",
        "hm",
        calls=(("weather", r'{"city": " 3 <b>\n", "days": 2, "more": {"a": [null]}}'), ("stop", "{}")),
    ),
    "deepseek-v4": Golden(
        "deepseek-v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        calls=(OSLO,),
    ),
    "deepseek-v4, a text in the place of JSON": Golden(
        "deepseek-v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="false">Oslo'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        calls=(OSLO,),
    ),
    "deepseek-v4, no number of JSON": Golden(
        "deepseek-v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="days" string="false">[NaN]'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
        calls=(("weather", '{"days": "[NaN]"}'),),
    ),
    "deepseek-v4, cut": Golden(
        "deepseek-v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Os',
        calls=(("weather", '{"city": "Os'),),
        errors=1,
    ),
    "command-r-plus": Golden(
        "command-r-plus",
        'Action: ```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Oslo"}\n    },\n'
        '    {\n        "tool_name": "stop",\n        "parameters": {}\n    }\n]\n```',
        calls=(OSLO, ("stop", "{}")),
    ),
    "command-r-plus, text": Golden(
        "command-r-plus", "Action: none. ```json\n{}\n```", "Action: none. ```json\n{}\n```"
    ),
    "minimax": Golden(
        "minimax",
        '<think>hm</think>\nHm.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        '</invoke>\n<invoke name="weather">\n<parameter name="city">Riga</parameter>\n<parameter name="days">2</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "Hm.",
        "hm",
        calls=(OSLO, RIGA),
    ),
    "minimax, no arguments": Golden(
        "minimax", '<minimax:tool_call><invoke name="stop"></invoke></minimax:tool_call>', calls=(("stop", "{}"),)
    ),
    "functionary": Golden(
        "functionary",
        'Hm.<function=weather>{"city": "Oslo"}</function><function=stop>{}</function>',
        "Hm.",
        calls=(OSLO, ("stop", "{}")),
    ),
    "olmo3": Golden(
        "olmo3",
        'Hm.<function_calls>weather(city="Oslo")\nweather(city="a", exact=true, tags=["null", null])</function_calls>',
        "Hm.",
        calls=(OSLO, ("weather", '{"city": "a", "exact": true, "tags": ["null", null]}')),
    ),
    "apertus": Golden(
        "apertus",
        '<|inner_prefix|>hm<|inner_suffix|>Hm.<|tools_prefix|>[{"weather": {"city": "Oslo"}}, {"stop": {}}]<|tools_suffix|>',
        "Hm.",
        "hm",
        calls=(OSLO, ("stop", "{}")),
    ),
    "apertus, two in an object": Golden(
        "apertus",
        '<|tools_prefix|>[{"weather": {"city": "Oslo"}, "stop": null}, {}]<|tools_suffix|>',
        calls=(OSLO, ("stop", "{}")),
    ),
    "apertus, incomplete": Golden(
        "apertus", '<|tools_prefix|>[{"weather": {"city": "Os', calls=(("weather", '{"city": "Os'),), errors=1
    ),
    "apertus, no arguments": Golden(
        "apertus", '<|tools_prefix|>[{"stop"}]<|tools_suffix|>', calls=(("stop", "{}"),), notes=1
    ),
    "hunyuan": Golden(
        "hunyuan",
        '<think>hm</think>\n<answer>\nHm.\n<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>\n'
        "</answer>",
        "Hm.",
        "hm",
        calls=(OSLO,),
    ),
    "ernie": Golden("ernie", "<think>hm</think>\n\n<response>\nYes.\n</response>\n", "Yes.", "hm"),
    "ernie, a call": Golden(
        "ernie",
        '<think>hm</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n',
        reasoning="hm",
        calls=(OSLO,),
    ),
    "nemotron": Golden(
        "nemotron", 'Hm.<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>', "Hm.", calls=(OSLO,)
    ),
    "granite": Golden("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]', calls=(OSLO,)),
    "command-r": Golden(
        "command-r",
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Oslo"}}\n]<|END_ACTION|>',
        reasoning="hm",
        calls=(OSLO,),
    ),
    "command-r, text": Golden("command-r", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>", "Hi."),
    "deepseek": Golden(
        "deepseek",
        "<think>\nhm\n</think>\n\nSure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        "hm",
        (OSLO, ("stop", "{}")),
    ),
    "deepseek, 3.1": Golden(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        calls=(OSLO,),
    ),
    "kimi": Golden(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        calls=(OSLO,),
    ),
    "harmony": Golden(
        "harmony",
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        "Hi.",
        "The user asks.",
    ),
    "granite, closed": Golden(
        "granite", '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>', calls=(OSLO,)
    ),
    "harmony, two texts": Golden(
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        "I look.\nHi.",
    ),
    "harmony, a call": Golden(
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}',
        "I look.",
        "hm",
        (OSLO,),
    ),
    "harmony, the recipient first": Golden(
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        None,
        "a\nb",
        (OSLO,),
    ),
}
