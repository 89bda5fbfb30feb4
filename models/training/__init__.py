"""The recipe of the built-in models: training text, tokenizers, training. Not installed; run from a checkout."""
