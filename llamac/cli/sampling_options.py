"""The sampling options that `llamac run` and `llamac chat` share, and the parameters that they make."""

from __future__ import annotations

import argparse

from llamac.cli.options import Group, add_generation
from llamac.engine.sampling.params import SamplingParams
from llamac.errors import ArgumentError

# Options under the names of parameters, with the type, the metavar and the help of each.
NUMBERS: dict[str, tuple[type, str, str]] = {
    "repetition_penalty": (float, "X", "divide the logits of tokens that have occurred by X; 1 turns this off"),
    "presence_penalty": (float, "X", "subtract X from the logits of tokens that have been generated"),
    "frequency_penalty": (float, "X", "subtract X from the logit of a token for each time that it was generated"),
    "dry_multiplier": (float, "X", "DRY: penalize tokens that continue a repetition; a usual value is 0.8"),
    "dry_allowed_length": (int, "N", "DRY: the shortest repetition that counts (default: 2)"),
    "typical_p": (float, "P", "keep the tokens of typical surprise that together have probability P"),
    "xtc_probability": (float, "P", "XTC: exclude the most probable tokens from this fraction of the draws"),
    "xtc_threshold": (float, "P", "XTC: exclude tokens of at least this probability (default: 0.1)"),
    "mirostat_tau": (float, "BITS", "mirostat 2: keep the surprise of the text near this number of bits"),
    "mirostat_eta": (float, "X", "mirostat 2: the learning rate (default: 0.1)"),
    "min_tokens": (int, "N", "do not stop before there are N new tokens"),
    "reasoning_budget": (int, "N", "close the model's thinking tag after N tokens"),
}
# Options that change nothing without another one. (A model can recommend the other one of --xtc-threshold.)
NEEDED = {"dry_allowed_length": "dry_multiplier", "mirostat_eta": "mirostat_tau"}


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> Group:
    """Add the groups of sampling options; return the first, for options of the command's own.

    Args:
        parser: The command's parser.
        max_tokens: The default of -n.
    """
    generation = parser.add_argument_group("generation")
    add_generation(generation, max_tokens)
    group = parser.add_argument_group("more about sampling", "See SamplingParams in docs/python.md.")
    for name, (kind, metavar, text) in NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to the logit of a token; -inf bans it; repeatable",
    )
    group.add_argument(
        "--ban",
        dest="banned_strings",
        action="append",
        default=[],
        metavar="TEXT",
        help="do not generate this text; repeatable",
    )
    group.add_argument(
        "--stop-token",
        dest="stop_token_ids",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="stop at this token; repeatable",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's stop tokens")
    return generation


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The parameters that the options ask for.

    Raises:
        ArgumentError: If a value is out of range, or an option lacks the one that it belongs to.
    """
    for name, needed in NEEDED.items():
        if getattr(options, name) is not None and getattr(options, needed) is None:
            raise ArgumentError(f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}")
    return SamplingParams(
        max_tokens=options.max_tokens or None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop or None,
        logit_bias=options.logit_bias or None,
        banned_strings=options.banned_strings or None,
        stop_token_ids=options.stop_token_ids or None,
        ignore_eos=options.ignore_eos or None,
        context_overflow=options.context_overflow,
        context_keep=options.context_keep,
        speculation=False if options.no_speculation else None,
    ).updated({name: getattr(options, name) for name in NUMBERS})


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    try:
        if not separator:
            raise ValueError
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a number, such as 42=-1.5") from None
