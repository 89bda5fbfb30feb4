"""Chat templates: the same text as transformers, where templates are found, limits on hostile ones, prompts."""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_samples import CHATML, CHATS, ESCAPES, HOSTILE, PUBLISHED, TEMPLATES, TOOLS, USER
from vocab_samples import byte_level_gguf, gguf_file, tokenizer_json, write_json

import llamac
from commands import GREEDY, Command
from golden.cases import GPT2
from golden.tiny_checkpoints import write_checkpoint
from llamac import ChatTemplate, ChatTemplateError
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.text import chat_process
from waiting import wait_until

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
HI = [{"role": "user", "content": "Hi"}]
REAL_PYTHON = sys.executable


# ---- agreement with transformers


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    rendered = 0
    for chat in CHATS.values():
        given = [{key: value for key, value in message.items() if value is not None} for message in chat]
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False, "tools": TOOLS},
            {"documents": [{"title": "T", "text": "x"}], "enable_thinking": False, "controls": {"a": 1}},
            {"add_generation_prompt": True, "date_string": "1 Jan 2030", "bos_token": "<bos>"},
        ):
            arguments: dict[str, Any] = {"add_generation_prompt": False, **options}
            try:
                expected = utils.render_jinja_template(
                    [given], chat_template=TEMPLATES[name], **{**TOKENS, **arguments}
                )
            except Exception:
                with pytest.raises(ChatTemplateError):
                    template.render(chat, **arguments)
                continue
            assert template.render(chat, **arguments) == expected[0][0]
            rendered += 1
    assert rendered >= 8


FILTERS = r"""
-5|abs
'a b'|title|capitalize
'a'|center(5)
[1, 2, 3]|batch(2)|list
'é<'|escape
5000000|filesizeformat
[1, 2]|first
'%s!'|format('a')
[{'a': 1}, {'a': 2}]|groupby('a')|list
'a\nb'|indent(2)
{'a': 1}|items|list
[1, 2]|join(',')
[[1], [2]]|map('first')|list
[3, 1]|sort|min
{'b': 1, 'a': 2}|dictsort
{'a': [1, 'é']}|pprint
[1, 2]|reject('odd')|list
'aa'|replace('a', 'b')
2.5|round(1)
[1, 2, 3]|slice(2)|list
'<b>a &amp; b</b>'|striptags
[1, 2]|sum
'a b c'|truncate(3)
'see http://a.b/c'|urlize
{'a': 'é b'}|urlencode
'a b c d'|wordwrap(3)
'a b'|wordcount
{'a': 1}|xmlattr
[1, 1]|unique|list
'2'|int + 2
'é'|tojson(ensure_ascii=true)
'x' is string
{'b': 1, 'a': [1]}|tojson(indent=2, sort_keys=true, separators=(',', ': '))
lipsum(n=1)|length > 9
strftime_now('%Y') == (strftime_now('%Y')|int)|string
dict(a=1)|length
'%05.1f' % 2.345
cycler('a', 'b').next()
'ß'|upper|lower
"""


@pytest.mark.parametrize("expression", FILTERS.strip().splitlines())
def test_filters_render_as_in_transformers(expression: str) -> None:
    """Some filters make jinja2 or Python load more modules, but the worker process cannot open files by then."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = f"{{{{ {expression} }}}}"
    try:
        expected = utils.render_jinja_template([HI], chat_template=template)[0][0]
    except Exception as error:
        with pytest.raises(ChatTemplateError, match=type(error).__name__):
            ChatTemplate(template).render(HI)
    else:
        assert ChatTemplate(template).render(HI) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_render_the_published_formats(name: str) -> None:
    assert ChatTemplate(TEMPLATES[name], TOKENS).render(HI) == PUBLISHED[name]


def test_a_conversation_in_the_harmony_format() -> None:
    """gpt-oss's format, as OpenAI's guide describes it: a call of a function, its result, then the next message."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer"},
            "units": {"type": "array", "items": {"enum": ["C", "F"]}},
        },
        "required": ["city"],
    }
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": parameters}},
        {"type": "function", "function": {"name": "place", "description": "Says where.", "parameters": {}}},
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": None, "reasoning": "I must look.", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "content": "20"},
    ]
    template = ChatTemplate(TEMPLATES["harmony"])
    head = (
        "<|start|>system<|message|>You are a model.\nCurrent date: 2025-06-28\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// Tells it.\ntype weather = (_: {\n// Where\ncity: string,\n"
        'days?: number,\nunits?: "C" | "F"[],\n}) => any;\n\n// Says where.\ntype place = () => any;\n\n'
        "} // namespace functions<|end|><|start|>user<|message|>Is it warm?<|end|>"
    )
    called = (
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"20"<|end|>'
    )
    thought = "<|start|>assistant<|channel|>analysis<|message|>I must look.<|end|>"
    options: dict[str, Any] = {"tools": tools, "reasoning_effort": "high", "current_date": "2025-06-28"}
    assert template.render(chat, **options) == f"{head}{thought}{called}<|start|>assistant"
    # thoughts before an answer are left out
    answer = {"role": "assistant", "content": "Yes, 20.", "reasoning": "It is 20."}
    more = [*chat, answer, {"role": "user", "content": "Thanks"}]
    final = "<|start|>assistant<|channel|>final<|message|>Yes, 20."
    expected = f"{head}{called}{final}<|end|><|start|>user<|message|>Thanks<|end|><|start|>assistant"
    assert template.render(more, **options) == expected
    assert (
        template.render([*chat, answer], add_generation_prompt=False, **options) == f"{head}{called}{final}<|return|>"
    )
    with pytest.raises(ChatTemplateError, match="a result of a tool without a call"):
        template.render([chat[3]], **options)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen", "gemma"])
def test_the_last_message_can_be_continued(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    contents: list[Any] = ["It is", "It is ", " It is\n\n", [{"type": "text", "text": "It"}]]
    for content in contents:
        chat: list[dict[str, Any]] = [USER, {"role": "assistant", "content": content}]
        if isinstance(content, list) and name != "gemma":
            continue
        (expected,), _ = utils.render_jinja_template(
            [chat], chat_template=TEMPLATES[name], continue_final_message=True, **TOKENS
        )
        assert template.render(chat, continue_final_message=True) == expected
        assert chat[-1]["content"] == content
    with pytest.raises(ArgumentError, match="no text to continue"):
        template.render([{"role": "assistant", "content": [1]}], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="omits or changes"):
        ChatTemplate("{{ messages[0].content[:1] }}").render(HI, continue_final_message=True)


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", "note"])
def test_another_field_of_the_last_message_can_be_continued(field: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = "{% for m in messages %}<{{ m.reasoning_content }}{{ m.note }}>{{ m.content }}{% endfor %}"
    chat = [{"role": "assistant", field: "because ", "content": "x"}]
    options: dict[str, Any] = {"continue_final_message": field}
    (expected,), _ = utils.render_jinja_template([chat], chat_template=template, **options)
    assert ChatTemplate(template).render(chat, **options) == expected
    with pytest.raises(ArgumentError, match="does not read the other of messages"):
        ChatTemplate(template).render([{"other": "x"}], continue_final_message="other")


def test_templates_receive_only_plain_data() -> None:
    class Role(str, enum.Enum):
        USER = "user"

    @dataclasses.dataclass
    class Point:
        x: int

    seen = ChatTemplate("{{ messages[0] }} {{ more }}").render(
        [{"role": Role.USER, "content": "a", "none": None}], more=(Point(1), {2: True}, [1.5, None])
    )
    assert seen == "{'role': 'user', 'content': 'a'} ({'x': 1}, {2: True}, [1.5, None])"
    deep: list[Any] = []
    deep.append(deep)
    for wrong, message in (({"a": object()}, "not object"), ({"a": b"x"}, "not bytes"), ({"a": deep}, "nested")):
        with pytest.raises(ArgumentError, match=message):
            ChatTemplate("x").render(HI, **wrong)
    bad: Any
    for bad in ("Hi", b"Hi", {"role": "user"}, None, 5):
        with pytest.raises(ArgumentTypeError, match="messages must be a list of dicts"):
            ChatTemplate("x").render(bad)
    for bad in (["Hi"], [HI]):
        with pytest.raises(ArgumentTypeError, match=r"messages\[0\] must be a dict"):
            ChatTemplate("x").render(bad)
    with pytest.raises(ArgumentError, match="messages is empty"):
        ChatTemplate("x").render([])
    with pytest.raises(ArgumentTypeError, match=r"tools\[0\] must be"):
        ChatTemplate("x").render(HI, tools=[{}.get])  # type: ignore[list-item]
    for bad in (None, {"default": 1}, {1: "x"}):
        with pytest.raises(ArgumentTypeError, match="templates must be a dict of str to str"):
            ChatTemplate(bad)


# ---- errors and limits


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only\ntexts') }}", "refuses these messages: only\ntexts"),
        ("{{ a.b }}", "UndefinedError: 'a' is undefined"),
        ("a\n{% if %}", r"TemplateSyntaxError: .* \(line 2\)"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        (
            "{% set ns = namespace(_x=1) %}",
            "SecurityError: a namespace has no attribute '_x': names begin with a letter",
        ),
        ("{{ 'a' * (2 ** 24 + 1) }}", "does too much: the text has more than 16777216 characters"),
    ],
)
@pytest.mark.usefixtures("rendering")
def test_errors_in_templates_are_reported(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(template).render(HI)
    assert ChatTemplate(CHATML).render(HI) == PUBLISHED["chatml"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[BaseException] = []

    def render() -> None:
        try:
            ChatTemplate(HOSTILE[name]).render(HI)
        except BaseException as error:
            caught.append(error)

    with monkeypatch.context() as limits:
        limits.setattr(chat_process.render, "__defaults__", (1.5, 1 << 20))
        thread = threading.Thread(target=render)
        thread.start()
        thread.join()
    assert [type(error) for error in caught] == [ChatTemplateError], caught
    assert ChatTemplate(CHATML).render(HI) == PUBLISHED["chatml"]


@pytest.mark.parametrize("template", ESCAPES)
def test_escapes_from_the_sandbox_are_errors(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(template).render(HI)


def test_the_worker_cannot_open_files_and_ends_with_its_parent() -> None:
    ChatTemplate("x").render(HI)
    child = chat_process.WORKER.child
    assert child is not None
    limits = Path(f"/proc/{child.pid}/limits")
    if limits.exists():
        values = {line[:25].strip(): line[26:].split()[0] for line in limits.read_text().splitlines()}
        assert (values["Max open files"], values["Max file size"]) == ("0", "0")
        assert int(values["Max address space"]) == 1 << 29
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(20) == 0
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"  # rendered by a new process


@pytest.fixture
def no_worker() -> Iterator[None]:
    """Stop the worker before and after the test, so that its renderings start another one."""
    chat_process.WORKER.stop()
    yield
    chat_process.WORKER.stop()


@pytest.mark.usefixtures("no_worker")
def test_the_process_can_start_before_the_first_rendering() -> None:
    chat_process.prepare("{{ raise_exception('no messages') }}")
    wait_until(lambda: chat_process.WORKER.child is not None)
    child = chat_process.WORKER.child
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"
    assert chat_process.WORKER.child is child


@pytest.mark.usefixtures("no_worker")
def test_a_process_that_cannot_start_early_is_reported_by_the_first_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamac.text.worker._interpreters", list)
    chat_process.prepare("x")
    with pytest.raises(UnsupportedError, match=r"sys\.executable"):
        ChatTemplate("x").render(HI)


@pytest.mark.usefixtures("no_worker")
def test_a_failed_process_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as limits:
        limits.setattr("subprocess.Popen", fail)
        with pytest.raises(ChatTemplateError, match=r"separate process, which cannot be started: .*unavailable"):
            ChatTemplate("x").render(HI)
    assert ChatTemplate("x").render(HI) == "x"


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize("name", ["", "app", "python3", "python-that-answers", "missing/python3"])
def test_python_is_found_where_sys_executable_is_another_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that embeds Python is never started, because it could do anything."""
    trace = tmp_path / "trace"
    program(tmp_path / "app", f"#!/bin/sh\ntouch {trace}\nexit 1\n")
    program(tmp_path / "python3", "#!/bin/sh\nexit 1\n")
    program(tmp_path / "python-that-answers", "#!/bin/sh\nprintf '\\002\\0\\0\\0\\0\\0\\0\\0{}'\ncat > /dev/null\n")
    monkeypatch.setattr(sys, "executable", name and str(tmp_path / name))
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"
    assert not trace.exists()


@pytest.mark.usefixtures("no_worker")
def test_the_error_lists_the_python_programs_that_were_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefix", "exec_prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(UnsupportedError, match=r"separate Python 3\.\d+ process.*sys\.executable is '/bin/true'\):"):
        ChatTemplate("x").render(HI)
    found = program(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 7\n")
    with pytest.raises(UnsupportedError, match=rf"\({found}: it ended or did not answer \(exit code 7\)\)"):
        ChatTemplate("x").render(HI)
    version = f"0.{sys.version_info[1]}"
    fake = f"import struct, sys\nt = b'{version}'\n"
    fake += "sys.stdout.buffer.write(struct.pack('<Q', len(t)) + t)\nsys.stdout.flush()\nsys.stdin.read()\n"
    program(tmp_path / "bin" / "python3", f"#!{REAL_PYTHON}\n{fake}")
    with pytest.raises(UnsupportedError, match=r"it is another version of Python, '0\.\d+'"):
        ChatTemplate("x").render(HI)


def test_threads_can_render_concurrently() -> None:
    results: list[str] = []

    def render(index: int) -> None:
        for step in range(10):
            results.append(
                ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": f"{index} {step}"}])
            )

    threads = [threading.Thread(target=render, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(f"{index} {step}" for index in range(4) for step in range(10))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_worker() -> None:
    ChatTemplate("x").render(HI)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi" else 2
            chat_process.WORKER.stop()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ChatTemplate("{{ messages[0].content }}y").render(HI) == "Hiy"


# ---- where templates are found


def test_templates_are_read_from_directories_and_files(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplate.from_file(tmp_path)
    config: dict[str, Any] = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "chat_template": "{{ bos_token }}c"}
    write_json(tmp_path, tokenizer_config=config)
    assert ChatTemplate.from_file(tmp_path).render(HI) == "<b>c"
    found = ChatTemplate.from_file(tmp_path / "tokenizer_config.json")
    assert found.special_tokens == {"bos_token": "<b>", "eos_token": "<e>"}
    write_json(tmp_path, special_tokens_map={"pad_token": "<p>"})
    assert ChatTemplate.from_file(tmp_path).special_tokens["pad_token"] == "<p>"
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    write_json(tmp_path, tokenizer_config=config | {"chat_template": named})
    found = ChatTemplate.from_file(tmp_path)
    assert [found.render(HI), found.render(HI, tools=TOOLS), found.render(HI, template="rag")] == ["d", "t", "r"]
    with pytest.raises(ArgumentError, match="no chat template named 'x', only 'default', 'rag', 'tool_use'"):
        found.render(HI, template="x")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("own {{ eos_token }}")
    with pytest.raises(ArgumentError, match="no chat template is named 'default': choose one of 'rag'"):
        ChatTemplate.from_file(tmp_path).render(HI)
    (tmp_path / "chat_template.jinja").write_text("file\n", encoding="utf-8")
    found = ChatTemplate.from_file(tmp_path)  # template files override the config, as in transformers
    assert found.templates == {"rag": "own {{ eos_token }}", "default": "file\n"}
    assert found.render(HI, tools=TOOLS) == "file"
    assert ChatTemplate.from_file(tmp_path / "chat_template.jinja").templates == {"default": "file\n"}


PARTS = "{% for m in messages %}{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line.text }}\
{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def test_a_template_that_reads_only_parts_of_contents_gets_parts() -> None:
    """SmolVLM's does. With a text, it would write nothing."""
    template = ChatTemplate(PARTS)
    assert (
        template.render(HI) == template.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]) == "Hi:"
    )
    assert template.render(HI, continue_final_message=True) == "Hi"
    assert [run.text for run in template.render_runs(HI, ["<b>"])] == ["Hi:"]
    both = "{% if messages[0].content is string %}{{ messages[0].content }}!{% endif %}" + PARTS
    assert ChatTemplate(both).render(HI) == "Hi!:"  # it also reads texts, so it gets what was given


def test_the_template_of_a_model_with_images_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    """transformers' processors wrote it; the tokenizer's own takes precedence."""
    write_json(tmp_path, chat_template={"chat_template": "{{ bos_token }}p"}, tokenizer_config={"bos_token": "<b>"})
    assert ChatTemplate.from_file(tmp_path).render(HI) == "<b>p"
    assert ChatTemplate.from_file(tmp_path / "chat_template.json").render(HI) == "<b>p"
    write_json(tmp_path, tokenizer_config={"chat_template": "t"})
    assert ChatTemplate.from_file(tmp_path).render(HI) == "t"


def test_named_templates_and_model_specific_tokens_are_read(tmp_path: Path) -> None:
    extra = {"image_token": {"content": "<img>"}, "audio_token": "<a>"}
    config = {"chat_template": {"default": "{{ image_token ~ audio_token }}", "tool_use": "t"}}
    write_json(tmp_path, tokenizer_config=config | {"extra_special_tokens": extra})
    found = ChatTemplate.from_file(tmp_path)
    assert (found.render(HI), found.render(HI, tools=TOOLS)) == ("<img><a>", "t")
    write_json(tmp_path, tokenizer_config=config | {"extra_special_tokens": ["<x>"]})
    assert ChatTemplate.from_file(tmp_path).special_tokens == {}
    of_class = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<e>", "pad_token": None}
    write_json(tmp_path, tokenizer_config=config | of_class)
    assert ChatTemplate.from_file(tmp_path).special_tokens == {"eos_token": "<e>", "unk_token": "<|endoftext|>"}


def test_templates_are_read_from_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    more = [("tokenizer.chat_template", "{{ bos_token }}d"), ("tokenizer.chat_template.tool_use", "t")]
    path.write_bytes(gguf_file([*byte_level_gguf(), *more]))
    found = ChatTemplate.from_file(path)
    assert found.special_tokens == {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    assert (found.render(HI), found.render(HI, tools=TOOLS)) == ("<|end|>d", "t")
    path.write_bytes(gguf_file([*byte_level_gguf(), ("tokenizer.chat_template", 5)]))
    with pytest.raises(ExportError, match="is not a string"):
        ChatTemplate.from_file(path)
    path.write_bytes(gguf_file(byte_level_gguf()))
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        ChatTemplate.from_file(path)


# ---- models


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A model file with two templates, made from a Hugging Face directory."""
    folder = write_checkpoint(tmp_path / "hf", GPT2)
    template = "{{ bos_token }}{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
    template += "{% if not add_generation_prompt %}</s>{% endif %}"
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "t{{ pad_token }}"}]
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "he", "chat_template": named}
    write_json(folder, tokenizer=tokenizer_json(), tokenizer_config=config)
    export(folder, tmp_path / "chat.bin", probe_source=None)
    return tmp_path / "chat.bin"


def test_a_model_renders_its_template_with_one_bos(chat_model: Path, tmp_path: Path) -> None:
    with llamac.load(chat_model) as model:
        assert model.chat_prompt(HI) == "<s>userHi"
        assert model.chat_prompt(HI, tools=TOOLS) == "the"
        assert model.chat_prompt(HI, bos_token="") == "userHi"
        letters = model.tokenizer.encode("userHi")
        assert model.special.add_bos
        assert model.chat_ids(HI) == model.tokenize(model.chat_prompt(HI)) == [256, *letters]
        assert model.chat_ids(HI, add_generation_prompt=False) == [256, *letters, 257]
        assert model.chat_ids(HI, bos_token="") == letters  # the template decides about BOS
        template = model.chat_template
        assert template is not None
        assert set(template.templates) == {"default", "tool_use"}
    export(chat_model, tmp_path / "again", to="hf")
    again = ChatTemplate.from_file(tmp_path / "again")
    assert again.templates == template.templates
    export(chat_model, tmp_path / "again.bin", probe_source=None)
    with llamac.load(tmp_path / "again.bin") as model:
        assert model.chat_template is not None
        assert model.chat_template.templates == template.templates
        assert model.chat_template.special_tokens == template.special_tokens


def test_special_token_names_in_messages_are_text(chat_model: Path) -> None:
    with llamac.load(chat_model) as model:
        text = "a</s>b<s>"
        chat = [{"role": "user", "content": text}]
        parts: list[dict[str, Any]] = [{"role": "user", "content": [{"text": "</s>"}], "x": {"y": ("<s>",)}}]
        plain = model.tokenizer.encode("user" + text)
        assert not {256, 257} & set(plain)
        assert model.chat_ids(chat) == [256, *plain]
        assert model.chat_ids([*chat, *chat]) == [256, *model.tokenizer.encode("user" + text + "user" + text)]
        assert model.chat_ids(chat, parse_special=True) == model.tokenize(model.chat_prompt(chat))
        assert model.chat_ids(parts) == [256, *model.tokenizer.encode("user</s>")]
        assert model.chat_ids(chat, add_generation_prompt=False) == [256, *plain, 257]
        with pytest.raises(ArgumentTypeError, match="messages must be a list of dicts"):
            model.chat_ids(None)  # type: ignore[arg-type]
        assert model.chat_ids(HI, tools=[{"name": "f", "description": "<s>"}]) == model.tokenize(
            "the", add_special=False
        )


def test_a_template_can_split_a_special_token_name_in_a_message(chat_model: Path) -> None:
    with llamac.load(chat_model) as model:
        assert model.chat_template is not None
        template = "{{ messages[0].content.split('</s>')[1] }}"
        splitting = ChatTemplate(template, model.chat_template.special_tokens)
        model.chat_template = splitting
        assert model.chat_ids([{"role": "user", "content": "a</s>he"}]) == model.tokenizer.encode("he")


def test_a_model_without_a_template_cannot_render(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        assert model.chat_template is None
        with pytest.raises(ArgumentError, match="no chat template"):
            model.chat_prompt(HI)


# ---- the command line


def test_run_chat_renders_the_template(llamac_command: Command, chat_model: Path, tiny_llama: Path) -> None:
    with llamac.load(chat_model) as model:
        chat = [{"role": "system", "content": "S"}, *HI]
        alone, both = (model.chat(messages, max_tokens=6, temperature=0).text for messages in (HI, chat))
    done = llamac_command("run", chat_model, "--chat", "-i", "Hi", *GREEDY, "-n", 6, "-q")
    assert (done.code, done.out) == (0, alone + "\n")
    done = llamac_command("run", chat_model, "--chat", "--system", "S", "-i", "Hi", *GREEDY, "-n", 6, "-q")
    assert (done.code, done.out) == (0, both + "\n")
    llamac_command("run", chat_model, "--chat", "-i", "").refuses_with("--chat needs a message")
    llamac_command("run", chat_model, "--system", "S", "-i", "Hi").refuses_with("--system needs --chat")
    llamac_command("run", tiny_llama, "--chat", "-i", "Hi").refuses_with("run it without --chat")
