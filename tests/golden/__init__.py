"""Reference logits by transformers and PEFT: cases, tiny checkpoints, stored results, and scripts that make them."""
