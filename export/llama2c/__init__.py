"""Reads (`model`) and writes (`write`) llama2.c's model files."""
