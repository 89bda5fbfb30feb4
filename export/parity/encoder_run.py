"""Runs transformers on an encoder, and captures what it computes: the witness of `llamac check --against`.

The hooks are those of `transformers_run`. What follows the model is read from the files of sentence-transformers and
computed here in PyTorch, independently of the exporter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamac.errors import LlamacError, UnsupportedError
from llamac.export.hf.families import ENCODERS
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.export.parity.capture import Capture, Question
from llamac.export.parity.module_hooks import hooks
from llamac.export.parity.transformers_modules import find_encoder
from llamac.export.parity.transformers_run import (
    Calls,
    cannot_compute,
    cannot_load,
    libraries,
    load,
    load_problems,
    quiet,
    registered,
    source_of,
)
from llamac.format.model_folders import MODEL_SETTINGS, MODULES, POOLING
from llamac.format.strict_json import read_object

# PyTorch's modules that a dense layer, or a cross-encoder's score, can end with.
FUNCTIONS = ("Identity", "Sigmoid", "Tanh", "ReLU", "GELU")
# The flags of older versions, in the order in which their vectors are concatenated, and their newer names.
FLAGS = (
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
)
# The model_types of checkpoints with code of their own, transformers' own ones, and the keys that make them the same.
OTHER_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "new": ("gte", {}),
    "llama_bidirec": ("llama", {"is_causal": False}),
}
CROSS_ENCODER = "ForSequenceClassification"  # how the names of their classes end


def run_encoder(folder: Path, question: Question) -> Capture:
    """Compute a question with an encoder of transformers on the CPU, in float32.

    Args:
        folder: The Hugging Face directory.
        question: The question.

    Raises:
        UnsupportedError: If torch or transformers is not installed, the model's modules are not where they are in all
            known encoders, or sentence-transformers' files name something else than a pooling and dense layers.
        ExportError: If transformers cannot load the model, or cannot compute the question with it.
    """
    torch, transformers = libraries()
    config = read_object(folder / "config.json")
    scores = any(str(name).endswith(CROSS_ENCODER) for name in config.get("architectures") or ())
    if scores and config.get("model_type") == "llama_bidirec":
        raise UnsupportedError("transformers has no cross-encoder llama_bidirec: only its models of embeddings")
    calls = Calls(torch, has_cache=False)
    with quiet(transformers), torch.no_grad(), registered(transformers, calls):
        model, problems = _load(torch, transformers, folder, config, scores)
        encoder = find_encoder(torch, model, calls.attention)
        types = {"token_type_ids": torch.tensor([question.types])} if question.types else {}
        try:
            with hooks(encoder.start, encoder.layers, encoder.norm, None, calls):
                output = model(input_ids=torch.tensor([question.ids]), **types)
        except LlamacError:
            raise
        except (IndexError, RuntimeError) as error:  # for a token or a position that the model does not have
            raise cannot_compute(folder, error) from error
        if scores:
            calls.note("score", 0, _score_function(torch, folder, config)(output.logits[:, :1]))
        else:
            calls.note("pooled", 0, _pooled(torch, folder, output.last_hidden_state[0]))
        stages = calls.notes.stages(len(question.ids))
    return Capture(source_of(torch, transformers), question, stages, {}, config, tuple(problems))


def _load(torch: Any, transformers: Any, folder: Path, config: dict[str, Any], scores: bool) -> tuple[Any, list[str]]:
    """The model in float32, and what did not match when it was loaded."""
    family = ENCODERS.get(str(config.get("model_type")))

    def is_harmless(name: str) -> bool:
        """Whether embeddings do without a tensor: the head of a model that predicts tokens, or the pooler."""
        names = (name, name.partition(".")[2])  # checkpoints and models can have different prefixes
        return not scores and family is not None and any(map(family.is_ignored, names))

    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    options = {}
    try:
        if config.get("model_type") in OTHER_NAMES:
            kind, extra = OTHER_NAMES[config["model_type"]]
            keys = {key: value for key, value in config.items() if key != "model_type"}
            options["config"] = transformers.AutoConfig.for_model(kind, **keys, **extra)
        model, loading = load(torch, auto, folder, **options)
    except Exception as error:  # whatever transformers raises for a damaged or unknown model
        raise cannot_load(folder, error) from None
    return model.eval(), load_problems(loading, is_harmless)


def _pooled(torch: Any, folder: Path, norms: Any) -> Any:
    """The embedding before it is scaled to length 1: the pooled rows (n, dim), through the dense layers."""
    n = len(norms)
    steps = torch.arange(1, n + 1, dtype=norms.dtype)
    kinds: dict[str, Callable[[], Any]] = {
        "mean": lambda: norms.mean(dim=0, keepdim=True),
        "cls": lambda: norms[:1],
        "lasttoken": lambda: norms[-1:],
        "max": lambda: norms.max(dim=0, keepdim=True).values,
        "mean_sqrt_len_tokens": lambda: norms.sum(dim=0, keepdim=True) / n**0.5,
        "weightedmean": lambda: (steps @ norms / steps.sum())[None],
    }
    names = _pooling_names(folder) or ["mean"]
    if not {*names} <= {*kinds}:
        known = ", ".join(kinds)
        raise UnsupportedError(f"{POOLING} names the pooling {' and '.join(names)}; supported are {known}")
    rows = torch.cat([kinds[name]() for name in names], dim=1)
    path = folder / MODULES
    for module in json.loads(path.read_bytes()) if path.is_file() else []:
        if str(module["type"]).endswith(".Dense"):
            rows = _dense(torch, folder / module["path"], rows)
    return rows


def _pooling_names(folder: Path) -> list[str]:
    """The ways to pool that sentence-transformers' file names; [] without it. Older versions have a flag for each."""
    settings = read_object(folder / POOLING) if (folder / POOLING).is_file() else {}
    mode = settings.get("pooling_mode")
    if mode is not None:
        return [str(name) for name in (mode if isinstance(mode, list) else [mode])]
    return [name for flag, name in FLAGS if settings.get(flag) is True]


def _dense(torch: Any, folder: Path, rows: Any) -> Any:
    """A dense layer of sentence-transformers."""
    safe = folder / "model.safetensors"
    stored = read_safetensors(safe) if safe.is_file() else read_torch(folder / "pytorch_model.bin")
    weights = {name.removeprefix("linear."): torch.from_numpy(tensor.lazy().array()) for name, tensor in stored.items()}
    settings = read_object(folder / "config.json")
    function = _function(torch, settings.get("activation_function"), folder / "config.json")
    return function(torch.nn.functional.linear(rows, weights["weight"], weights.get("bias")))


def _score_function(torch: Any, folder: Path, config: dict[str, Any]) -> Any:
    """What turns a cross-encoder's logit into its score; a sigmoid by default."""
    path = folder / MODEL_SETTINGS
    name = read_object(path).get("activation_fn") if path.is_file() else None
    settings = config.get("sentence_transformers")
    if name is None and isinstance(settings, dict):
        name = settings.get("activation_fn")
    if name is None:
        name = config.get("sbert_ce_default_activation_function", "torch.nn.modules.activation.Sigmoid")
    return _function(torch, name, folder)


def _function(torch: Any, name: Any, place: Path) -> Any:
    """PyTorch's function of this name."""
    kind = str(name).rpartition(".")[2]
    if kind not in FUNCTIONS:
        raise UnsupportedError(f"{place} names the function {str(name)[:80]!r}; supported are {', '.join(FUNCTIONS)}")
    return getattr(torch.nn, kind)()
