"""Reads and writes llamac's own flat file."""
