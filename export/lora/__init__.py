"""LoRA adapters in PEFT's format (Hu et al., "LoRA", arXiv:2106.09685): reads, merges and applies them.

An adapter adds `scale * B A` to matrices, and adds to biases. It can replace whole tensors and rows of embeddings, and
rescale the rows of a sum (DoRA, Liu et al., arXiv:2402.09353). Everything else raises an error that names it.
"""

from llamac.export.lora.attach import attach
from llamac.export.lora.merge import merge
from llamac.export.lora.read import read_adapter

__all__ = ["attach", "merge", "read_adapter"]
