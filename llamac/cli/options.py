"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, TypeAlias

from llamac import models
from llamac.arguments import DTYPES, KV_DTYPES, NUMERICS
from llamac.engine.prompts.overflow import CONTEXT_OVERFLOWS
from llamac.errors import ArgumentError

# What options can be added to: a parser, or a titled group of one.
Group: TypeAlias = argparse._ActionsContainer

BUILT_IN = f"a built-in model: {', '.join(models.NAMES)}"
# Everything that `llamac.load` opens.
ANY_MODEL = (
    "a model file; a Hugging Face directory, a GGUF file or a llama2.c file, which is converted once; "
    f"hf:ORG/NAME[@REVISION] on the Hugging Face Hub; or {BUILT_IN}"
)


def add_model(group: Group, default: str = models.DEFAULT) -> None:
    """Add the operand MODEL. Without it, `load_model` opens the built-in model `default`."""
    group.add_argument("model", metavar="MODEL", nargs="?", help=f"{ANY_MODEL} (default: {default})")
    group.set_defaults(default_model=default)


def add_conversion(group: Group) -> None:
    """Add --dtype, --cache-dir and --no-cache."""
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"number format of the converted weights: {', '.join(DTYPES)} (default: one that preserves the source's "
        "quality); also converts a model file in another format",
    )
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-dir", metavar="DIR", help="store the converted model here (default: see `llamac cache path`)"
    )
    cache.add_argument(
        "--no-cache", action="store_true", help="do not keep the converted model; use memory or a temporary file"
    )


def add_lora(group: Group, effect: str) -> None:
    """Add --lora. `effect` begins its help and says what happens to the adapter."""
    group.add_argument(
        "--lora",
        metavar="DIR[=STRENGTH]",
        action="append",
        default=[],
        help=f"{effect}; DIR is a PEFT directory, STRENGTH multiplies its effect (default: 1); repeatable",
    )


def add_model_settings(parser: argparse.ArgumentParser, context: str) -> None:
    """Add the groups of options for a model that generates: its parts, its conversion, and the machine.

    Args:
        parser: The command's parser.
        context: The help of --context.
    """
    model = parser.add_argument_group("model")
    model.add_argument(
        "-z", "--tokenizer", metavar="FILE", help="use this tokenizer file or directory, not the model's tokenizer"
    )
    add_lora(model, "apply a LoRA adapter while the model runs")
    model.add_argument("--context", type=int, metavar="N", help=context)
    add_conversion(parser.add_argument_group("conversion"))
    machine = parser.add_argument_group("machine")
    add_threads(machine)
    add_kernels(machine)
    add_device(machine)
    add_speculation(machine)
    add_max_memory(machine)


def add_threads(group: Group) -> None:
    """Add --threads."""
    group.add_argument("--threads", type=int, metavar="N", help="threads to use (default: see `llamac inspect`)")


def add_max_memory(group: Group) -> None:
    """Add --max-memory."""
    group.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="use at most this much memory, such as 2GiB, for weights, KV cache, activations and tokenizer; if the "
        "model needs more, refuse it and show the plan (default: no limit)",
    )


def add_kernels(group: Group, kv_default: str = "f32 for models in f32, else f16") -> None:
    """Add --kv-dtype, with a description of its default, --isa and --numerics."""
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help=f"number format of the KV cache (default: {kv_default})",
    )
    group.add_argument(
        "--isa",
        metavar="NAME",
        help="kernel set, such as avx2 or scalar (default: LLAMAC_ISA, else the fastest that this processor runs)",
    )
    group.add_argument(
        "--numerics",
        choices=NUMERICS,
        default="exact",
        help="how matrix products round their inputs. exact (default): to 15 bits with q8, q6 and GGUF's types; fast: "
        "to 8 bits with these, and to bf16 with bf16, which speeds up long prompts and batches where the processor has "
        "VNNI or bf16 instructions, and changes results slightly",
    )


def add_device(group: Group) -> None:
    """Add --device."""
    group.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="the device to compute on: cpu (default); cuda or cuda:N, a GPU, with the same results; auto, a GPU if "
        "there is a usable one",
    )


def session_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of sessions among a command's options, for `load_model`."""
    names = ("context", "kv_dtype", "threads", "isa", "numerics", "device")
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def add_speculation(group: Group) -> None:
    """Add --draft and --no-speculation."""
    speculation = group.add_mutually_exclusive_group()
    speculation.add_argument(
        "--draft",
        dest="draft_model",
        metavar="MODEL",
        help="a smaller draft model with the same vocabulary, or the model's assistant or EAGLE-3 head, for "
        "speculative decoding: faster, with the same text; its weights keep the format of their source",
    )
    speculation.add_argument("--no-speculation", action="store_true", help="turn off speculative decoding")


def add_generation(group: Group, max_tokens: int) -> None:
    """Add the sampling parameters. `max_tokens` is the default of -n."""
    group.add_argument(
        "-n",
        "--max-tokens",
        type=_count,
        default=max_tokens,
        metavar="N",
        help="at most N new tokens; 0: as many as fit the context; unlike in llama2.c, the prompt does not count",
    )
    group.add_argument(
        "-t",
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 always selects the most probable token (default: the model's setting, else 1.0)",
    )
    group.add_argument(
        "-p",
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the fewest tokens that together have probability P; 1 turns this off (default: the model's "
        "setting, else 1.0)",
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from the K most probable tokens; 0 turns this off (default: the model's setting, else 0)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens less probable than P times the most probable one; 0 turns this off (default: the model's "
        "setting, else 0)",
    )
    group.add_argument(
        "-s", "--seed", type=int, metavar="SEED", help="random seed (default: a random number, which is reported)"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    add_overflow(group)


def add_overflow(group: Group) -> None:
    """Add --context-overflow and --context-keep."""
    group.add_argument(
        "--context-overflow",
        choices=CONTEXT_OVERFLOWS,
        metavar="POLICY",
        help="the policy for a full context: error refuses a prompt that does not fit and ends new text at the limit "
        "(default); truncate_middle cuts the middle of the prompt; shift drops the older half of the context and "
        "continues",
    )
    group.add_argument(
        "--context-keep",
        type=_count,
        metavar="N",
        help="number of tokens at the beginning of the prompt that are never dropped (default: the system message in a "
        "chat, otherwise 4 for shift and half of what fits for truncate_middle)",
    )


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative, expected 0 or more")
    return number


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(8)


def check_writable(option: str, path: str | None) -> None:
    """Check that a result can be written, before minutes of measurements. "-" after --json is standard output.

    Of files that exist, a picture replaces only SVG, and other results only JSON.

    Raises:
        ArgumentError: If it cannot.
    """
    if path is None or (path == "-" and option == "--json"):
        return
    target = Path(path)
    if target.is_dir():
        raise ArgumentError(f"{option} {path}: is a directory, expected a file")
    kind, starts = ("JSON", (b"{",)) if option == "--json" else ("SVG", (b"<svg", b"<?xml"))
    if target.is_file() and target.stat().st_size and not _start(target).startswith(starts):
        raise ArgumentError(f"{option} {path}: exists and does not hold {kind}: choose another name")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise ArgumentError(f"{option} {path}: cannot be written: the folder does not exist or is not writable")


def write_result(path: str, data: bytes) -> None:
    """Write a result. A file that exists is replaced once the new one is complete; devices and pipes are written to."""
    from llamac.export.targets import atomic_file, errors_naming

    target = Path(path)
    if (target.exists() and not target.is_file()) or not os.access(os.path.dirname(os.path.realpath(target)), os.W_OK):
        with errors_naming(target):
            target.write_bytes(data)
        return
    with errors_naming(target), atomic_file(target) as file:
        file.write(data)


def check_distinct(*outputs: tuple[str, str | None]) -> None:
    """Check that no two options name the same file for what they write. Devices can be named by several.

    Raises:
        ArgumentError: If two do.
    """
    seen: dict[str, str] = {}
    for option, path in outputs:
        if path is None or path == "-" or (os.path.exists(path) and not os.path.isfile(path)):
            continue
        first = seen.setdefault(os.path.realpath(path), option)
        if first != option:
            raise ArgumentError(f"{first} and {option} name the same file")
