"""Benchmarks: `python -m bench.NAME` in the repository's root. Results and the log of experiments lie beside them."""
