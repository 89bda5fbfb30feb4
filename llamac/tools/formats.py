"""The table of formats: how chat models write reasoning and tool calls, and how a format is recognized.

A format is a list of regions. A region begins and ends with a pattern (patterns.py), and a reader (readers.py) reads
what is in it. What stands outside of all regions is the content.
"""

# ruff: noqa: RUF001  # the names of DeepSeek's tokens

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llamac.errors import ArgumentError
from llamac.text.reasoning import TAGS
from llamac.tools.notations import FUNCTIONGEMMA, GEMMA4, IS_STRING, OLMO3, PYTHON, Notation
from llamac.tools.patterns import Pattern, pattern
from llamac.tools.values import QUOTES

Kind = Literal["reasoning", "content", "calls"]

NAME = r"(?P<name>[\w.:/-]+)"


@dataclass(frozen=True)
class Region:
    """A part of an answer.

    Attributes:
        kind: What it is. "content" with `close` "" is a mark that is left out.
        open: The pattern that begins it, without white space before it, which is dropped anyway. The group `name` is
            a tool's name.
        close: The pattern that ends it; "": it ends with the text, or when the reader has what it needs.
        reader: Reads the calls: a name in READERS, or "" for text.
        at_start: Whether only white space and reasoning can come before it.
        bare: Whether the opening text is already part of the calls. Anything else than a call of a known tool is then
            content.
        prefix: What the reader does not get of a bare opening text.
        options: Settings of the reader.
    """

    kind: Kind
    open: str
    close: str = ""
    reader: str = ""
    at_start: bool = False
    bare: bool = False
    prefix: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Writing:
    """How calls are written, for grammars that force them.

    Attributes:
        call: A call, in which NAME stands for the tool's name, ARGUMENTS for its arguments, and NUMBER for a number;
            "" if calls cannot be forced.
        style: How arguments are written: in a notation, or between tags: what comes before a key, between the key and
            its value, and after the value (see `tagged_parameters`). IS_STRING in the second stands for true or false.
            None: as JSON.
        between: What comes between two calls; None: an answer has one call.
        begin: What comes before the first call.
        end: What comes after the last one.
        trigger: The beginning of `begin` and `call` that ordinary text does not have, for calls among text.
        free: Reasoning that may come first, in which TEXT stands for any text. Guides know the usual thinking tags.
        head: What comes before an answer without calls.
    """

    call: str = ""
    style: Notation | tuple[str, ...] | None = None
    between: str | None = None
    begin: str = ""
    end: str = ""
    trigger: str = ""
    free: str = ""
    head: str = ""


@dataclass(frozen=True)
class Format:
    """How a model writes.

    Attributes:
        name: Its name, for `tool_format`.
        regions: The parts of an answer.
        marks: Texts in a chat template that reveal the format: one of the alternatives, each with all its texts.
        writing: How calls are forced.
        outside: What text outside of all regions is.
        call_id: How the id of a call is written, as `Writing.call`, where the template writes it in place of the name;
            "": ids are letters and digits, which every other template accepts.
        anchor: The pattern behind whose last match in the prompt the answer begins; None: the answer begins after the
            prompt, which can only have opened the reasoning.
    """

    name: str
    regions: tuple[Region, ...]
    marks: tuple[tuple[str, ...], ...] = ()
    writing: Writing = field(default_factory=Writing)
    outside: Kind = "content"
    call_id: str = ""
    anchor: Pattern | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the format has tool calls."""
        return any(region.kind == "calls" for region in self.regions)


THINKING = tuple(Region("reasoning", rf"{opening}", closing, at_start=True) for opening, closing in TAGS.items())

_PARAMETERS = {"tags": ("<parameter=", ">", "", "</parameter>")}
_QUOTED = {"marks": QUOTES}
_JSON_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_TOOL_CALL = Region("calls", r"<tool_call>", r"</tool_call>", "json")
_HERMES = Writing(f"<tool_call>\n{_JSON_CALL}\n</tool_call>", between="\n", trigger="<tool_call>")
_START = r"(?:<\|start\|>assistant)?"  # the head of each further message in harmony
_TYPE = r"(?:\s*(?:<\|constrain\|>)?\s*\w+)?\s*"
_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _dsml(name: str, block: str, *marks: str) -> Format:
    """DeepSeek's markup language DSML, whose parameters say whether they are strings. block: the tag around calls."""
    tags = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
    return Format(
        name,
        (
            *THINKING,
            Region(
                "calls",
                r'(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name="(?P<name>[^"\n]+)">',
                close=r"</｜DSML｜invoke>(?:\s*</｜DSML｜(?:function|tool)_calls>)?",
                reader="parameters",
                options={"tags": (tags[0], '">', "", tags[1]), "kind": '" string="'},
            ),
        ),
        (("｜DSML｜", *marks),),
        Writing(
            '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>',
            style=(tags[0], f'" string="{IS_STRING}">', "", tags[1], "\n"),
            between="\n",
            begin=f"<｜DSML｜{block}>\n",
            end=f"\n</｜DSML｜{block}>",
            trigger=f"<｜DSML｜{block}>",
        ),
    )


# In the order in which they are looked for in a template.
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format(
            "harmony",
            (
                Region(
                    "calls",
                    rf"{_START}<\|channel\|>\w+ to=(?:functions\.)?{NAME}{_TYPE}<\|message\|>",
                    close=r"<\|(?:call|end|return)\|>",
                    reader="arguments",
                ),
                Region(
                    "calls",
                    rf"{_START} to=(?:functions\.)?{NAME}\s*<\|channel\|>\w+{_TYPE}<\|message\|>",
                    close=r"<\|(?:call|end|return)\|>",
                    reader="arguments",
                ),
                Region("reasoning", rf"{_START}<\|channel\|>analysis<\|message\|>", r"<\|(?:end|return)\|>"),
                Region("content", rf"{_START}<\|channel\|>\w+{_TYPE}<\|message\|>"),
                Region("content", r"<\|(?:end|return|call)\|>"),
            ),
            (("<|channel|>", "<|message|>"),),
            Writing(
                "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
                free="<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant",
                head="<|channel|>final<|message|>",
            ),
        ),
        Format(
            "gemma4",
            (
                Region("reasoning", r"<\|channel>thought\n", r"<channel\|>"),
                Region("calls", rf"<\|tool_call>call:{NAME}", r"<tool_call\|>", "relaxed", options=_QUOTED),
            ),
            (("<|tool_call>call:",),),
            Writing(
                "<|tool_call>call:NAMEARGUMENTS<tool_call|>",
                style=GEMMA4,
                between="",
                trigger="<|tool_call>",
            ),
        ),
        Format(
            "functiongemma",
            (
                Region(
                    "calls",
                    rf"<start_function_call>call:{NAME}",
                    close="<end_function_call>",
                    reader="relaxed",
                    options=_QUOTED,
                ),
            ),
            (("<start_function_call>",),),
            Writing(
                "<start_function_call>call:NAMEARGUMENTS<end_function_call>",
                style=FUNCTIONGEMMA,
                between="",
                trigger="<start_function_call>",
            ),
        ),
        _dsml("deepseek-v3.2", "function_calls", "function_calls"),
        _dsml("deepseek-v4", "tool_calls"),
        Format(
            "deepseek",
            (
                *THINKING,
                Region(
                    "calls",
                    rf"(?:<｜tool▁calls▁begin｜>)?\s*{_DEEPSEEK[0]}\w+{_DEEPSEEK[1]}{NAME}\n```json\n",
                    rf"\n?```{_DEEPSEEK[2]}\s*(?:<｜tool▁calls▁end｜>)?",
                    "arguments",
                ),
                Region(
                    "calls",
                    rf"(?:<｜tool▁calls▁begin｜>)?\s*{_DEEPSEEK[0]}{NAME}{_DEEPSEEK[1]}",
                    rf"{_DEEPSEEK[2]}\s*(?:<｜tool▁calls▁end｜>)?",
                    "arguments",
                ),
            ),
            (("<｜tool▁call▁begin｜>",), ("<｜tool▁calls▁begin｜>",)),
            Writing(
                f"{_DEEPSEEK[0]}NAME{_DEEPSEEK[1]}ARGUMENTS{_DEEPSEEK[2]}",
                between="",
                begin="<｜tool▁calls▁begin｜>",
                end="<｜tool▁calls▁end｜>",
                trigger="<｜tool▁calls▁begin｜>",
            ),
        ),
        Format(
            "kimi",
            (
                *THINKING,
                Region(
                    "calls",
                    r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+)"
                    r"(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                    r"<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>)?",
                    "arguments",
                ),
            ),
            (("<|tool_call_begin|>",),),
            Writing(
                "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
                between="",
                begin="<|tool_calls_section_begin|>",
                end="<|tool_calls_section_end|>",
                trigger="<|tool_calls_section_begin|>",
            ),
            call_id="functions.NAME:NUMBER",
        ),
        Format(
            "mistral",
            (
                Region("reasoning", r"\[THINK\]", r"\[/THINK\]", at_start=True),
                *THINKING,
                Region("calls", rf"\[TOOL_CALLS\]\s*{NAME}(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]", reader="arguments"),
                Region("calls", r"\[TOOL_CALLS\]", reader="json"),
            ),
            (("[TOOL_CALLS]",),),
            Writing(_JSON_CALL, None, ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]"),
        ),
        Format(
            "seed",
            (
                Region(
                    "reasoning", r"<seed:think>(?:<seed:cot_budget_reflect>)?", close=r"</seed:think>", at_start=True
                ),
                Region(
                    "calls",
                    r"(?:<seed:tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                    close=r"</function>(?:\s*</seed:tool_call>)?",
                    reader="parameters",
                    options=_PARAMETERS,
                ),
            ),
            (("<seed:tool_call>",),),
            Writing(
                "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
                ("<parameter=", ">", "", "</parameter>", "\n"),
                between="\n",
                trigger="<seed:tool_call>",
            ),
        ),
        Format(
            "minimax",
            (
                *THINKING,
                Region(
                    "calls",
                    r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"\n]+)">',
                    close=r"</invoke>(?:\s*</minimax:tool_call>)?",
                    reader="parameters",
                    options={"tags": ('<parameter name="', '">', "", "</parameter>")},
                ),
            ),
            (("<minimax:tool_call>",),),
            Writing(
                '<invoke name="NAME">\nARGUMENTS</invoke>',
                style=('<parameter name="', '">', "", "</parameter>", "\n"),
                between="\n",
                begin="<minimax:tool_call>\n",
                end="\n</minimax:tool_call>",
                trigger="<minimax:tool_call>",
            ),
        ),
        Format(
            "qwen3-coder",
            (
                *THINKING,
                Region(
                    "calls",
                    r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                    close=r"</function>(?:\s*</tool_call>)?",
                    reader="parameters",
                    options=_PARAMETERS,
                ),
            ),
            (("<function=", "<parameter="),),
            Writing(
                "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
                ("<parameter=", ">\n", "\n", "</parameter>", "\n"),
                between="\n",
                trigger="<tool_call>",
            ),
        ),
        Format(
            "functionary",
            (*THINKING, Region("calls", rf"<function={NAME}>", r"</function>", "arguments")),
            (("<function=",),),
            Writing("<function=NAME>ARGUMENTS</function>", between="", trigger="<function="),
        ),
        Format(
            "glm",
            (
                *THINKING,
                Region(
                    "calls",
                    r"<tool_call>\s*(?P<name>[^<\n]+)\n?",
                    close="</tool_call>",
                    reader="parameters",
                    options={"tags": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")},
                ),
            ),
            (("<arg_key>",),),
            Writing(
                "<tool_call>NAME\nARGUMENTS</tool_call>",
                ("<arg_key>", "</arg_key>\n<arg_value>", "", "</arg_value>", "\n"),
                between="\n",
                trigger="<tool_call>",
            ),
        ),
        Format(
            "llama4",
            (
                Region("calls", r"\[\s*[A-Za-z_][\w.:-]*\(", "", "python", True, True),
                Region("calls", r"<\|python_start\|>", r"<\|python_end\|>", "python"),
            ),
            (("<|python_start|>",),),
            Writing("NAME(ARGUMENTS)", PYTHON, ", ", "[", "]"),
        ),
        Format(
            "lfm2",
            (*THINKING, Region("calls", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", "python")),
            (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
            Writing(
                "NAME(ARGUMENTS)",
                style=PYTHON,
                between=", ",
                begin="<|tool_call_start|>[",
                end="]<|tool_call_end|>",
                trigger="<|tool_call_start|>",
            ),
        ),
        Format(
            "olmo3",
            (Region("calls", r"<function_calls>", r"</function_calls>", "python"),),
            (("<function_calls>",),),
            Writing(
                "NAME(ARGUMENTS)",
                style=OLMO3,
                between="\n",
                begin="<function_calls>",
                end="</function_calls>",
                trigger="<function_calls>",
            ),
        ),
        Format(
            "apertus",
            (
                Region("reasoning", r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
                Region("calls", r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", "keyed json"),
            ),
            (("<|tools_prefix|>",),),
            Writing(
                '{"NAME": ARGUMENTS}',
                between=", ",
                begin="<|tools_prefix|>[",
                end="]<|tools_suffix|>",
                trigger="<|tools_prefix|>",
            ),
        ),
        Format(
            "phi4-mini",
            (
                *THINKING,
                Region("calls", r"<\|tool_call\|>", r"<\|/tool_call\|>", "json"),
                Region("calls", r"functools\[", "", "json", True, True, "functools"),
            ),
            (("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>"), ("functools[",)),
            Writing(_JSON_CALL, None, ", ", "<|tool_call|>[", "]<|/tool_call|>", trigger="<|tool_call|>"),
        ),
        Format(
            "granite",
            (
                *THINKING,
                Region("calls", r"(?:<\|tool_call\|>|<tool_call>)", "", "json"),
                Region("content", r"</tool_call>"),
            ),
            (("<|tool_call|>",), ("<|start_of_role|>", "<tool_call>[")),
            Writing(_JSON_CALL, None, ", ", "<|tool_call|>[", "]", trigger="<|tool_call|>"),
        ),
        Format(
            "nemotron",
            (*THINKING, Region("calls", r"<TOOLCALL>", r"</TOOLCALL>", "json")),
            (("<TOOLCALL>",),),
            Writing(_JSON_CALL, None, ", ", "<TOOLCALL>[", "]</TOOLCALL>", trigger="<TOOLCALL>"),
        ),
        Format(
            "hunyuan",
            (
                *THINKING,
                Region("content", r"<answer>", at_start=True),
                Region("content", r"\n?</answer>\n?"),
                Region("calls", r"<tool_calls>", r"</tool_calls>", "json"),
            ),
            (("<tool_calls>",),),
            Writing(_JSON_CALL, None, ", ", "<tool_calls>[", "]</tool_calls>", trigger="<tool_calls>"),
        ),
        Format(
            "ernie",
            (
                *THINKING,
                Region("content", r"<response>", at_start=True),
                Region("content", r"\n?</response>\n?"),
                _TOOL_CALL,
            ),
            (("<tool_call>", "<response>"),),
            _HERMES,
        ),
        Format(
            "hermes",
            (*THINKING, _TOOL_CALL),
            (("<tool_call>",),),
            _HERMES,
        ),
        Format(
            "command-r",
            (
                Region("reasoning", r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
                Region("calls", r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", "json"),
                Region("content", r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
            ),
            (("<|START_ACTION|>",),),
            Writing(
                '{"tool_name": "NAME", "parameters": ARGUMENTS}',
                between=", ",
                begin="<|START_ACTION|>[",
                end="]<|END_ACTION|>",
                trigger="<|START_ACTION|>",
            ),
        ),
        Format(
            "command-r-plus",
            (Region("calls", r"Action:\s*```json\n", r"\n?```", "json"),),
            (("Action: ```json",), ("Write 'Action:' followed",), ("Write \\'Action:\\' followed",)),
            Writing(
                '{\n        "tool_name": "NAME",\n        "parameters": ARGUMENTS\n    }',
                between=",\n    ",
                begin="Action: ```json\n[\n    ",
                end="\n]\n```",
                trigger="Action: ```json",
            ),
        ),
        Format(
            "llama3",
            (
                Region("calls", r"<\|python_tag\|>", "", "json"),
                Region("calls", r"(?:; ?)?\{", "", "json", True, True),
            ),
            (("<|python_tag|>",), ("<|start_header_id|>", '"parameters": ')),
            Writing('{"name": "NAME", "parameters": ARGUMENTS}'),
        ),
        Format(
            "gemma",
            (
                Region("calls", r"```tool_code\n", r"\n?```", "python"),
                Region("calls", r"\[\s*[A-Za-z_][\w.:-]*\(", "", "python", True, True),
                Region("calls", r"(?:; ?)?\{", "", "json", True, True),
                Region("calls", r"```json\n", r"\n?```", "json", True, True, "```json\n"),
                _TOOL_CALL,
            ),
            writing=Writing('{"name": "NAME", "parameters": ARGUMENTS}'),
        ),
    )
}
PLAIN = Format("none", THINKING)  # reasoning, and no tool calls


def format_named(name: str) -> Format:
    """The format with this name.

    Raises:
        ArgumentError: If there is none.
    """
    if name == PLAIN.name:
        return PLAIN
    if name not in FORMATS:
        raise ArgumentError(f"tool_format is {name!r}, expected one of {', '.join((*FORMATS, PLAIN.name))}")
    return FORMATS[name]


def detect(template: str) -> Format | None:
    """The format that the code of a chat template reveals; None if it has none that is known."""
    for each in FORMATS.values():
        if any(all(text in template for text in texts) for texts in each.marks):
            return each
    return None


def is_tag(each: Format, token: str) -> bool:
    """Whether the name of a special token is a part of a format's tags, or of what its readers look for in calls."""
    return any(
        pattern(region.open).spells(token) or pattern(region.close).spells(token) or _mentions(region.options, token)
        for region in each.regions
    )


def _mentions(options: Any, text: str) -> bool:
    """Whether a text is a part of one of the texts and patterns among a reader's options."""
    if isinstance(options, Pattern):
        return options.spells(text)
    if isinstance(options, str):
        return text in options
    if isinstance(options, Mapping):
        return any(_mentions(value, text) for value in options.values())
    return isinstance(options, list | tuple) and any(_mentions(value, text) for value in options)
