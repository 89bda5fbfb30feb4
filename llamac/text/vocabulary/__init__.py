"""Readers of every vocabulary format. Each returns the canonical tokenizer.json that a flat file stores."""
