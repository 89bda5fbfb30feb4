"""`llamac rerank`: prints documents in the order of their relevance to a query."""

from __future__ import annotations

import argparse
import sys

from llamac.cli.loading import BAR_DELAY, load_model, shown_progress
from llamac.cli.options import session_settings
from llamac.cli.parser import Parser
from llamac.cli.prompt import decoded
from llamac.cli.text import cut, output_width, safe_line
from llamac.cli.texts import add_file, add_operand, add_settings, json_line, read_texts
from llamac.exit_codes import OK

MIN_WIDTH = 20

DESCRIPTION = (
    "Rank documents by their relevance to a query, best first, with a cross-encoder or a model such as Qwen3-Reranker."
)
EXAMPLES = """\
  llamac rerank hf:BAAI/bge-reranker-v2-m3 "What is a panda?" "hi" "The giant panda is a bear species."
  llamac rerank model.gguf "What is a panda?" -f documents.txt --json
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options."""
    parser.repeated = "documents"
    add_operand(parser)
    parser.add_argument("query", metavar="QUERY", help="the query")
    parser.add_argument(
        "documents",
        metavar="DOCUMENT",
        nargs="*",
        default=[],
        help="a document (default: the lines of standard input)",
    )
    texts = parser.add_argument_group("texts")
    add_file(texts, "documents")
    texts.add_argument(
        "--task",
        metavar="TEXT",
        help="the purpose of the query, for a model with a chat template (default: the model's)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print a line of JSON for each document")
    output.add_argument("-q", "--quiet", action="store_true", help="no progress in a pipe or a file")
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    documents = read_texts(options, options.documents, "documents")
    query = decoded(options.query.encode("utf-8", "surrogateescape"), "the query")
    with (
        load_model(options, tokenizer=options.tokenizer, **session_settings(options)) as model,
        shown_progress(options, BAR_DELAY) as report,
    ):
        ranking = model.rerank(query, documents, task=options.task, progress=report)
    width = max(output_width(), MIN_WIDTH)
    for found in ranking:
        if options.json:
            facts = {"index": found.index, "score": found.score, "document": found.document}
            sys.stdout.write(json_line(facts))
        else:
            sys.stdout.write(cut(f"{found.score:8.4f}  {safe_line(found.document)}", width) + "\n")
    return OK
