"""Records real runs of the command line as a picture: `python docs/make_run.py` writes docs/run.svg."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    ["run", "-i", "Once upon a time", "-n", "120", "-t", "0.8", "-s", "7"],
    ["check", "--data"],
)
WIDTH = 100


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for arguments in COMMANDS:
        shown = " ".join(f'"{word}"' if " " in word else word for word in arguments)
        console.print(Text(f"$ llamac {shown}", style="bold green"))
        done = subprocess.run([sys.executable, "-m", "llamac", *arguments], capture_output=True, text=True, check=True)
        console.print(Text(done.stdout.rstrip("\n")))
        if done.stderr:
            console.print(Text(done.stderr.rstrip("\n"), style="dim"))
    picture = console.export_svg(title="llamac")
    # the picture loads nothing from the network: the reader's own monospaced font serves
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    Path(__file__).with_name("run.svg").write_text(picture)


if __name__ == "__main__":
    main()
