"""Hostile input for every reader: targets and mutations, for tests/project/test_fuzz.py and long runs (README.md)."""
