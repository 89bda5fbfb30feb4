"""The logit lens: the logits that the model's output would have after each layer.

nostalgebraist, "interpreting GPT: the logit lens" (2020). The operations are the engine's, so after the last layer the
lens shows the bits of the model's own logits, up to the rounding of a soft cap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac import ops

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.arguments import Numerics
    from llamac.engine.model import Model

    Floats = NDArray[np.float32]


class Lens:
    """The end of a model: its last norm and its output matrix. Adapters of the model do not change it.

    Args:
        model: The model.
        numerics: How products round their inputs, as in `llamac.load`.
        isa: The kernel set, as in `llamac.load`.
        threads: The number of threads, or None.
    """

    def __init__(self, model: Model, numerics: Numerics, isa: str | None, threads: int | None) -> None:
        self._config = model.config
        self._numerics, self._isa, self._threads = numerics, isa, threads
        names = {record.name for record in model.file.tensors}

        def vector(name: str) -> Floats | None:
            return model.file.tensor(name) if name in names else None

        norm = vector("output_norm.weight")
        assert norm is not None
        self._norm, self._norm_bias = norm, vector("output_norm.bias")
        tied = self._config["tied_output"]
        self._matrix = ops.Matrix.of(model, "token_embedding.weight" if tied else "output.weight")
        self._bias = vector("output.bias")

    def logits(self, stream: Floats) -> Floats:
        """The logits of the residual stream after a layer: (n, dim) -> (n, vocab_size)."""
        import numpy as np

        eps = self._config["norm_eps"]
        if self._config["norm"] == "layer":
            normed = ops.layer_norm(stream, self._norm, self._norm_bias, eps, isa=self._isa)
        else:
            normed = ops.rms_norm(stream, self._norm, eps, isa=self._isa)
        found = ops.matmul(
            normed, self._matrix, self._bias, numerics=self._numerics, isa=self._isa, threads=self._threads
        )
        scale, cap = np.float32(self._config["logit_scale"]), np.float32(self._config["logit_soft_cap"])
        if scale != 1:
            found *= scale
        if cap:
            np.tanh(found / cap, out=found)
            found *= cap
        return found


def lens_layers(n_layers: int, count: int | None) -> list[int]:
    """The layers after which the lens looks: `count` at even distances, with the last; None: all; 0: none."""
    if count is None or count >= n_layers:
        return list(range(n_layers))
    return sorted({n_layers - 1 - i * n_layers // count for i in range(count)})
