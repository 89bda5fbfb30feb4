"""How the format of a model's calls is found: in its chat template, or in the description of its checkpoint."""

# ruff: noqa: RUF001  # the names of DeepSeek's tokens

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_samples import TEMPLATES
from vocab_samples import tokenizer_json, write_json

import llamac
from golden.cases import GPT2
from golden.tiny_checkpoints import write_checkpoint
from llamac.export.convert import export
from llamac.tools.formats import FORMATS, detect

# The parts of published templates that write or describe calls.
PUBLISHED = {
    "hermes": '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}',
    "qwen3-coder": "If you call a function, reply: <tool_call>\\n<function=example>\\n<parameter=a>\\n1\\n</parameter>",
    "seed": "{%- set toolcall_begin_token = '<seed:tool_call>' -%}{{ '\\n<function=' }}{{ '\\n<parameter=' }}",
    "minimax": '{%- set toolcall_begin_token = \'<minimax:tool_call>\' -%}<invoke name="a">\\n<parameter name="b">1',
    "functionary": "{{ '<function=' + tool_call['function']['name'] + '>' }}{{ '<|python_tag|>' }}",
    "glm": "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\\n<arg_value>{{ v }}</arg_value></tool_call>",
    "llama3": '<|start_header_id|>{{- \'{"name": "\' + tool_call.name + \'", "parameters": \' }}<|python_tag|>',
    "llama4": "<|header_start|>assistant<|header_end|>{{- '<|python_start|>' }}{{ '<|python_end|>' }}",
    "mistral": '{{- "[TOOL_CALLS][" }}{{ out }}{{- "]" }}',
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' }}{{ '}<tool_call|>' }}",
    "functiongemma": "{{- '<start_function_call>call:' + function['name'] + '{' }}",
    "phi4-mini": "<|system|>{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}",
    "nemotron": "{{- '<TOOLCALL>[' -}}{{- ']</TOOLCALL>' -}}",
    "granite": "<|start_of_role|>assistant_tool_call<|end_of_role|><|tool_call|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.{{ name }} <|constrain|>json<|message|>",
    "command-r": "<|START_ACTION|>[{% for tc in message.tool_calls %}<|END_ACTION|>",
    "command-r-plus": "Write \\'Action:\\' followed by a json-formatted list of actions that you want to perform",
    "deepseek-v3.2": "{%- set dsml = '｜DSML｜' -%}{{ '<' + dsml + 'function_calls>' }}{{ m.tool_calls }}",
    "deepseek-v4": "{{ '<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"' + call.name }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>",
    "lfm2": "<|tool_list_start|>[{{ tools }}]<|tool_list_end|><|tool_call_start|>",
    "olmo3": "{{- '<function_calls>' + message['function_calls'] + '</function_calls>' }}",
    "apertus": "{%- set tool_calls_token = '<|tools_prefix|>' -%}{{ inner_token }}",
    "hunyuan": "{{ '<answer>' }}{{ '<tool_calls>' + calls + '</tool_calls>' }}",
    "ernie": "{{ '<tool_call>\\n' + call + '</tool_call>\\n' }}{{ '<response>\\n' + content + '</response>' }}",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_template_reveals_its_format(name: str) -> None:
    found = detect(PUBLISHED[name])
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("text", ["List of tools: <|tool_list_start|>[", '{{ "List of tools: [" }}{{ tools }}'])
def test_a_template_that_only_lists_tools_reveals_its_format(text: str) -> None:
    found = detect(text)
    assert found is not None
    assert found.name == "lfm2"


def test_every_format_that_templates_reveal_is_tested() -> None:
    assert set(PUBLISHED) == {name for name, form in FORMATS.items() if form.marks}


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen", "hermes"), ("llama31", "llama3"), ("harmony", "harmony"), ("chatml", None), ("gemma", None)],
)
def test_whole_templates(name: str, form: str | None) -> None:
    found = detect(TEMPLATES[name])
    assert (None if found is None else found.name) == form


def exported(folder: Path, response: Any) -> Path:
    """A model file of a checkpoint with this description of its answers."""
    config = {"chat_template": "U{# <tool_call> #}", "response_template": response}
    source = write_json(write_checkpoint(folder / "hf", GPT2), tokenizer=tokenizer_json(), tokenizer_config=config)
    export(source, folder / "model.bin", probe_source=None)
    return folder / "model.bin"


def test_the_description_of_a_checkpoint_is_exported_and_decides(tmp_path: Path) -> None:
    calls = {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}}
    spec = {"start_anchor": "U", "fields": {"tool_calls": calls, "content": {}}}
    with llamac.load(exported(tmp_path, spec)) as model:
        assert model.tool_format == "response_template"
        assert model.response_format is not None
        tool = {"name": "f", "parameters": {"type": "object", "properties": {}}}
        message = [{"role": "user", "content": "x"}]
        with pytest.raises(llamac.UnsupportedError, match="cannot be forced in the format 'response_template'"):
            model.chat(message, tools=[tool], tool_choice="f", max_tokens=1)


def test_a_description_that_is_not_known_is_ignored_with_a_warning(tmp_path: Path) -> None:
    with llamac.load(exported(tmp_path, {"fields": {}})) as model:
        with pytest.warns(llamac.LlamacWarning, match="start_anchor.*the format of answers is guessed"):
            assert model.response_format is None
        assert model.tool_format == "hermes"


def test_a_description_that_is_no_object_is_not_exported(tmp_path: Path) -> None:
    with llamac.load(exported(tmp_path, "yes")) as model:
        assert model.response_format is None
