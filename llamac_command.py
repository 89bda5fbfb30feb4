"""Where the installed commands begin: before the imports, so that Ctrl-C during these ends as quietly as later."""

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """`llamac` and `python -m llamac`."""
    _run("main")


def export_main() -> None:
    """`llamac-export`."""
    _run("export_main")


def _run(entry: str) -> None:
    """Runs a function of llamac.cli, which ends the process."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a job in the background may ignore it
        signal.signal(signal.SIGINT, _leave)
    try:
        from llamac import cli

        getattr(cli, entry)(begin=lambda: signal.signal(signal.SIGINT, before))
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except SystemExit:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: nothing is left to interrupt but Python's own end
        raise


def _leave(*_: object) -> None:
    """Ends the process at once: an exception may get lost in what is being imported."""
    os._exit(INTERRUPTED)
