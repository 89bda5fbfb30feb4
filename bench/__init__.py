"""Benchmarks: `python -m bench.NAME` in the repository's root. This folder also has their results and the log."""
