"""Runs transformers and captures what it computes: the witness of `llamac check --against`.

All families are captured in the same way. transformers lets programs register a function that computes attention; ours
notes queries, keys and values, and calls the model's own. Hooks on modules note everything else. The modules are found
by their place: the attention module is the caller of that function, a layer is the element of a list that contains it,
and the feed-forward network is the other part of a layer with several matrices.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export.parity.capture import WAYS, Capture, Chosen, Floats, Question
from llamac.export.parity.notes import Notes, choose_tokens
from llamac.format.strict_json import read_object

NAME = "llamac_parity"  # of the registered attention


def run_transformers(folder: Path, question: Question) -> Capture:
    """Compute a question with transformers on the CPU, in float32.

    Args:
        folder: The Hugging Face directory.
        question: The question.

    Raises:
        UnsupportedError: If torch or transformers is not installed, or the model's modules are not where they are in
            all known families.
        ExportError: If transformers cannot load the model.
    """
    torch, transformers = _libraries()
    calls = _Calls()
    with _quiet(transformers), torch.no_grad():
        _register(transformers, calls)
        model, problems = _load(torch, transformers, folder)
        modules = _find_modules(torch, model, calls)
        with _hooks(model, modules, calls):
            cache = transformers.DynamicCache(config=model.config)
            for part in question.parts:
                calls.note("logits", 0, _forward(torch, model, part, cache))
        calls.is_noting = False
        chosen = {way: _choose(torch, transformers, model, question, way) for way in WAYS}
    source = f"transformers {transformers.__version__} with torch {torch.__version__}"
    config = read_object(folder / "config.json")
    return Capture(source, question, calls.notes.stages(len(question.ids)), chosen, config, tuple(problems))


# ---- the model


def _libraries() -> tuple[Any, Any]:
    """The modules torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"a comparison with transformers needs torch and transformers ({error}): install the extra `parity`, or "
            "compare with a capture that was made elsewhere (--reference)"
        ) from None
    return torch, transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' warnings and bars during the block."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _load(torch: Any, transformers: Any, folder: Path) -> tuple[Any, list[str]]:
    """The model in float32, and what did not match when it was loaded."""
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=NAME,
            experts_implementation="eager",  # the others round differently
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers raises for a damaged or unknown model
        raise ExportError(f"transformers cannot load {folder}: {error!s:.500}") from None
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, names)))}"
        for kind, names in loading.items()
        if names and kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ]
    return model.eval(), problems


def _forward(torch: Any, model: Any, ids: tuple[int, ...], cache: Any) -> Any:
    """The logits (1, n, vocab_size) of further tokens."""
    # versions differ in the parameter's name
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=torch.tensor([ids]), use_cache=True, **{name: cache}).logits


def _choose(torch: Any, transformers: Any, model: Any, question: Question, way: str) -> Chosen:
    """Let the model continue the prompt."""
    cache = transformers.DynamicCache(config=model.config)

    def forward(ids: tuple[int, ...]) -> Floats:
        last: Floats = _forward(torch, model, ids, cache)[0, -1].numpy()
        return last

    return choose_tokens(question, way, forward)


# ---- what it computes


class _Calls:
    """What the hooks and the attention function have noted.

    Attributes:
        is_noting: Whether they note anything.
        notes: What they have noted.
        attention: The modules that called the attention function, in the order of the layers.
    """

    def __init__(self) -> None:
        self.is_noting = False
        self.notes = Notes()
        self.attention: list[Any] = []

    def note(self, stage: str, layer: int, tensor: Any) -> None:
        """Note the rows (1, m, ...) of a pass."""
        if self.is_noting:
            rows = tensor.detach().float().numpy()
            self.notes.note(stage, layer, np.array(rows.reshape(-1, rows.shape[-1])))

    def note_attention(self, module: Any, query: Any, key: Any, value: Any, output: Any, weights: Any) -> None:
        """Note a call of attention. query (1, heads, m, d); key and value (1, kv_heads, k, d), m <= k."""
        if module not in self.attention:
            self.attention.append(module)
        if not self.is_noting:
            return
        layer, m = self.attention.index(module), query.shape[2]
        is_own = not getattr(module, "is_kv_shared_layer", False)  # the engine has zeros in place of shared ones
        for stage, heads in (("q", query), ("k", is_own * key[:, :, -m:]), ("v", is_own * value[:, :, -m:])):
            self.notes.note(stage, layer, _by_position(heads))
        self.notes.note_cache(layer, _by_position(key), _by_position(value))
        self.notes.note_weights(layer, np.array(weights[0].float().numpy()).transpose(1, 0, 2))
        self.notes.note("attn_mix", layer, np.array(output.float().numpy()).reshape(m, -1))


def _by_position(heads: Any) -> Floats:
    """(1, heads, m, d) as (m, heads * d)."""
    rows: Floats = heads[0].detach().float().numpy().transpose(1, 0, 2)
    return np.array(rows.reshape(len(rows), -1))


def _register(transformers: Any, calls: _Calls) -> None:
    """Register an attention that computes what the model's own does, and notes it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise UnsupportedError(f"{type(module).__name__} has no eager attention: transformers has changed")
        output, weights = own(module, query, key, value, *args, **options)
        calls.note_attention(module, query, key, value, output, weights)
        return output, weights

    transformers.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _find_modules(torch: Any, model: Any, calls: _Calls) -> list[tuple[Any, Any, Any]]:
    """(layer, attention, feed-forward network) of each layer."""
    model(input_ids=torch.tensor([[0]]), use_cache=False)
    names = {module: name for name, module in model.named_modules()}
    if getattr(model.config.get_text_config(), "kv_lora_rank", None):
        raise UnsupportedError(f"{type(model).__name__} has latent attention, whose keys transformers expands first")
    found = []
    for caller in calls.attention:
        path = names[caller].split(".")
        last_index = max((i for i, part in enumerate(path) if part.isdigit()), default=-1)
        layer = model.get_submodule(".".join(path[: last_index + 1]))
        attention = dict(layer.named_children()).get(path[last_index + 1]) if last_index + 1 < len(path) else None
        networks = [part for part in layer.children() if part is not attention and _is_network(part)]
        if attention is None or len(networks) != 1:
            raise UnsupportedError(f"the modules of {type(model).__name__} are not where they are in known families")
        found.append((layer, attention, networks[0]))
    if not found:
        raise UnsupportedError(f"{type(model).__name__} computes attention without transformers' AttentionInterface")
    if len(found) != model.config.get_text_config().num_hidden_layers:
        raise UnsupportedError(f"{type(model).__name__} has layers without attention, which are not compared yet")
    return found


def _is_network(module: Any) -> bool:
    """Whether a module has several matrices."""
    return any(True for _ in module.children()) and any(weights.ndim > 1 for weights in module.parameters())


@contextlib.contextmanager
def _hooks(model: Any, modules: list[tuple[Any, Any, Any]], calls: _Calls) -> Iterator[None]:
    """Note the inputs and outputs of modules during the block."""
    handles = []

    def note_input(module: Any, stage: str, layer: int) -> None:
        def hook(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            calls.note(stage, layer, args[0] if args else options["hidden_states"])

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def note_output(module: Any, stage: str, layer: int) -> None:
        def hook(_: Any, args: tuple[Any, ...], output: Any) -> None:
            calls.note(stage, layer, output[0] if isinstance(output, tuple) else output)

        handles.append(module.register_forward_hook(hook))

    note_input(modules[0][0], "embedding", 0)
    for index, (layer, attention, network) in enumerate(modules):
        note_input(attention, "attn_norm", index)
        note_output(attention, "attn_out", index)
        note_input(network, "ffn_norm", index)
        note_output(network, "ffn", index)
        note_output(layer, "block", index)
    note_input(model.get_output_embeddings(), "output_norm", 0)
    calls.is_noting = True
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
