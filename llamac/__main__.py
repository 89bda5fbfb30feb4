"""`python -m llamac`: the command line."""

from llamac_command import main

if __name__ == "__main__":
    main()
