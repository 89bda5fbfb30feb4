"""Benchmarks: run as `python -m bench.NAME` from the repository's root. Results and the log of experiments lie beside them."""
