"""Finds where the stages of a model are among transformers' modules.

Names differ between families, places do not. The layers are the elements of a list; the mixer of a layer is the part
that computes attention, or that has a convolution; the feed-forward network is the part with several matrices
beside it. A layer can lack one of the two. A pass of one token shows the order in which modules are called.

BERT and its relatives norm the residual stream after each branch. Their layers end with a LayerNorm, and each branch is
what is called before one.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.parity.own_attention import own_attention


@dataclass(frozen=True)
class Layer:
    """Where the stages of a layer are.

    Attributes:
        module: The layer. Its output is the stage "block".
        mixer: Its attention, or what mixes positions with a state. Its input and output are "attn_norm" and "attn_out".
            None in a layer without either. Of both side by side, what has a state; the input of attention is scaled.
        projections: The last matrix of each mixer, attention's first. Their inputs are "attn_mix".
        following: Of two mixers, the norm after them: its input less the layer's is "attn_out"; otherwise None.
        attention: The module that computes attention; None in a layer without attention.
        network: The feed-forward network, whose input and output are "ffn_norm" and "ffn"; None in a layer without one.
        beside: Further networks, whose outputs are added to that of the first.
        sum: The norm whose input is "ffn" in place of the network's output, because experts beside it are added first;
            or None.
        mixed: The module whose output is "attn_out" in place of the mixer's; or None.
        down: The matrix whose output is "ffn" in place of the network's; or None.
        end: The norm whose input is "block" in place of the layer's output; or None.
    """

    module: Any
    mixer: Any | None
    projections: tuple[Any, ...]
    following: Any | None
    attention: Any | None
    network: Any | None
    beside: tuple[Any, ...]
    sum: Any | None = None
    mixed: Any | None = None
    down: Any | None = None
    end: Any | None = None


@dataclass(frozen=True)
class Encoder:
    """Where the stages of an encoder are.

    Attributes:
        start: The module whose input is the stage "embedding": the norm of the embedding, or the first layer.
        layers: The layers, in order.
        norm: The norm whose output is the stage "output_norm".
    """

    start: Any
    layers: list[Layer]
    norm: Any


def find_encoder(torch: Any, model: Any, callers: list[Any]) -> Encoder:
    """The modules of an encoder. Arguments and errors are those of `find_modules`."""
    called = _calls_of_a_pass(torch, model)
    modules = _layers_of(torch, model, called)
    norms = torch.nn.LayerNorm
    before = called[: called.index(modules[0])]
    start = next((part for part in reversed(before) if isinstance(part, norms)), modules[0])
    last = _inside(modules[-1], called)
    if isinstance(last[-1], norms):
        return Encoder(start, [_normed_layer(torch, model, layer, callers, called) for layer in modules], last[-1])
    layers = [_layer(torch, model, layer, callers, called) for layer in modules]
    following = called[called.index(last[-1]) + 1 :]
    if not following:
        raise _unknown(model, "no norm follows the layers")
    return Encoder(start, layers, following[0])


def find_modules(torch: Any, model: Any, callers: list[Any]) -> tuple[list[Layer], Any]:
    """The layers of a model, in order, and its final norm, whose last output is the stage "output_norm".

    Args:
        torch: The module torch.
        model: The model.
        callers: Receives the modules that call the attention function, from that function.

    Raises:
        UnsupportedError: If the modules are not where they are in all known families.
    """
    called = _calls_of_a_pass(torch, model, use_cache=False)
    layers = _layers_of(torch, model, called)
    found = [_layer(torch, model, layer, callers, called) for layer in layers]
    attention = [layer.attention for layer in found if layer.attention is not None]
    if set(callers) - set(attention):
        raise _unknown(model, "attention is computed outside the layers")
    # the input of the output matrix can be scaled, so it is not the stage
    before_head = called[: called.index(model.get_output_embeddings())]
    return found, before_head[-1]


def _layers_of(torch: Any, model: Any, called: list[Any]) -> list[Any]:
    """The layers among the modules that a pass has called."""
    n_layers = model.config.get_text_config().num_hidden_layers
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == n_layers)
    layers = next((part for part in lists if set(part) <= set(called)), None)
    if layers is None:
        raise _unknown(model, f"no list has its {n_layers} layers")
    return list(layers)


def _calls_of_a_pass(torch: Any, model: Any, **options: Any) -> list[Any]:
    """The modules that compute a token, in the order of their calls. options: of the pass."""
    called: list[Any] = []
    handles = [part.register_forward_pre_hook(lambda module, _: called.append(module)) for part in model.modules()]
    try:
        model(input_ids=torch.tensor([[0]]), **options)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _layer(torch: Any, model: Any, layer: Any, callers: list[Any], called: list[Any]) -> Layer:
    parts = [part for part in called if part in set(layer.children())]
    attention = next((part for part in layer.modules() if part in callers or own_attention(part)), None)
    mixers = [
        part
        for part in parts
        if attention in set(part.modules()) or any(isinstance(one, torch.nn.Conv1d) for one in part.modules())
    ]
    networks = [part for part in parts if part not in mixers and _is_network(part)]
    mixers.sort(key=lambda part: attention not in set(part.modules()))
    if len(mixers) > 2 or (len(mixers) == 2 and attention is None) or not (mixers or networks):
        raise _unknown(model, f"a layer has {len(mixers)} parts that mix positions")
    projections = tuple(_last_matrix(part, called) for part in mixers)
    sum_of_networks = getattr(layer, "post_feedforward_layernorm", None) if len(networks) > 1 else None
    if None in projections:
        raise _unknown(model, "what mixes positions has no matrix")
    down = None
    if not networks:  # the matrices can be the layer's own
        networks = [part for part in _matrices(parts) if part not in mixers][:1]
        down = next((part for part in reversed(_matrices(parts)) if networks and part not in mixers), None)
    network, *beside = networks or [None]
    down = _last_matrix(network, called) if _adds_residual(network) else down
    mixer = mixers[-1] if mixers else None
    mixed = projections[-1] if _adds_residual(mixer) else None
    following = parts[parts.index(network) - 1] if len(mixers) == 2 and network is not None else None
    ends = {"sum": sum_of_networks, "mixed": mixed, "down": down}
    return Layer(layer, mixer, projections, following, attention, network, tuple(beside), **ends)


def _normed_layer(torch: Any, model: Any, layer: Any, callers: list[Any], called: list[Any]) -> Layer:
    """A layer that norms the residual stream after attention and after the feed-forward network."""
    inside = _inside(layer, called)
    norms = [inside.index(part) for part in inside if isinstance(part, torch.nn.LayerNorm)]
    attention = next((part for part in inside if part in callers or own_attention(part)), None)
    if len(norms) != 2 or attention is None:
        raise _unknown(model, f"a layer has {len(norms)} norms" if attention else "a layer has no attention")
    mixing, network = inside[: norms[0]], _matrices(inside[norms[0] :])
    projection = _matrices(mixing)[-1]
    return Layer(
        layer,
        mixer=attention,
        projections=(projection,),
        following=None,
        attention=attention,
        network=network[0],
        beside=(),
        mixed=projection,
        down=network[-1],
        end=inside[norms[1]],
    )


def _inside(module: Any, called: list[Any]) -> list[Any]:
    """The modules that a module calls, in order."""
    parts = set(module.modules()) - {module}
    return [part for part in called if part in parts]


def _matrices(parts: list[Any]) -> list[Any]:
    """The modules among others that are matrices."""
    return [part for part in parts if any(weights.ndim == 2 for weights in part.parameters(False))]


def _last_matrix(module: Any, called: list[Any]) -> Any | None:
    """The last matrix that a module calls, or None; a module can be a matrix."""
    matrices = _matrices([*([module] if module in called else []), *_inside(module, called)])
    return matrices[-1] if matrices else None


def _adds_residual(module: Any) -> bool:
    """Whether a module adds the residual stream to its result itself, as BLOOM's and MPT's do."""
    return module is not None and "residual" in inspect.signature(module.forward).parameters


def _is_network(module: Any) -> bool:
    """Whether a module has several matrices."""
    return any(True for _ in module.children()) and any(weights.ndim > 1 for weights in module.parameters())


def _unknown(model: Any, why: str) -> UnsupportedError:
    return UnsupportedError(f"the modules of {type(model).__name__} are not where they are in known families: {why}")
