"""Hooks on the modules of a model of transformers, which note the inputs and outputs of the graph's stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llamac.export.parity.own_attention import note_own_attention, own_attention
from llamac.export.parity.transformers_modules import Layer

if TYPE_CHECKING:
    from llamac.export.parity.transformers_run import Calls


@contextlib.contextmanager
def hooks(start: Any, layers: list[Layer], norm: Any, head: Any | None, calls: Calls) -> Iterator[None]:
    """Note the inputs and outputs of modules during the block.

    Args:
        start: The module whose input is the embedding.
        layers: The layers.
        norm: The final norm.
        head: The output matrix, or None: before it, the final norm is called for the last time.
        calls: Receives the notes.
    """
    set_up = _Hooks(calls)
    set_up.note_input(start, "embedding", 0)
    for index, layer in enumerate(layers):
        set_up.note_layer(layer, index)
    if head is None:
        set_up.note_output("output_norm", 0, norm)
    else:
        set_up.note_last_norm(norm, head)
    calls.is_noting = True
    try:
        yield
    finally:
        set_up.remove()


class _Hooks:
    """Registers hooks that pass stages to `Calls.note`, and removes them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._handles: list[Any] = []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def note_layer(self, layer: Layer, index: int) -> None:
        if layer.mixer is not None:
            self.note_input(layer.mixer, "attn_norm", index)
            self._note_inputs(layer.projections, "attn_mix", index)
            if layer.following is None:
                self.note_output("attn_out", index, layer.mixed or layer.mixer)
            else:
                self._note_sum(layer.module, layer.following, index)
        if layer.attention is not None:
            self._calls.layers[layer.attention] = index
            if own_attention(layer.attention):
                self._handles.extend(note_own_attention(self._calls, layer.attention, index))
            if hasattr(layer.attention, "kv_b_proj"):
                self._note_latent(layer.attention)
        if layer.network is not None:
            self.note_input(layer.network, "ffn_norm", index)
            if layer.sum is None:
                self.note_output("ffn", index, layer.down or layer.network, *layer.beside)
            else:
                self.note_input(layer.sum, "ffn", index)
        if layer.end is None:
            self.note_output("block", index, layer.module)
        else:
            self.note_input(layer.end, "block", index)

    def note_input(self, module: Any, stage: str, layer: int) -> None:
        def hook(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._calls.note(stage, layer, args[0] if args else options["hidden_states"])

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def note_output(self, stage: str, layer: int, *modules: Any) -> None:
        """Note the sum of the modules' outputs."""
        outputs: list[Any] = []

        def hook(_: Any, args: tuple[Any, ...], output: Any) -> None:
            outputs.append(output[0] if isinstance(output, tuple) else output)
            if len(outputs) == len(modules):
                self._calls.note(stage, layer, sum(outputs[1:], outputs[0]))
                outputs.clear()

        self._handles.extend(module.register_forward_hook(hook) for module in modules)

    def note_last_norm(self, norm: Any, head: Any) -> None:
        """Note the norm's last output before the output matrix: nanochat also norms the embedding with the module."""
        normed: list[Any] = []

        def of_norm(_: Any, args: tuple[Any, ...], output: Any) -> None:
            normed.append(output)

        def of_head(_: Any, args: tuple[Any, ...]) -> None:
            self._calls.note("output_norm", 0, normed[-1])

        self._handles.append(norm.register_forward_hook(of_norm))
        self._handles.append(head.register_forward_pre_hook(of_head))

    def _note_inputs(self, modules: tuple[Any, ...], stage: str, layer: int) -> None:
        """Note the inputs of modules that compute side by side, in the order of the modules."""
        inputs: dict[Any, Any] = {}

        def hook(module: Any, args: tuple[Any, ...]) -> None:
            inputs[module] = args[0]
            if len(inputs) == len(modules):
                rows = [inputs[one].reshape(1, -1, one.weight.shape[1]) for one in modules]
                self._calls.note(stage, layer, self._calls.together(rows))
                inputs.clear()

        self._handles.extend(module.register_forward_pre_hook(hook) for module in modules)

    def _note_sum(self, whole: Any, following: Any, layer: int) -> None:
        """Note what two mixers of a layer add to the residual stream before the module that follows them."""
        streams: list[Any] = []

        def of_layer(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            streams.append(args[0] if args else options["hidden_states"])

        def of_following(_: Any, args: tuple[Any, ...]) -> None:
            self._calls.note("attn_out", layer, args[0] - streams.pop())

        self._handles.append(whole.register_forward_pre_hook(of_layer, with_kwargs=True))
        self._handles.append(following.register_forward_pre_hook(of_following))

    def _note_latent(self, attention: Any) -> None:
        """Note the latents of an attention, and whether its RoPE rotates neighbors."""

        def of_angles(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if getattr(options["position_embeddings"], "is_complex", bool)():
                self._calls.neighbors.add(attention)

        def of_latent(_: Any, args: tuple[Any, ...]) -> None:
            self._calls.latents[attention] = args[0]

        self._handles.append(attention.register_forward_pre_hook(of_angles, with_kwargs=True))
        self._handles.append(attention.kv_b_proj.register_forward_pre_hook(of_latent))
