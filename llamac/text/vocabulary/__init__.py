"""Vocabularies of every kind of file (`load`), as the tokenizer.json that a flat file holds."""
