"""Hostile input for every reader: targets and mutations, for tests/test_fuzz.py and long runs (README.md)."""
