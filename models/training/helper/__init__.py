"""The recipe of the built-in model `helper`: its conversations, tokenizer, network, training and evaluation."""
