"""Special tokens in chats: only the template can write them, whatever it does with the caller's strings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from chat_samples import CHATS, TEMPLATES, TOOLS
from vocab_samples import tokenizer_json

from llamac import ChatTemplate, Tokenizer
from llamac.errors import ChatTemplateError
from llamac.text import chat_process, chat_runs
from llamac.text.chat_runs import SpecialNames
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tracked_str import DATA, ROLE, TEMPLATE, TrackedStr, literal, origin_of, to_json, tracked

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = ("<s>", "</s>")
BOS, EOS = 256, 257
TOKENIZER = Tokenizer.from_json(json.dumps(tokenizer_json()), SpecialTokens(BOS, True, False, EOS, (EOS,)))


def ids(template: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Tokenize a chat, and check that its runs are the text that `render` returns."""
    chat = ChatTemplate(template, TOKENS)
    runs = chat.render_runs(messages, NAMES, **options)
    assert "".join(run.text for run in runs) == chat.render(messages, **options)
    return [token for run in runs for token in TOKENIZER.encode(run.text, parse_special=run.parse_special)]


# ---- special tokens in data

# Content of a message, and an expression of it (c) whose value contains the name of a special token.
FORMS = {
    "unchanged": ("a</s>b", "c"),
    "joined from parts": (["<", "/s", ">"], "c | join"),
    "joined with a name": (["a", "b"], "c | join(messages[0].sep)"),
    "joined by a method": (["<", "/s>"], "''.join(c)"),
    "characters in a list": ("</s>", "c | list | join"),
    "characters in a loop": ("</s>", "sub(c)"),
    "replaced inside": ("<x/xsx>", "c | replace('x', '')"),
    "replaced by a method": ("<x/xsx>", "c.replace('x', '')"),
    "replaced by data": ("x", "c.replace('x', messages[0].sep)"),
    "empty string replaced": ("</s>", "c.replace('', '')"),
    "split": ("a,</s>,b", "c.split(',')[1]"),
    "split from the right": ("a,</s>", "c.rsplit(',', 1)[-1]"),
    "split at whitespace": (" a </s> ", "c.split()[1]"),
    "partitioned": ("a:</s>", "c.partition(':')[2]"),
    "lines": ("a\n</s>\n", "c.splitlines()[1]"),
    "trimmed": ("  </s>\n", "c | trim"),
    "trimmed to a name": ("xx</s>xx", "c.strip('x')"),
    "without a prefix": ("x</s>", "c.removeprefix('x')"),
    "reversed": (">s/<", "c | reverse"),
    "reversed by a slice": (">s/<", "c[::-1]"),
    "sliced": ("abc</s>def", "c[3:7]"),
    "single characters": ("</s>", "c[0] ~ c[1] ~ c[2] ~ c[3]"),
    "first and last": ("<>", "(c | first) ~ '/s' ~ (c | last)"),
    "between literals": ("/s", "'<' ~ c ~ '>'"),
    "added to literals": ("/s", "'<' + c + '>'"),
    "begun by a literal": ("/s>", "'<' + c"),
    "ended by a literal": ("</s", "c + '>'"),
    "upper case": ("</s>", "(c | upper) | lower"),
    "lower case": ("</S>", "c | lower"),
    "other case": ("</S>", "c.swapcase() | lower"),
    "capitalized": ("</S>", "c | capitalize"),
    "titled": ("</S>", "c | title | lower"),
    "truncated": ("</s> and more of it", "c | truncate(7, leeway=0)"),
    "killed words": ("</s>and more", "c | truncate(7, true, leeway=0)"),
    "wrapped": ("</s> and more", "c | wordwrap(4)"),
    "words broken": ("x</s>x", "c | wordwrap(1, wrapstring='')"),
    "indented": ("a\n</s>", "c | indent(2)"),
    "centered": ("</s>", "c | center(9)"),
    "filled up": ("</s>", "c.ljust(9) ~ c.rjust(9) ~ c.zfill(9)"),
    "in JSON": ({"a": "</s>"}, "c | tojson"),
    "in indented JSON": ({"a": ["</s>"]}, "c | tojson(indent=2)"),
    "a key in JSON": ({"</s>": 1}, "c | tojson"),
    "a key": ({"</s>": 1}, "c | list | first"),
    "keys of items": ({"</s>": 1}, "(c | items | first)[0]"),
    "keys of a method": ({"</s>": 1}, "c.keys() | join"),
    "sorted keys": ({"</s>": 1}, "(c | dictsort)[0][0]"),
    "a dict as a string": ({"</s>": "<s>"}, "c | string"),
    "a list as a string": (["</s>"], "c ~ ''"),
    "formatted with %": ("</s>", "'%s|%5s' % (c, c)"),
    "formatted by name": ("</s>", "'%(a)s' % {'a': c}"),
    "a format": ("</%s>", "c % 's'"),
    "the filter format": ("</s>", "'%s' | format(c)"),
    "the method format": ("</s>", "'{} {!s:>6} {a}'.format(c, c, a=c)"),
    "a format of its own": ("</{}>", "c.format('s')"),
    "format_map": ("</s>", "'{a}'.format_map({'a': c})"),
    "as a string": ("</s>", "c | string"),
    "escaped": ("</s>", "c | escape | replace('&lt;', '<') | replace('&gt;', '>')"),
    "marked as safe": ("</s>", "c | safe"),
    "encoded": ("</s>", "c.encode().decode()"),
    "quoted": ("</s>", "c | urlencode | replace('%3C', '<') | replace('%3E', '>')"),
    "a character": ([60], "('%c' % c[0]) ~ '/s>'"),
    "translated": ("</x>", "c.translate({120: 's'})"),
    "repeated": ("</s>", "c * 2"),
    "mapped": (["</s>"], "c | map('trim') | join"),
    "selected": (["</s>"], "c | select('string') | first"),
    "sorted": (["s>", "</"], "c | sort | join"),
    "unique": (["</s>", "</s>"], "c | unique | join"),
    "grouped": ([{"a": "</s>"}], "(c | groupby('a') | first)[0]"),
    "batched": ("</s>", "c | batch(4) | first | join"),
    "printed": ({"a": "</s>"}, "c | pprint"),
    "its tags stripped": ("&lt;/s&gt;", "c | striptags"),
    "in a namespace": ("</s>", "kept(c)"),
    "in a set block": ("</s>", "block(c)"),
    "in a filter block": ("</S>", "lowered(c)"),
    "in another macro": ("</s>", "called(c)"),
    "a date": ("</s>", "strftime_now(c)"),
    "a default": ("</s>", "missing | default(c)"),
    "of attributes": ([{"a": "</s>"}], "c | join(attribute='a')"),
}
MACROS = """
{%- macro sub(c) %}{% for x in c %}{{ x }}{% endfor %}{% endmacro %}
{%- macro kept(c) %}{% set ns = namespace(x='') %}{% set ns.x = ns.x ~ c %}{{ ns.x }}{% endmacro %}
{%- macro block(c) %}{% set x %}{{ c }}{% endset %}{{ x | trim }}{% endmacro %}
{%- macro lowered(c) %}{% filter lower %}{{ c }}{% endfilter %}{% endmacro %}
{%- macro wrapped() %}{{ caller() }}{% endmacro %}
{%- macro called(c) %}{% call wrapped() %}{{ c }}{% endcall %}{% endmacro %}
"""


@pytest.mark.usefixtures("rendering")
@pytest.mark.parametrize("form", FORMS)
def test_data_cannot_write_special_tokens(form: str) -> None:
    content, expression = FORMS[form]
    messages = [{"role": "user", "content": content, "sep": "</s>"}]
    macros = MACROS + "{% set c = messages[0].content %}"
    (inner,) = (run.text for run in ChatTemplate(f"{macros}{{{{ {expression} }}}}").render_runs(messages, ()))
    assert any(name in inner for name in NAMES)
    plain = TOKENIZER.encode(inner)
    assert not {BOS, EOS} & set(plain)
    assert ids(f"{macros}{{{{ {expression} }}}}", messages) == plain
    around = f"{macros}<s>{{{{ {expression} }}}}</s>"
    assert ids(around, messages) == [BOS, *plain, EOS]
    joined = f"{macros}{{{{ bos_token ~ ({expression}) ~ '</s>' }}}}"
    assert ids(joined, messages) == [BOS, *plain, EOS]


@pytest.mark.parametrize("name", ["bos_token", "pad_token"])
def test_variables_of_the_caller_are_data_also_under_the_name_of_a_token(name: str) -> None:
    template = f"{{{{ {name} }}}}{{{{ eos_token }}}}"
    message = [{"role": "user", "content": "a"}]
    assert ids(template, message, **{name: "</s>"}) == [*TOKENIZER.encode("</s>"), EOS]
    assert ids("{{ bos_token }}", message, bos_token="<s>") == [BOS]  # the model's own


def test_special_token_names_in_tools_documents_and_variables_are_text() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"</s>": {"type": "<s>"}}}}}]
    template = "{{ bos_token }}{{ tools | tojson }}{{ documents[0].title }}{{ note }}{{ eos_token }}"
    found = ids(template, [{"role": "user"}], tools=tools, documents=[{"title": "</s>"}], note="<s>")
    assert (found[0], found[-1]) == (BOS, EOS)
    assert not {BOS, EOS} & set(found[1:-1])


# ---- special tokens in templates

WRITTEN = {
    "text": "a<s>b",
    "a literal": "{{ '<s>' }}",
    "a variable": "{{ bos_token }}",
    "concatenated": "{{ 'a' ~ bos_token ~ c ~ 1 }}",
    "added": "{{ 'a' + bos_token + c }}",
    "added to data": "{{ c + bos_token }}",
    "of literals": "{{ '<' ~ 's' + '>' }}",
    "chosen by data": "{{ {'data': '<s>'}[c] }}",
    "if data say so": "{% if c == 'data' %}<s>{% endif %}",
    "repeated": "{{ '<s>' * 1 }}",
    "joined": "{{ [c, '<s>', c] | join }}",
    "a separator": "{{ [c, c] | join('<s>') }}",
    "by a method": "{{ '<s>'.join([c, c]) }}",
    "trimmed": "{{ (' <s>' ~ c ~ ' ') | trim }}",
    "split": "{{ (c ~ ',<s>').split(',')[1] }}",
    "sliced": "{{ ('<s>' ~ c)[:3] }}",
    "reversed": "{{ (c ~ '>s<')[::-1] }}",
    "put in place of data": "{{ c.replace('at', '<s>') }}",
    "put in by a filter": "{{ c | replace('at', '<s>') }}",
    "lowered": "{{ ('<S>' ~ c) | lower }}",
    "titled": "{{ (c ~ ' <s>') | title | lower }}",
    "indented": "{{ ('<s>\n' ~ c) | indent(2) }}",
    "wrapped": "{{ ('<s> ' ~ c) | wordwrap(4) }}",
    "centered": "{{ ('<s>' ~ c) | center(12) }}",
    "truncated": "{{ ('<s> ' ~ c * 3) | truncate(9, leeway=0) }}",
    "in JSON": "{{ {'a': c, 'b': '<s>' ~ c} | tojson }}",
    "in sorted JSON": "{{ {'b': '<s>', 'a': [c, 1, none]} | tojson(sort_keys=true) }}",
    "formatted with %": "{{ '<s>%s %d%%' % (c, 5) }}",
    "a value of %": "{{ '%s' % ('<s>' ~ c) }}",
    "by the filter format": "{{ '<s>%s' | format(c) }}",
    "by the method format": "{{ '<s>{} {}'.format(c, 5) }}",
    "a value of format": "{{ '{}'.format('<s>' ~ c) }}",
    "by format_map": "{{ '<s>{a}'.format_map({'a': c}) }}",
    "in a set block": "{% set x %} <s>{{ c }} {% endset %}{{ x | trim }}",
    "in a macro": "{% macro m(x) %}<s>{{ x }}{% endmacro %}{{ m(c) | trim }}",
    "in a call": "{% macro m() %}<s>{{ caller() }}{% endmacro %}{% call m() %}{{ c }}{% endcall %}",
    "in a namespace": "{% set ns = namespace(x='<s>') %}{% set ns.x = ns.x ~ c %}{{ ns.x }}",
    "in a filter block": "{% filter trim %} <s>{{ c }} {% endfilter %}",
    "in a loop": "{% for x in ['<s>', c] %}{{ x }}{% endfor %}",
    "a default": "{{ missing | default('<s>') }}",
    "of a tuple": "{{ ('<s>', c) | join }}",
    "of a dict": "{{ dict(a='<s>').a ~ dict.fromkeys(['a'], c).a }}",
    "in a generation": "{% generation %}<s>{{ c }}{% endgeneration %}",
}


@pytest.mark.usefixtures("rendering")
@pytest.mark.parametrize("form", WRITTEN)
def test_templates_can_write_special_tokens(form: str) -> None:
    """The same name in data next to it stays text."""
    template = "{% set c = messages[0].content %}" + WRITTEN[form]
    assert ids(template, [{"role": "user", "content": "data"}]).count(BOS) == 1
    both = ids(template + "{{ messages[1].content }}", [{"content": "data"}, {"content": " <s>"}])
    assert both.count(BOS) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_harmless_chats_are_one_run(name: str) -> None:
    """A single run gives the ids of the whole text, which are those of transformers."""
    chat = ChatTemplate(TEMPLATES[name], TOKENS | {"pad_token": "<pad>"})
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<start_of_turn>"]
    rendered = 0
    for messages in CHATS.values():
        for options in ({}, {"add_generation_prompt": False, "tools": TOOLS}, {"documents": [{"title": "T"}]}):
            arguments: dict[str, Any] = options
            try:
                text = chat.render(messages, **arguments)
            except ChatTemplateError:
                with pytest.raises(ChatTemplateError):
                    chat.render_runs(messages, names, **arguments)
                continue
            assert chat.render_runs(messages, names, **arguments) == [(text, True)]
            rendered += 1
    assert rendered >= 6


@pytest.mark.usefixtures("rendering")
def test_a_role_can_be_part_of_a_special_token_name_but_not_all_of_it() -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    chat = ChatTemplate(template)
    names = ("<|user|>", "<|end|>", "user", "<|user|>x")
    assert chat.render_runs([{"role": "user", "content": "Hi"}], names) == [("<|user|>Hi", True)]
    assert chat.render_runs([{"role": "end", "content": "Hi"}], names) == [("<|end|>Hi", False)]
    assert chat.render_runs([{"role": "user", "content": "x"}], names) == [("<|user|>", True), ("x", False)]
    assert ChatTemplate("{{ messages[0].role }}").render_runs([{"role": "user"}], names) == [("user", False)]
    twice = [{"role": "user", "content": "<|user|>"}]
    assert chat.render_runs(twice, names) == [("<|user|>", True), ("<|user|>", False)]


# ---- origins of characters


def with_origins(text: str) -> TrackedStr:
    """A TrackedStr whose upper-case letters come from the template."""
    return TrackedStr(text, bytes(TEMPLATE if letter.isupper() else DATA for letter in text))


OPERATIONS: dict[str, Callable[[str, str], Any]] = {
    "slices": lambda a, b: [a[2:5], a[::-1], (a + "b")[-1], a[1:0], list(a), list(reversed(a))],
    "sums": lambda a, b: [a + b, a + "x", "x" + a, a * 3, 2 * a, a * 0],
    "joins": lambda a, b: [a.join([b, "x", a]), a.join(b), a.join([])],
    "strips": lambda a, b: [a.strip(), a.lstrip(), a.rstrip(), a.strip(b), a.lstrip("Aa"), a.rstrip("Xx")],
    "affixes": lambda a, b: [a.removeprefix(a[:2]), a.removesuffix(a[-2:]), a.removeprefix("?"), a.removesuffix("")],
    "splits": lambda a, b: [a.split(), a.split(" "), a.split(" ", 1), a.split(None, 1), a.split(b or "x")],
    "splits from the right": lambda a, b: [a.rsplit(), a.rsplit(None, 1), a.rsplit(" ", 1), a.rsplit("A", 2)],
    "lines": lambda a, b: [a.splitlines(), a.splitlines(True)],
    "partitions": lambda a, b: [*a.partition(" "), *a.rpartition(" "), *a.partition("?"), *a.rpartition("A")],
    "replacements": lambda a, b: [a.replace(" ", b), a.replace("A", "x", 1), a.replace("a", b), a.replace("?", b)],
    "padding": lambda a, b: [a.center(12), a.center(13, "x"), a.ljust(12, "x"), a.rjust(12, "X"), a.center(0)],
    "%": lambda a, b: [(a + "%s|%d%%") % (b, 5), (a + "%(k)s") % {"k": b}, (b + "%5s") % a],
}


def flat(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [text for item in value for text in flat(item)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_string_operations_preserve_characters_and_origins(name: str) -> None:
    numbers = random.Random(1)
    for _ in range(200):
        a, b = ("".join(numbers.choices("AaBbXx \n", k=numbers.randrange(9))) for _ in range(2))
        expected, found = flat(OPERATIONS[name](a, b)), flat(OPERATIONS[name](with_origins(a), with_origins(b)))
        assert expected == found
        for text in found:
            letters = with_origins(str.__str__(text))
            # a template's character may become data, as padding does, but never the reverse
            assert all(one <= other for one, other in zip(origin_of(text), origin_of(letters), strict=True))
            if name not in ("padding", "%", "sums", "replacements", "joins"):
                assert origin_of(text) == origin_of(letters)


def test_case_changes_preserve_origins() -> None:
    text = TrackedStr("aBc", bytes([TEMPLATE, DATA, TEMPLATE]))
    changes: list[Callable[[str], str]] = [str.upper, str.lower, str.title, str.capitalize, str.swapcase, str.casefold]
    for change in changes:
        found = getattr(text, change.__name__)()
        assert (found, origin_of(found)) == (change("aBc"), text._origin)
    longer = literal("stra\xdfe").upper()
    assert (longer, set(origin_of(longer))) == ("STRASSE", {DATA})


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"sort_keys": True}, {"ensure_ascii": False}])
def test_json_preserves_the_origins_of_strings(options: dict[str, Any]) -> None:
    value = {
        'b"\\\n\xe9': [literal('T\xdc\U0001f600"'), "d", 1.5, None, True],
        literal("K"): {"x": (literal("T"), {})},
        "": "",
    }
    text = to_json(value, **options)
    assert text == json.dumps(value, **options)
    written = "".join(character for character, origin in zip(str.__str__(text), origin_of(text), strict=True) if origin)
    order = [literal("K"), literal("T"), literal('T\xdc\U0001f600"')]
    if not options.get("sort_keys"):
        order = [order[2], *order[:2]]
    assert written == "".join(json.dumps(part, ensure_ascii=options.get("ensure_ascii", True))[1:-1] for part in order)
    assert origin_of(to_json({2: literal("a"), None: "b", True: "c"})).count(TEMPLATE) == 1


@pytest.mark.parametrize("options", [{"indent": '"'}, {"separators": ('",', ":")}])
def test_json_whose_layout_has_quotes_is_data(options: dict[str, Any]) -> None:
    value = [literal("T"), {literal("K"): 1}]
    text = to_json(value, **options)
    assert (text, set(origin_of(text))) == (json.dumps(value, **options), {DATA})


@pytest.mark.usefixtures("rendering")
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ ('<s>a' ~ messages[0].content) | wordwrap(4, wrapstring='|') }}", ("<s>a|<s>", False)),
        ("{% autoescape true %}<s>{{ '<' ~ messages[0].content }}{% endautoescape %}", ("<s>&lt;&lt;s&gt;", True)),
        ("{% autoescape true %}<s>{{ messages[0].content | safe }}{% endautoescape %}", ("<s><s>", False)),
        (
            "{% set a %}{% autoescape true %}a{% endautoescape %}{{ messages[0].content }}{% endset %}{{ a }}",
            ("a<s>", False),
        ),
    ],
)
def test_text_that_the_origins_cannot_follow_is_data(template: str, expected: tuple[str, bool]) -> None:
    runs = ChatTemplate(template).render_runs([{"content": "<s>"}], NAMES)
    assert [("".join(run.text for run in runs), all(run.parse_special for run in runs))] == [expected]


def test_tracking_data_marks_keys_and_values_as_data() -> None:
    value = tracked({"a": ["b", ("c", 1, None)]})
    assert value == {"a": ["b", ("c", 1, None)]}
    assert [type(key) for key in value] == [TrackedStr]
    assert type(value["a"][1][0]) is TrackedStr
    assert (origin_of("ab"), origin_of(tracked("ab"))) == (b"\0\0", b"\0\0")
    with pytest.raises(ValueError, match="one origin"):
        TrackedStr("ab", b"\1")
    number: Any = 1
    with pytest.raises(TypeError, match="unsupported operand"):
        literal("a") + number
    with pytest.raises(TypeError, match="unsupported operand"):
        number + literal("a")


# ---- special token names and runs


def test_special_token_names_are_found_as_in_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    numbers = random.Random(2)
    for _ in range(100):
        names = {"".join(numbers.choices("ab<", k=numbers.randrange(1, 5))) for _ in range(numbers.randrange(6))}
        library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0}, "[U]"))
        library.add_special_tokens(sorted(names))
        text = "".join(numbers.choices("ab<x", k=40))
        encoding = library.encode(text)
        expected = [span for span, token in zip(encoding.offsets, encoding.ids, strict=True) if token]
        assert list(SpecialNames(sorted(names)).find(text)) == expected


def test_runs_have_special_tokens_only_from_the_template() -> None:
    numbers = random.Random(3)
    for _ in range(2000):
        names = {"".join(numbers.choices("ab<", k=numbers.randrange(1, 4))) for _ in range(numbers.randrange(4))}
        text = "".join(numbers.choices("ab<", k=numbers.randrange(12)))
        origins = bytes(numbers.choices([DATA, TEMPLATE, TEMPLATE, ROLE], k=len(text)))
        runs = chat_runs.split(text, origins, sorted(names))
        assert "".join(run.text for run in runs) == text
        assert all(run.text for run in runs)
        at = 0
        for run in runs:
            for start, end in SpecialNames(sorted(names)).find(run.text) if run.parse_special else ():
                inside = origins[at + start : at + end]
                assert DATA not in inside
                assert inside[0] == inside[-1] == TEMPLATE
            at += len(run.text)


def test_special_token_names_are_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single regular expression would try each of 20,000 names at each of 50,000 positions."""
    names = SpecialNames([f"<{number}>" for number in range(20_000)])
    steps = 0
    find = SpecialNames._longest_at

    def counted(self: SpecialNames, text: str, start: int) -> str:
        nonlocal steps
        steps += 1
        return find(self, text, start)

    monkeypatch.setattr(SpecialNames, "_longest_at", counted)
    assert list(names.find("<" * 50_000 + "<7>" + "x" * 50_000)) == [(50_000, 50_003)]
    assert steps == 50_001


# ---- the worker


@pytest.mark.usefixtures("rendering")
def test_a_text_that_differs_between_renderings_is_an_error() -> None:
    chat = ChatTemplate("{{ dict }}{{ messages[0].content }}")  # prints the address of an object
    assert "object at 0x" in chat.render([{"content": ""}])
    with pytest.raises(ChatTemplateError, match=r"renders differently each time.*parse_special=True"):
        chat.render_runs([{"content": "Hi"}], NAMES)


@pytest.mark.usefixtures("rendering")
def test_templates_can_append_to_lists() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append('<s>' ~ m.content) %}"
        "{% endfor %}{% set _ = messages.append('.') %}{{ ns.ids | join(',') }}{{ messages | length }}"
    )
    chat = [{"role": "user", "content": "<s>"}, {"role": "user", "content": "b"}]
    for _ in range(2):
        runs = template.render_runs(chat, ["<s>"])
        assert "".join(run.text for run in runs) == template.render(chat) == "<s><s>,<s>b3"
        assert sum(run.text.count("<s>") for run in runs if run.parse_special) == 2
    assert len(chat) == 2


@pytest.mark.usefixtures("rendering")
def test_random_templates_render_the_same_twice() -> None:
    """Random choices and the time must not differ between the two renderings."""
    template = "{{ range(10**5) | random }}{{ strftime_now('%f') }}{{ lipsum(n=1) }}"
    for _ in range(5):
        assert len(ChatTemplate(template).render_runs([{"content": "<s>"}], NAMES)) == 1


@pytest.mark.parametrize("origins", [None, [1], [1, 0], [2, 0, -1, 0], [1, 3], [True, 0], ["1", 0], {}, [1, 0, 9, 1]])
def test_malformed_origins_from_the_worker_are_an_error(origins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"text": "ab", "origins": origins}).encode()
    monkeypatch.setattr(chat_process.WORKER, "ask", lambda *_: answer)
    with pytest.raises(ChatTemplateError, match="malformed answer"):
        chat_process.render_tracked("ab", {}, [])
