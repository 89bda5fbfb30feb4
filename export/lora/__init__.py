"""LoRA adapters in PEFT's format (Hu et al., "LoRA", arXiv:2106.09685): read, merge, apply to a loaded model.

An adapter adds `scale * B A` to matrices and numbers to biases. It can replace whole tensors and rows of embeddings,
and rescale the rows of a sum (DoRA, Liu et al., arXiv:2402.09353). Everything else is refused by name.
"""

from llamac.export.lora.attach import attach
from llamac.export.lora.merge import merge
from llamac.export.lora.read import read_adapter

__all__ = ["attach", "merge", "read_adapter"]
