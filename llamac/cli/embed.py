"""`llamac embed`: prints the embeddings of texts, or how similar the texts are."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac.cli.loading import BAR_DELAY, load_model, shown_progress
from llamac.cli.options import session_settings
from llamac.cli.parser import Parser
from llamac.cli.text import cut, output_width, safe_line
from llamac.cli.texts import STANDARD, add_file, add_operand, add_settings, json_line, read_texts
from llamac.errors import ArgumentError
from llamac.exit_codes import OK

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SHOWN = 30  # texts in a table
COLUMN = 7  # characters of a similarity and the space before it
MIN_WIDTH = 20

DESCRIPTION = (
    "Embed texts: an encoder such as BERT, or a language model, turns each into a vector. For several texts, print a "
    "table of their cosine similarities; for one text, print its embedding as JSON."
)
EXAMPLES = """\
  llamac embed hf:BAAI/bge-small-en-v1.5 "a small dog" "a little dog" "stock prices"
  llamac embed model.gguf --prompt-name query "What is a panda?" --json
  llamac embed model.gguf -f texts.txt --npy embeddings.npy
  cut -f 2 table.tsv | llamac embed model.gguf --json > embeddings.jsonl
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.repeated = "texts"
    add_operand(parser)
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", default=[], help="a text (default: the lines of standard input)"
    )
    texts = parser.add_argument_group("texts")
    add_file(texts, "texts")
    prompts = texts.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-name", metavar="NAME", help="the model's prompt that precedes each text, such as query"
    )
    prompts.add_argument("--prompt", metavar="TEXT", help='a text that precedes each text instead; "" for none')
    texts.add_argument(
        "--dimensions", type=int, metavar="N", help="keep only N leading dimensions, for models trained for this"
    )
    output = parser.add_argument_group("output")
    forms = output.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print a line of JSON for each text")
    forms.add_argument(
        "--npy", metavar="OUT", help="write a NumPy file: float32, a row for each text; - for standard output"
    )
    output.add_argument("--force", action="store_true", help="with --npy: replace a file that exists")
    output.add_argument("-q", "--quiet", action="store_true", help="no progress in a pipe or a file")
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    texts = read_texts(options, options.texts, "texts")
    shows_table = len(texts) > 1 and not options.json and options.npy is None
    if shows_table and len(texts) > MAX_SHOWN:
        raise ArgumentError(
            f"there are {len(texts)} texts, at most {MAX_SHOWN} fit a table of similarities: ask for --json or --npy"
        )
    if options.force and options.npy is None:
        raise ArgumentError("--force needs --npy")
    if options.npy == STANDARD:
        if sys.stdout.isatty():
            raise ArgumentError("--npy - writes bytes, and standard output is a terminal: redirect it")
    elif options.npy is not None:
        from llamac.export.targets import check_target

        check_target(Path(options.npy), "llamac", options.force)
    with (
        load_model(options, tokenizer=options.tokenizer, **session_settings(options)) as model,
        shown_progress(options, BAR_DELAY) as report,
    ):
        vectors = model.embed(
            texts,
            prompt_name=options.prompt_name,
            prompt=options.prompt,
            dimensions=options.dimensions,
            progress=report,
        )
    if options.npy is not None:
        _write(options.npy, vectors)
    elif shows_table:
        sys.stdout.writelines(f"{line}\n" for line in _table(texts, vectors, max(output_width(), MIN_WIDTH)))
    else:
        for index, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
            # the shortest decimal of each float32
            numbers = [float(str(number)) for number in vector]
            sys.stdout.write(json_line({"index": index, "text": text, "embedding": numbers}))
    return OK


def _write(out: str, vectors: NDArray[np.float32]) -> None:
    import numpy as np

    from llamac.export.targets import atomic_file

    if out == STANDARD:
        file = io.BytesIO()  # np.save cannot write an array to a pipe
        np.save(file, vectors)
        sys.stdout.buffer.write(file.getbuffer())
        return
    with atomic_file(Path(out)) as target:
        np.save(target, vectors)


def _table(texts: list[str], vectors: NDArray[np.float32], width: int) -> list[str]:
    """The texts with their numbers, and the cosine of each pair, in blocks of columns that fit the width."""
    import numpy as np

    digits = len(str(len(texts)))
    lines = []
    for number, text in enumerate(texts, 1):
        lines.append(cut(f"{number:>{digits}}  {safe_line(text)}", width))
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    units = vectors / np.where(lengths > 0, lengths, 1.0)[:, None]
    cosines: Any = units @ units.T
    step = max(1, (width - digits) // COLUMN)
    for first in range(0, len(texts), step):
        columns = range(first, min(first + step, len(texts)))
        lines += ["", " " * digits + "".join(f"{column + 1:>{COLUMN}}" for column in columns)]
        for row in range(len(texts)):
            lines.append(f"{row + 1:>{digits}}" + "".join(f"{cosines[row, column]:>{COLUMN}.3f}" for column in columns))
    return lines
