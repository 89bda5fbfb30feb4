"""Hugging Face directories: read (`model`) and written (`write`), by one table of model families (`families`)."""
