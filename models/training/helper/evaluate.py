"""Measures how often `helper` obeys: `python -m models.training.helper.evaluate MODEL --count 100`.

MODEL is a checkpoint directory, which is exported to q8 first, or a model file. llamac answers prompts of every skill,
greedily, and grading.py judges the answers. The prompts have held-out words and phrases unless `--trained` is given.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from . import generator
from .conversation import Conversation
from .grading import fault

SEED = 4
NEW_TOKENS = 200


def prompts(skill: str, count: int, *, held_out: bool = True, level: int = 2, seed: int = SEED) -> list[Conversation]:
    """The first conversations of a series that practise a skill, each kind as often as in the training."""
    found: list[Conversation] = []
    index = 0
    while len(found) < count:
        made = generator.conversation(seed, index, held_out=held_out, level=level)
        index += 1
        if made.skill == skill:
            found.append(made)
    return found


def answer(model: Any, conversation: Conversation) -> tuple[str, bool]:
    """What the model writes as its turn, and whether it ended the turn."""
    variables: dict[str, Any] = {"tools": conversation.tools} if conversation.tools else {}
    if conversation.enable_thinking:
        variables["enable_thinking"] = True
    # Not `model.chat`: its result has reasoning and calls taken apart.
    made = model.generate(model.chat_ids(conversation.prompt, **variables), max_tokens=NEW_TOKENS, temperature=0)
    return made.text, made.finish_reason == "stop"


def export(directory: Path, out: Path) -> None:
    """Export a checkpoint directory to a q8 file."""
    from llamac.export import export as write

    write(directory, out, dtype="q8", name="helper")


def measure(model: Any, count: int, *, held_out: bool, shown: int = 0) -> dict[str, float]:
    """Return the share of obeyed prompts by skill; print the first `shown` faults of each."""
    shares = {}
    for skill in generator.SKILLS:
        right, printed = 0, 0
        for conversation in prompts(skill, count, held_out=held_out):
            text, ended = answer(model, conversation)
            problem = fault(text, conversation.check, ended=ended)
            right += problem is None
            if problem is not None and printed < shown:
                printed += 1
                print(f"  {skill}: {problem}", flush=True)
        shares[skill] = right / count
        print(f"| {skill} | {right} of {count} |", flush=True)
    return shares


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m models.training.helper.evaluate", description="Measure obedience.", allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="checkpoint directory or model file")
    parser.add_argument("--count", type=int, default=100, help="prompts per skill (default: 100)")
    parser.add_argument("--trained", action="store_true", help="use the words and phrases of the training")
    parser.add_argument("--faults", type=int, default=0, help="faults to print per skill")
    parser.add_argument("--out", type=Path, help="keep the exported file here")
    arguments = parser.parse_args()
    import llamac

    with tempfile.TemporaryDirectory() as folder:
        file = arguments.model
        if file.is_dir():
            file = arguments.out or Path(folder, "helper.bin")
            export(arguments.model, file)
        print(f"{file}: {file.stat().st_size:,} bytes")
        with llamac.load(file) as model:
            shares = measure(model, arguments.count, held_out=not arguments.trained, shown=arguments.faults)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
