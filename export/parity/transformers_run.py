"""Runs transformers and captures what it computes: the witness of `llamac check --against`.

All families are captured in the same way. transformers lets programs register a function that computes attention; this
module's function records queries, keys and values, and calls the model's own. Hooks (`module_hooks`) on modules, which
`transformers_modules` finds, record everything else.

Latent attention has keys and values for each head in transformers, and one latent for all heads in the engine. What is
noted is the engine's form: queries times the matrix that expands keys, and the latents from which both are expanded.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llamac.errors import ExportError, LlamacError, UnsupportedError
from llamac.export.hf.families import FAMILIES
from llamac.export.hf.keys import Keys
from llamac.export.hf.rope import states_base
from llamac.export.parity.capture import WAYS, Capture, Chosen, Floats, Question
from llamac.export.parity.module_hooks import hooks
from llamac.export.parity.notes import Notes, choose_tokens
from llamac.export.parity.own_attention import EAGER
from llamac.export.parity.transformers_modules import find_modules
from llamac.format.strict_json import read_object

NAME = "llamac_parity"  # of the registered attention
# What makes transformers compute with the numbers that quantized weights stand for, by their quant_method.
DEQUANTIZE = {"fp8": {"dequantize": True}, "compressed-tensors": {"run_compressed": False}}
# Families whose classes count positions from 0 in each call that does not state them.
FROM_ZERO = ("bamba",)


def run_transformers(folder: Path, question: Question) -> Capture:
    """Compute a question with transformers on the CPU, in float32.

    Args:
        folder: The Hugging Face directory.
        question: The question.

    Raises:
        UnsupportedError: If torch or transformers is not installed, or the model's modules are not where they are in
            all known families.
        ExportError: If transformers cannot load the model, or cannot compute the question with it.
    """
    torch, transformers = libraries()
    calls = Calls(torch)
    with quiet(transformers), torch.no_grad(), registered(transformers, calls):
        model, problems = _load(torch, transformers, folder)
        layers, norm = find_modules(torch, model, calls.attention)
        cache = transformers.DynamicCache(config=model.config)
        try:
            with hooks(layers[0].module, layers, norm, model.get_output_embeddings(), calls):
                for part in question.parts:
                    calls.note("logits", 0, _forward(torch, model, part, cache))
            calls.is_noting = False
            chosen = {way: _choose(torch, transformers, model, question, way) for way in WAYS}
        except LlamacError:
            raise
        except (IndexError, RuntimeError) as error:  # for a token or a position that the model does not have
            raise cannot_compute(folder, error) from error
        stages = calls.notes.stages(len(question.ids))
    config = read_object(folder / "config.json")
    return Capture(source_of(torch, transformers), question, stages, chosen, config, tuple(problems))


def source_of(torch: Any, transformers: Any) -> str:
    """The names of a capture's implementation and their versions."""
    return f"transformers {transformers.__version__} with torch {torch.__version__}"


def cannot_compute(folder: Path, error: Exception) -> ExportError:
    """The error for a question that a directory's model cannot compute."""
    return ExportError(
        f"transformers cannot compute the prompt with {folder}, which may be another model's: {error!s:.200}"
    )


# ---- the model


def libraries() -> tuple[Any, Any]:
    """The modules torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"a comparison with transformers needs torch and transformers ({error}): "
            'pip install "llamac[parity]", or compare with a capture that was made elsewhere (--reference)'
        ) from None
    return torch, transformers


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
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
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        row = FAMILIES.get(config.model_type)
        if row and row.optional_rope and not states_base(Keys(read_object(folder / "config.json"))):
            config.rope_parameters = {"rope_type": "default", "rope_theta": None}  # in place of transformers' base
        quantization = getattr(config, "quantization_config", None)
        if isinstance(quantization, dict) and quantization.get("quant_method") in DEQUANTIZE:
            quantization |= DEQUANTIZE[quantization["quant_method"]]
        # a model with images has a class of its own, and computes texts without its vision tower
        auto = transformers.AutoModelForImageTextToText
        if not hasattr(config, "vision_config") and config.model_type != "mistral4":  # which has only the other class
            auto = transformers.AutoModelForCausalLM
        own = {"attn_implementation": "eager"} if config.model_type in EAGER else {}
        # other implementations of experts round differently
        model, loading = load(torch, auto, folder, config=config, experts_implementation="eager", **own)
    except LlamacError:
        raise
    except Exception as error:  # whatever transformers raises for a damaged or unknown model
        raise cannot_load(folder, error) from None
    return of_texts(model).eval(), load_problems(loading)


def load(torch: Any, auto: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model in float32 that calls the registered attention, and transformers' report about loading it.

    auto: Which of transformers' classes loads it.
    """
    loaded: tuple[Any, dict[str, Any]] = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        **{"attn_implementation": NAME, **options},
    )
    return loaded


def cannot_load(folder: Path, error: Exception) -> ExportError:
    """The error for a directory that transformers cannot load."""
    return ExportError(f"transformers cannot load {folder}: {error!s:.500}")


def load_problems(loading: dict[str, Any], is_harmless: Callable[[str], bool] = lambda name: False) -> list[str]:
    """What did not match when a model was loaded. is_harmless: Whether a tensor does not matter."""
    found = {
        kind: sorted(name for name in map(str, names) if not is_harmless(name))
        for kind, names in loading.items()
        if kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    return [f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in found.items() if names]


def of_texts(model: Any) -> Any:
    """The part of a model that computes logits of texts. Without images, Llama 4's whole model can fail."""
    inner = getattr(model, "language_model", None)
    return inner if hasattr(inner, "lm_head") else model


def _forward(torch: Any, model: Any, ids: tuple[int, ...], cache: Any) -> Any:
    """The logits (1, n, vocab_size) of further tokens."""
    # versions differ in the parameter's name
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options = {name: cache}
    if model.config.model_type in FROM_ZERO:
        start = cache.get_seq_length()
        options["position_ids"] = torch.arange(start, start + len(ids))[None]
    return model(input_ids=torch.tensor([ids]), use_cache=True, **options).logits


def _choose(torch: Any, transformers: Any, model: Any, question: Question, way: str) -> Chosen:
    """Let the model continue the prompt."""
    cache = transformers.DynamicCache(config=model.config)

    def forward(ids: tuple[int, ...]) -> Floats:
        last: Floats = _forward(torch, model, ids, cache)[0, -1].numpy()
        return last

    return choose_tokens(question, way, forward)


# ---- what it computes


class Calls:
    """What the hooks and the attention function have noted.

    Attributes:
        is_noting: Whether they note anything.
        notes: What they have noted.
        has_cache: Whether the model has a KV cache.
        attention: The modules that called the attention function.
        layers: Their layers.
        latents: The latents in the cache, (1, 1, k, rank), of modules with latent attention.
        neighbors: Of these modules, those that leave RoPE's pairs neighbors, because they multiply complex numbers.
    """

    def __init__(self, torch: Any, *, has_cache: bool = True) -> None:
        self._torch = torch
        self.has_cache = has_cache
        self.is_noting = False
        self.notes = Notes()
        self.attention: list[Any] = []
        self.layers: dict[Any, int] = {}
        self.latents: dict[Any, Any] = {}
        self.neighbors: set[Any] = set()

    def forget(self) -> None:
        """Let go of the model's modules and of the notes."""
        self.is_noting = False
        self.notes = Notes()
        for of_modules in (self.attention, self.layers, self.latents, self.neighbors):
            of_modules.clear()

    def note(self, stage: str, layer: int, tensor: Any) -> None:
        """Note the rows (1, m, ...) of a pass."""
        if self.is_noting:
            rows = tensor.detach().float().numpy()
            self.notes.note(stage, layer, np.array(rows.reshape(-1, rows.shape[-1])))

    def together(self, rows: list[Any]) -> Any:
        """Rows (1, m, ...) side by side."""
        return self._torch.cat(rows, dim=-1)

    def note_attention(self, module: Any, query: Any, key: Any, value: Any, weights: Any) -> None:
        """Note a call of attention. query (1, heads, m, d); key and value (1, kv_heads, k, d), m <= k."""
        if not self.is_noting:
            if module not in self.attention:
                self.attention.append(module)
            return
        layer, m = self.layers[module], query.shape[2]
        if module in self.latents:
            query, key, value = self._absorbed(module, query, key)
        is_own = not getattr(module, "is_kv_shared_layer", False)  # the engine has zeros in place of shared ones
        for stage, heads in (("q", query), ("k", is_own * key[:, :, -m:]), ("v", is_own * value[:, :, -m:])):
            self.notes.note(stage, layer, _by_position(heads))
        if self.has_cache:
            self.notes.note_cache(layer, _by_position(key), _by_position(value))
        self.note_weights(layer, weights)

    def left_by_sinks(self, scores: Any, sinks: Any) -> Any:
        """What the sinks of the heads leave to the positions, (1, heads, m, 1). scores (1, heads, m, k)."""
        return self._torch.sigmoid(self._torch.logsumexp(scores, dim=-1) - sinks.view(1, -1, 1)).unsqueeze(-1)

    def note_weights(self, layer: int, weights: Any) -> None:
        """Note attention weights (1, heads, m, k)."""
        if self.is_noting:
            self.notes.note_weights(layer, np.array(weights[0].float().numpy()).transpose(1, 0, 2))

    def _absorbed(self, module: Any, query: Any, key: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values of latent attention in the engine's form, rotated dimensions first."""
        latent = self.latents[module]
        nope = query.shape[3] - module.qk_rope_head_dim
        expanding = module.kv_b_proj.weight.view(query.shape[1], -1, latent.shape[3])[:, :nope]  # (heads, nope, rank)
        rotated = [part[..., nope:] for part in (query, key[:, :1])]
        if module in self.neighbors:
            rotated = [part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for part in rotated]
        queries = self._torch.cat((rotated[0], query[..., :nope] @ expanding), dim=-1)
        return queries, self._torch.cat((rotated[1], latent), dim=-1), latent


def _by_position(heads: Any) -> Floats:
    """(1, heads, m, d) as (m, heads * d)."""
    rows: Floats = heads[0].detach().float().numpy().transpose(1, 0, 2)
    return np.array(rows.reshape(len(rows), -1))


def _with_sinks(calls: Calls, module: Any, query: Any, key: Any, weights: Any, mask: Any, options: Any) -> Any:
    """The attention weights less the share of the sinks, where the module scales its output by what they leave."""
    sinks = getattr(module, "sinks", None)
    if sinks is None or (weights.sum(dim=-1) - 1).abs().max() > 2e-6:
        return weights
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(2, 3) * options["scaling"]
    return calls.left_by_sinks(scores if mask is None else scores + mask, sinks) * weights


def _unscaled(module: Any, query: Any, options: dict[str, Any]) -> Any:
    """The queries before the scale of the scores, by which OPT multiplies them itself."""
    scale: Any = options.get("scaling")
    own: Any = getattr(module, "scaling", scale)
    return query if own == scale else query * (scale / own)


@contextlib.contextmanager
def registered(transformers: Any, calls: Calls) -> Iterator[None]:
    """Register an attention that computes what the model's own does, and notes it during the block.

    transformers keeps what is registered, so that no module and no note may stay in it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise UnsupportedError(f"{type(module).__name__} has no eager attention: transformers has changed")
        output, weights = own(module, query, key, value, *args, **options)
        query = _unscaled(module, query, options)
        mask = args[0] if args else options.get("attention_mask")
        calls.note_attention(module, query, key, value, _with_sinks(calls, module, query, key, weights, mask, options))
        return output, weights

    transformers.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        yield
    finally:
        calls.forget()
