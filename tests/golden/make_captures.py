"""Make captures/NAME.safetensors: what transformers computes for a few cases, as `llamac check --capture` stores it.

    cd tests; python -m golden.make_captures        (with the extra `parity`: torch and transformers on the CPU)

Weights are not stored: tiny_checkpoints.py makes them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from golden.encoder_cases import ENCODER_CASES
from golden.make_encoders import encoder_checkpoint, is_scorer
from golden.parity_table import cases, make_folder
from llamac.export.parity.capture import Capture, Question, write_capture
from llamac.export.parity.encoder_run import run_encoder
from llamac.export.parity.question import FIRST_WORD
from llamac.export.parity.transformers_run import run_transformers

FOLDER = Path(__file__).parent / "captures"
NAMES = ("llama", "gpt2")
ENCODERS = ("xlm-roberta", "bert-scores")
N_TOKENS = 12


def question_of(name: str) -> Question:
    """The question of a stored capture: short, to keep the files small."""
    if name in ENCODERS:
        return encoder_question(name, N_TOKENS)
    case = cases()[name]
    return Question(tuple(case.ids[:N_TOKENS]), 3, 3, 7, case.config["vocab_size"])


def encoder_question(name: str, n_tokens: int) -> Question:
    """A question for an encoder's case: no token is a padding token. A cross-encoder reads tokens of both types."""
    case = ENCODER_CASES[name]
    ids = tuple(FIRST_WORD + token % 50 for token in case.ids[:n_tokens])
    has_types = is_scorer(case) and (case.config.get("type_vocab_size") or 0) > 1
    types = tuple(int(i >= n_tokens // 3) for i in range(n_tokens)) if has_types else ()
    return Question(ids, 0, 0, 7, case.config["vocab_size"], types)


def captured(root: Path, name: str) -> Capture:
    """What transformers computes now."""
    if name in ENCODERS:
        return run_encoder(encoder_checkpoint(root / name, ENCODER_CASES[name]), question_of(name))
    return run_transformers(make_folder(root, name), question_of(name))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in (*NAMES, *ENCODERS):
            path = FOLDER / f"{name}.safetensors"
            write_capture(path, captured(Path(temporary), name))
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
