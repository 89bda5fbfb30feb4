"""Usage and help: which arguments the commands accept, and the errors for wrong ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import llamac
from commands import Command, Result
from llamac.cli.parser import COMMANDS, make_parser, name_options
from processes import output_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "no command 'fly', expected one of run, chat, serve, batch, "),
        (("expotr",), "no command 'expotr'; did you mean `llamac export`?"),
        (("hf:org/name",), "did you mean `llamac run hf:org/name`?"),
        (("--loud", "run"), "unknown option --loud"),
        (("run", "m", "--wings"), "unknown option --wings"),
        (("run", "m", "--temprature", "1"), "unknown option --temprature; did you mean --temperature?"),
        (("run", "m", "--temperatur", "1"), "unknown option --temperatur; did you mean --temperature?"),
        (("run", "m", "--temp=1"), "unknown option --temp; did you mean --temperature?"),
        (("--versio", "run"), "unknown option --versio; did you mean --version?"),
        (("run", "--versio"), "unknown option --versio"),
        (("export", "a", "b", "--pur"), "unknown option --pur; did you mean --pure?"),
        (("run", "m", "--max-new-tokens=3"), "unknown option --max-new-tokens; did you mean --max-tokens?"),
        (("run", "m", "--n-predict", "3"), "unknown option --n-predict; did you mean --max-tokens?"),
        (("run", "m", "-t", "warm"), "argument -t/--temperature: 'warm' is not a number"),
        (("run", "m", "-n", "1.5"), "argument -n/--max-tokens: '1.5' is not an integer"),
        (("run", "m", "-n", "-1"), "argument -n/--max-tokens: -1 is negative, expected 0 or more"),
        (("run", "m", "-n"), "argument -n/--max-tokens: expected one argument"),
        (("run", "m", "--kv-dtype", "q4"), "argument --kv-dtype: invalid choice: 'q4'"),
        (("run", "m", "Once"), "unexpected argument 'Once'; a prompt follows -i"),
        (("run", "m", "--no-cache", "--cache-dir", "d"), "not allowed with argument"),
        (("inspect", "m", "second"), "unexpected argument 'second'"),
        (("run", "-i", "a", "--prompt", "b"), "argument -i/--prompt: given twice, expected once"),
        (("run", "-f", "a", "-f", "b"), "argument -f/--file: given twice, expected once"),
        (("chat", "--system", "a", "--system", "b"), "argument --system: given twice, expected once"),
        (("check", "--deep"), "unknown option --deep"),
        (("run", "--seed", "one"), "argument -s/--seed: 'one' is not an integer"),
        (("run", "--top-p", "half"), "argument -p/--top-p: 'half' is not a number"),
        (("bench", "m", "--threads", "1,two"), "'1,two' is not a list of integers"),
        (("export",), "SRC, OUT"),
        (("export", "one"), "OUT"),
        (("export", "one", "two", "--dtype", "q5"), "argument --dtype: invalid choice: 'q5'"),
        (("export", "one", "two", "--to", "onnx"), "argument --to: invalid choice: 'onnx'"),
        (("cache", "prune", "--older-than", "old"), "'old' is not a duration such as 30d"),
        (("cache", "prune", "--max-size", "big"), "'big' is not a size such as 20G"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_exits_2_with_advice(llamac_command: Command, arguments: tuple[str, ...], message: str) -> None:
    done = llamac_command(*arguments)
    assert (done.code, done.out) == (2, "")
    usage, error, advice = done.err.splitlines()
    assert usage.startswith("usage: llamac ")
    assert error.startswith("llamac")
    assert message in error
    assert re.fullmatch(r"Try `llamac( \w+)? --help`\.", advice)


def test_only_required_arguments_are_reported_as_missing(llamac_command: Command) -> None:
    done = llamac_command("cache")
    assert done.err.splitlines()[1].endswith("the following arguments are required: list|rm|prune|path")


def test_a_model_in_place_of_a_command_gets_advice(llamac_command: Command, tiny_llama: Path) -> None:
    done = llamac_command(tiny_llama, "-i", "a")
    assert (done.code, done.out) == (2, "")
    assert f"did you mean `llamac run {tiny_llama}`?" in done.err


def test_llamac_alone_prints_its_help(llamac_command: Command) -> None:
    done = llamac_command()
    assert (done.code, done.err) == (0, "")
    assert done == llamac_command("--help")
    assert all(f"\n    {name} " in done.out for name in COMMANDS)


def test_version_is_printed(llamac_command: Command) -> None:
    assert llamac_command("--version") == Result(0, f"llamac {llamac.__version__}\n", "")


def test_llamac_export_uses_its_own_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from llamac.cli import export_main

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["llamac-export", *arguments])
        with pytest.raises(SystemExit) as end:
            export_main()
        return end.value.code, *capsys.readouterr()

    assert run("--version") == (0, f"llamac-export {llamac.__version__}\n", "")
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: llamac-export [OPTIONS] SRC OUT\n")
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "llamac-export: error: " in err
    assert "Try `llamac-export --help`." in err


# ---- help


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("run", "llamac run [OPTIONS] [MODEL]"),
        ("export", "llamac export [OPTIONS] SRC OUT"),
        ("cache", "llamac cache [OPTIONS] list|rm|prune|path [NAME ...]"),
    ],
)
def test_usage_shows_which_operands_are_optional(llamac_command: Command, command: str, usage: str) -> None:
    assert llamac_command(command, "--help").out.splitlines()[0] == f"usage: {usage}"


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = llamac_command(command, "--help")
    assert (done.code, done.err) == (0, "")
    prose = done.out.split("examples:")[0].split("\n\n", 1)[1]  # neither usage nor examples are wrapped
    assert max(map(len, prose.splitlines())) <= columns
    assert "==SUPPRESS==" not in done.out
    assert "None" not in done.out
    assert "[]" not in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_narrow_terminal_breaks_no_word_of_the_help(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    words = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        words.append(llamac_command(command, "--help").out.split())
    assert words[0] == words[1]


def test_every_option_has_help() -> None:
    from llamac.cli import make_parser

    commands = make_parser()._subparsers
    assert commands is not None
    for name, command in commands._group_actions[0].choices.items():  # type: ignore[union-attr]
        assert command.description, name
        for action in command._actions:
            assert action.help, f"llamac {name} {action.dest}"


def test_short_options_of_llama2c_have_long_names(llamac_command: Command) -> None:
    text = llamac_command("run", "--help").out
    for letter, name in (
        ("i", "prompt"),
        ("f", "file"),
        ("n", "max-tokens"),
        ("t", "temperature"),
        ("p", "top-p"),
        ("s", "seed"),
        ("z", "tokenizer"),
        ("q", "quiet"),
    ):
        assert re.search(rf"^  -{letter}( [A-Z]+)?, --{name}\b", text, re.MULTILINE), name


def test_help_explains_what_n_counts(llamac_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = llamac_command("run", "--help").out
    assert "at most N new tokens; 0: as many as fit the context" in text
    assert "unlike in llama2.c, the prompt does not count" in text
    assert "(default: 256)" in text


# ---- start-up


def test_a_command_imports_only_its_own_module() -> None:
    code = """
        import contextlib, io, sys
        from llamac.cli import run_command
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            run_command(sys.argv[1:])
        print(sorted(name.split(".")[2] for name in sys.modules if name.startswith("llamac.cli.")))
    """
    assert output_of(code, "--help") == "['parser']\n"
    imported = output_of(code, "cache", "path")
    assert "'cache'" in imported
    assert not any(f"'{name}'" in imported for name in set(COMMANDS) - {"cache"})


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_slow_modules(command: str) -> None:
    code = """
        import sys
        from llamac.cli import run_command
        try:
            run_command([sys.argv[1], "--help"])
        except SystemExit:
            slow = ("numpy", "tokenizers", "tqdm", "jinja2", "tempfile", "llamac.export.convert")
            print("imported:", [name for name in slow if name in sys.modules])
    """
    assert output_of(code, command).endswith("imported: []\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "stories", "-i", "a", "--max-memory", "1kB"), "--max-memory is 1.0 kB, but "),
        (("run", "stories", "-i", "a", "--max-memory", "much"), "--max-memory is 'much', expected a size"),
        (("run", "stories", "-i", "a", "--candidates", "0"), "--candidates is 0, expected 1 to "),
        (
            ("run", "stories", "-i", "a", "--candidates", "3", "--best-of", "2"),
            "--candidates is 3, expected at most --best-of, which is 2",
        ),
        (("run", "stories", "-i", "a", "--ban", ""), "--ban is ['']"),
        (("run", "stories", "-i", "a", "--isa", "mmx"), "--isa is 'mmx'; "),
        (("run", "stories", "-i", "a b c", "--context", "2", "-n", "3"), "and --max-tokens is 3: shorten it"),
        (("chat", "helper", "--top-p", "2"), "--top-p is 2, expected "),
        (("serve", "stories", "--port", "0", "--max-sequences", "0"), "--max-sequences is 0, expected 1 to "),
        (("batch", "-", "-", "--kv-tokens", "0"), "--kv-tokens is 0, expected at least "),
        (("export", "stories", "out", "--dtype", "f32", "--pure"), "--pure is for dtype q4, q4s, q3, q2 and t2"),
        (
            ("export", "stories", "out", "--to", "hf", "--dtype", "q8"),
            "--dtype 'q8' is for flat files only: --to='hf' takes ",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_name_options_and_not_parameters(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = llamac_command(*arguments, stdin=b"")
    assert done.code != 0
    assert message in done.err


def test_messages_about_files_keep_the_names_of_their_keys() -> None:
    names = make_parser(["serve"]).parse_args(["serve"]).option_names
    for message in (
        "/srv/models/models.toml: models.a.x: there is no such key, expected one of file, context, max_sequences",
        "models.toml: models.a.max_sequences: 0, expected an integer of at least 1",
        "keys:3: max_body is 'x', expected a size",
        "keep nothing with --no-cache (cache_dir=False)",
        "the file 'max_body' does not exist",
        "max_body.bin is damaged",
        "the context is full",
    ):
        assert name_options(message, names) == message
