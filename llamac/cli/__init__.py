"""The command line: its parser, and what becomes of errors.

Exit codes: 0 done; 1 an error, told in one line on stderr, or a check that found a difference; 2 wrong usage;
130 Ctrl-C. Each command is a module of its own that is imported when it is called: the first token of `llamac run`
should not wait for what other commands need.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from llamac import __version__
from llamac.arguments import DTYPES
from llamac_command import INTERRUPTED

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_ERROR = 1
BUILT_IN = "the name of a built-in model, stories or stories-gpt2"
# what `llamac.load` opens
ANY_MODEL = (
    "a model file; a Hugging Face directory, GGUF or llama2.c file, which is converted once; hf:ORG/NAME[@REVISION] on "
    f"the Hugging Face Hub; or {BUILT_IN}"
)


def main(begin: Callable[[], object] = lambda: None) -> NoReturn:
    """Runs a command and ends the process with its exit code. begin: called when all is imported, before the work."""
    _end_process(lambda: run_command(sys.argv[1:], begin=begin))


def export_main(begin: Callable[[], object] = lambda: None) -> NoReturn:
    """`llamac-export`: the same as `llamac export`."""
    _end_process(lambda: run_command(["export", *sys.argv[1:]], program="llamac-export", begin=begin))


class _Ended(BaseException):
    """The process has been told to end, by the signal of this number."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end_process(command: Callable[[], int]) -> NoReturn:
    """Runs a command and ends the process. A signal that ends it does so when what was half-written is removed."""

    def leave(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        raise _Ended(number)

    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is signal.SIG_DFL:  # one that is ignored, as with nohup, stays so
            signal.signal(number, leave)
    _prepare_output()
    try:
        sys.exit(command())
    except _Ended as ended:
        os.kill(os.getpid(), ended.number)
        sys.exit(128 + ended.number)  # it is blocked


def _prepare_output() -> None:
    """A stream that the caller closed drops what it gets; a character that a terminal lacks becomes a question mark."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it stays open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names of files may hold bytes that are no UTF-8: they go out as they came in
        sys.stdout.reconfigure(errors="surrogateescape" if sys.stdout.encoding.lower() == "utf-8" else "replace")


def run_command(arguments: Sequence[str], program: str = "llamac", begin: Callable[[], object] = lambda: None) -> int:
    """Runs a command and returns its exit code. Errors of the library and of the system become one line on stderr."""
    parser = make_parser(program)
    from llamac.errors import LlamacError

    try:
        options = parser.parse_args(arguments)
        # a command is a function in the module of its name
        command = getattr(importlib.import_module(f"llamac.cli.{options.command}"), options.command)
        begin()
        code: int = command(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return EXIT_ERROR
    except (LlamacError, OSError, MemoryError, UnicodeError) as error:  # the last one: text that is none, unforeseen
        from llamac.cli.text import safe_error

        _end_output()
        print(f"llamac: error: {safe_error(_one_line(error))}", file=sys.stderr)
        return EXIT_ERROR
    finally:
        _end_output()


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _end_output() -> None:
    """Writes what is still held back. If it cannot be written, because there is no reader or no room, it is dropped:
    the next flush, at last the interpreter's own, would fail on it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions, keeps the examples' lines, and shows defaults where there are any."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        import textwrap

        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        # by identity: 0 is a default to tell, although it equals False
        has_default = action.default != [] and not any(action.default is x for x in (None, False, argparse.SUPPRESS))
        if not has_default or not action.option_strings or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


def make_parser(program: str = "llamac") -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="llamac",
        description="Runs language models on this computer's CPU.",
        formatter_class=_HelpFormatter,
        epilog="examples:\n"
        '  llamac run -i "Once upon a time"              the built-in model tells a story\n'
        "  llamac run path/to/checkpoint                 any model: it is converted once, and kept\n"
        "  llamac export path/to/checkpoint model.bin    convert one to a file of your own\n"
        '  llamac run model.bin -i "Hello" -t 0          the most probable continuation\n'
        "  llamac inspect model.bin                      what is in a model file\n"
        "  llamac check model.bin --data                 is the file whole, does it compute here as it should\n"
        "  llamac bench model.bin                        how fast it is here, and what the limit would be\n"
        "  llamac cache list                             what was converted by the way, and how large it is\n",
    )
    parser.add_argument("--version", action="version", version=f"llamac {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_inspect(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_export(commands, program)
    _add_cache(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=help_text)


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of what is converted (default: what keeps the source's quality); a model file in another "
        "one is converted, too",
    )
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-dir", metavar="DIR", help="keep what is converted here (default: see `llamac cache path`)"
    )
    cache.add_argument(
        "--no-cache", action="store_true", help="keep nothing: convert to a temporary file that is gone at the end"
    )


def _add_lora(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--lora",
        metavar="DIR[=STRENGTH]",
        action="append",
        default=[],
        help=f"a LoRA adapter, a PEFT directory, that is {what}; its strength multiplies what it adds; may be given "
        "several times",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: see `llamac inspect`)")
    _add_kernels(parser)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv", choices=("f16", "f32"), help="number format of the KV cache (default: f32 for f32 files, else f16)"
    )
    parser.add_argument(
        "--isa", metavar="NAME", help="kernel set, e.g. avx2 or scalar (default: the best; also LLAMAC_ISA)"
    )


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser(
        "run",
        help="continue a prompt",
        description="Continues a prompt and streams the text. The prompt comes from -i, from -f, or from a pipe. "
        "Options have llama2.c's letters and defaults.",
        formatter_class=_HelpFormatter,
        epilog="examples:\n"
        '  llamac run -i "Once upon a time"\n'
        '  llamac run model.bin -i "Once" -t 0.8 -p 0.95 -s 42 -n 100\n'
        '  llamac run ./TinyLlama-1.1B --dtype q4 -i "Once"\n'
        '  llamac run hf:HuggingFaceTB/SmolLM2-135M -i "Once"\n'
        '  echo "The quick brown" | llamac run model.bin --no-echo\n'
        '  llamac run chat.bin --chat --system "Be brief." -i "What is a whale?"\n',
    )
    _add_model(parser, f"{ANY_MODEL} (default: stories)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-i", dest="prompt", metavar="PROMPT", help="the text to continue")
    prompt.add_argument("-f", dest="file", metavar="FILE", help="read the prompt from a file (- for standard input)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message for the model's chat template; the answer alone is printed",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message in front of the user's")
    parser.add_argument(
        "-n",
        dest="steps",
        type=int,
        default=256,
        metavar="STEPS",
        help="positions to compute, the prompt's included; 0: the whole context",
    )
    parser.add_argument(
        "-t",
        dest="temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="temperature; 0 takes the most probable token",
    )
    parser.add_argument(
        "-p",
        dest="top_p",
        type=float,
        default=0.9,
        metavar="P",
        help="top-p: sample from the most probable tokens that together have this probability; 1: off",
    )
    parser.add_argument(
        "-s",
        dest="seed",
        type=int,
        metavar="SEED",
        help="seed of the random choices (default: a random one, told at the end)",
    )
    parser.add_argument("-z", dest="tokenizer", metavar="FILE", help="a tokenizer to use instead of the model's own")
    _add_lora(parser, "added to the weights' products")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most probable tokens; 0: off"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="leave out tokens less probable than P times the best; 0: off",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (may be given several times)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="positions of the session, at most the model's; default: as many as -n allows, but no more than the model "
        "has. Decides between the two RoPE tables of models that have a short and a long one",
    )
    parser.add_argument("--no-echo", action="store_true", help="do not print the prompt")
    parser.add_argument("-q", "--quiet", action="store_true", help="no line of figures on stderr")
    _add_conversion(parser)
    _add_machine(parser)


def _add_inspect(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what is in a model file, or what this machine offers",
        description="Shows a model file's configuration, tensors, tokenizer and provenance; without MODEL this "
        "machine: kernel set, threads and the reasons.",
        formatter_class=_HelpFormatter,
        epilog="examples:\n"
        "  llamac inspect                  this machine\n"
        "  llamac inspect stories-gpt2     a built-in model\n",
    )
    _add_model(parser, f"{ANY_MODEL}; without it this machine is described. Nothing is converted")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="test a model file on this machine",
        description="Checks a file's structure and texts and replays its probes (prompts with stored logits) on this "
        "machine: 'identical', 'within tolerance', or which probe differs and by how much.",
        formatter_class=_HelpFormatter,
    )
    _add_model(parser, f"{ANY_MODEL} (default: stories)")
    parser.add_argument("--data", action="store_true", help="also verify the checksum of every tensor")
    _add_conversion(parser)
    _add_machine(parser)


def _numbers(text: str) -> list[int]:
    """Whole numbers separated by commas; an empty text: none."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 1,2,4") from None


def _add_bench(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast a model runs on this machine",
        description="Measures prefill and decode in turn with the machine's own limits, and tells each speed as a "
        "share of its limit: reading all weights and cache positions at the bare speed of reading memory (the best of "
        "1, 2 and 4 streams without software prefetch), or doing all multiply-adds at the rate of the kernels' own "
        "instructions with operands in the first cache, whichever takes longer. A LIST is numbers separated by commas. "
        "Tokens per second count all sequences of a batch. The machine should have nothing else to do.",
        formatter_class=_HelpFormatter,
        epilog="examples:\n"
        "  llamac bench model.bin\n"
        "  llamac bench model.bin --threads 1,2 --prompt 128,512 --json speed.json\n"
        "  llamac bench model.bin --prompt '' --context 0,2048 --batch 1,4,8\n",
    )
    _add_model(parser, f"{ANY_MODEL} (default: stories)")
    parser.add_argument(
        "--threads", type=_numbers, metavar="LIST", help="numbers of threads (default: the one `llamac inspect` tells)"
    )
    parser.add_argument(
        "--prompt", type=_numbers, default="128", metavar="LIST", help="lengths of prompts to prefill; '': none"
    )
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="steps that are decoded in a run; 0: none")
    parser.add_argument(
        "--context",
        type=_numbers,
        default="0",
        metavar="LIST",
        help="positions that sequences hold before decoding; fewer where the steps would not fit the model's context",
    )
    parser.add_argument(
        "--batch", type=_numbers, default="1", metavar="LIST", help="numbers of sequences that decode together"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each measurement")
    parser.add_argument("--json", metavar="FILE", help="also write all figures as JSON; - for standard output, alone")
    _add_conversion(parser)
    _add_kernels(parser)


def _add_cache(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="show and delete what was converted by the way",
        description="Sources that are no model files are converted once, and kept in a folder: LLAMAC_CACHE, or "
        "llamac in XDG_CACHE_HOME, or ~/.cache/llamac. `path` prints the folder, `list` what is in it, and `prune` "
        "deletes: without options what nothing will use, like half-written files. Nothing that llamac has not written "
        "there is ever deleted, and no source.",
        formatter_class=_HelpFormatter,
        epilog="examples:\n"
        "  llamac cache list\n"
        "  llamac cache prune --older-than 30d --max-size 20G --dry-run\n"
        "  llamac cache prune --all\n",
    )
    parser.add_argument("action", metavar="list|prune|path", choices=("list", "prune", "path"), help="what to do")
    parser.add_argument("--cache-dir", metavar="DIR", help="the folder (default: as above)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--all", action="store_true", help="prune: every model")
    parser.add_argument(
        "--older-than", type=_age, metavar="AGE", help="prune: models not used for so long, e.g. 30d, 12h or 2w"
    )
    parser.add_argument(
        "--max-size",
        type=_size,
        metavar="SIZE",
        help="prune: those that were used longest ago, until the rest has at most this size, e.g. 20G or 500M",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="prune: only tell what would be deleted")


def _age(text: str) -> float:
    """Seconds of a text like 30d."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    try:
        count, unit = float(text[:-1]), units[text[-1:].lower()]
    except (ValueError, KeyError):
        count, unit = -1, 1
    if not 0 <= count < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no age like 30d (s, m, h, d and w are known)")
    return count * unit


def _size(text: str) -> int:
    """Bytes of a text like 20G; units are powers of 1000, or of 1024 with an i."""
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    digits = text.rstrip("kKmMgGtTiIbB")
    unit = text[len(digits) :].upper().removesuffix("B")
    base, unit = (1024, unit[:-1]) if unit.endswith("I") else (1000, unit)
    try:
        count, power = float(digits), powers[unit]
    except (ValueError, KeyError):
        count, power = -1, 0
    if not 0 <= count < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 20G or 500M")
    return int(count * base**power)


def _add_export(commands: Commands, program: str) -> None:
    parser = commands.add_parser(
        "export",
        prog=program if program != "llamac" else None,
        help="convert a checkpoint to a model file, or back",
        description="Converts any checkpoint to a model file; --to writes the other way.",
        formatter_class=_HelpFormatter,
        epilog="examples:\n"
        "  llamac export ./TinyLlama-1.1B tiny.bin --dtype bf16\n"
        "  llamac export stories15M.bin stories15M.llamac.bin --tokenizer tokenizer.bin\n"
        "  llamac export tinyllama-1.1b-chat.Q8_0.gguf tiny.bin\n"
        "  llamac export model.bin ./checkpoint --to hf\n"
        "  llamac export model.bin model.gguf --to gguf --dtype q8_0\n",
    )
    if program != "llamac":
        parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face directory, a GGUF or llama2.c file, a model file, hf:ORG/NAME[@REVISION] on the Hugging "
        f"Face Hub, or {BUILT_IN}",
    )
    parser.add_argument("out", metavar="OUT", help="what to write")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, "auto", "q8_0", "q4_0"),
        metavar="DTYPE",
        help="number format of the matrices: f32, f16, bf16, q8, q4, q4s, or auto, which is for each matrix the "
        "nearest one (default: the source's, of a GGUF file auto); q8, q4 and q4s have about 8.25, 4.5 and 4.25 bits, "
        "and with q4 and q4s the output head and attn_v stay in q8; with --to gguf also q8_0 or q4_0",
    )
    parser.add_argument("--pure", action="store_true", help="with q4 and q4s: no matrix stays in q8")
    parser.add_argument(
        "--dtype-map",
        metavar="PATTERN=DTYPE,...",
        help="number format of the matrices whose name fits a pattern, e.g. 'layers.0.*=q8,*.ffn_down.weight=q4'; "
        "* stands for any text, the first pattern that fits decides",
    )
    _add_lora(parser, "merged into the weights")
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="with q4 and q4s: let the model read this text, or with `self` one of its own, and quantize for the "
        "inputs it saw; loses less and takes longer",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads that quantize (default: as many as a model would use)"
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer file or directory (default: what lies in or beside SRC)"
    )
    tokenizer.add_argument("--no-tokenizer", action="store_true", help="no tokenizer: the file takes token ids only")
    parser.add_argument("--name", help="the model's name (default: the source's)")
    parser.add_argument(
        "--to",
        choices=("llamac", "hf", "llama2c", "gguf"),
        default="llamac",
        help="what to write: a model file, a Hugging Face directory, llama2.c's files, or a GGUF file for llama.cpp",
    )
    parser.add_argument(
        "--probe-source",
        choices=("llamac", "transformers"),
        help="who computes the reference logits that the file carries (default: llamac)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace OUT if it is a file that exists; of a symbolic link, its target. With --to llama2c also another "
        "tokenizer.bin beside it",
    )
