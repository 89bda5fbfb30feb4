"""Writes the table of parameters into docs/server.md: `python docs/make_server.py`."""

from __future__ import annotations

from pathlib import Path

from llamac.openai.parameters import parameters_table

DOCUMENT = Path(__file__).with_name("server.md")
BEGIN, END = "<!-- parameters -->\n", "<!-- end of parameters -->"


def server_document() -> str:
    """Return the text of docs/server.md with the table of this version."""
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{parameters_table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(server_document(), "utf-8")
