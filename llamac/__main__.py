"""Entry points of the installed commands.

They handle Ctrl-C before the slow imports, so that it ends the process quietly. Imports make many objects and no
garbage, so garbage collection begins with the command, and leaves those objects out.
"""

import gc
import os
import signal

from llamac.exit_codes import INTERRUPTED


def main() -> None:
    """Run `llamac` or `python -m llamac`."""
    _run("main")


def export_main() -> None:
    """Run `llamac-export`."""
    _run("export_main")


def _run(entry: str) -> None:
    """Call a function of llamac.cli, which exits the process."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background job may ignore SIGINT
        signal.signal(signal.SIGINT, _exit_now)
    gc.disable()

    def begin() -> None:
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGINT, before)

    try:
        from llamac import cli

        getattr(cli, entry)(begin=begin)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except SystemExit:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the interpreter's shutdown is left to interrupt
        raise


def _exit_now(*_: object) -> None:
    """Exit without an exception, which a module being imported could swallow."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
