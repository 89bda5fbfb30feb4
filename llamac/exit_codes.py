"""Exit codes of the commands."""

OK = 0
ERROR = 1  # an error, printed in one line on stderr, or a check that found a difference
USAGE = 2  # wrong arguments
INTERRUPTED = 130  # Ctrl-C
