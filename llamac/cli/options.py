"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from llamac.arguments import DTYPES, KV_DTYPES, KVDtype

# What options can be added to: a parser, or a titled group of one.
Group: TypeAlias = argparse._ActionsContainer

BUILT_IN = "a built-in model, stories or stories-gpt2"
# Everything that `llamac.load` opens.
ANY_MODEL = (
    "a model file; a Hugging Face directory, a GGUF file or a llama2.c file, which is converted once; "
    f"hf:ORG/NAME[@REVISION] on the Hugging Face Hub; or {BUILT_IN}"
)


def add_model(group: Group, help_text: str = f"{ANY_MODEL} (default: stories)") -> None:
    """Add the operand MODEL."""
    group.add_argument("model", metavar="MODEL", nargs="?", help=help_text)


def add_conversion(group: Group) -> None:
    """Add --dtype, --cache-dir and --no-cache."""
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of the converted weights (default: one that preserves the source's quality); a model file "
        "in another format is converted as well",
    )
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-dir", metavar="DIR", help="store the converted model here (default: see `llamac cache path`)"
    )
    cache.add_argument(
        "--no-cache", action="store_true", help="keep no converted model: convert in memory or to a temporary file"
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


def add_threads(group: Group) -> None:
    """Add --threads."""
    group.add_argument("--threads", type=int, metavar="N", help="threads to use (default: see `llamac inspect`)")


def add_kernels(group: Group, kv_dtypes: tuple[KVDtype, ...] = KV_DTYPES) -> None:
    """Add --kv-dtype and --isa."""
    group.add_argument(
        "--kv-dtype",
        choices=kv_dtypes,
        help="number format of the KV cache (default: f32 for models in f32, else f16)",
    )
    group.add_argument(
        "--isa",
        metavar="NAME",
        help="kernel set, such as avx2 or scalar (default: LLAMAC_ISA, else the fastest that this processor runs)",
    )
