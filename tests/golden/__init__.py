"""Reference logits from transformers: the cases, the checkpoints they run on, what was stored, and how it is made."""
