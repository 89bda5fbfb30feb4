"""Measures what quantization costs: how far a model's probabilities are from those of the model it was made from."""
