"""`python -m llamac`: the command line."""

from llamac.cli import main

if __name__ == "__main__":
    main()
