"""Make captures/NAME.safetensors: what transformers computes for a few cases, as `llamac check --capture` stores it.

    cd tests; python -m golden.make_captures        (with the extra `parity`: torch and transformers on the CPU)

Weights are not stored: tiny_checkpoints.py makes them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from golden.parity_table import cases, make_folder
from llamac.export.parity.capture import Capture, Question, write_capture
from llamac.export.parity.transformers_run import run_transformers

FOLDER = Path(__file__).parent / "captures"
NAMES = ("llama", "gpt2")


def question_of(name: str) -> Question:
    """The question of a stored capture: short, to keep the files small."""
    case = cases()[name]
    return Question(tuple(case.ids[:12]), 3, 3, 7, case.config["vocab_size"])


def captured(root: Path, name: str) -> Capture:
    """What transformers computes now."""
    return run_transformers(make_folder(root, name), question_of(name))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in NAMES:
            path = FOLDER / f"{name}.safetensors"
            write_capture(path, captured(Path(temporary), name))
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
