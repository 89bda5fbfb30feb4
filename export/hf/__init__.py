"""Reads (`model`) and writes (`write`) Hugging Face directories with one table of model families (`families`)."""
