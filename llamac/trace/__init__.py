"""Traces of a text: what a model computes for each token, as a page to look at and as tensors."""
