"""Reads the modules around the model of a sentence-transformers directory: pooling, dense layers, the longest text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamac.errors import ExportError, UnsupportedError
from llamac.export import pooling
from llamac.export.checkpoint import LazyTensor, ModelConfig
from llamac.export.hf.encoder_config import score_activation
from llamac.export.hf.keys import Keys, shortened
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.export.stored import WEIGHT_DTYPES
from llamac.format.model_folders import MODEL_SETTINGS, MODULE_FOLDERS, MODULES, PAIR_OPTIONS, SENTENCE_CONFIG
from llamac.format.small_files import read_small
from llamac.format.strict_json import MAX_BYTES, parse_array, read_object

# What the flat file calls the activations of dense modules.
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
# The modules that can follow each other, by the last part of their class; D is a dense module.
KINDS = {"Transformer": "T", "Pooling": "P", "Dense": "D", "Normalize": "N", "LogitScore": "L"}
ORDER = re.compile("T(PD*N?|L)?")
# What a dense module reads and writes.
POOLED = "sentence_embedding"


@dataclass(frozen=True)
class SentenceModules:
    """What a directory says about texts and their embeddings.

    Attributes:
        model: The model's config with the dense layers, and for an encoder with the longest text as its context.
        tensors: Those of the dense layers.
        metadata: The entries about pooling, the prompt and the chat template's options.
    """

    model: ModelConfig
    tensors: dict[str, LazyTensor]
    metadata: dict[str, Any]


def read_modules(folder: Path, model: ModelConfig, pooled: str, warnings: list[str]) -> SentenceModules:
    """Read the modules next to a model.

    An encoder that names no pooling pools the mean, as in sentence-transformers.

    Args:
        folder: The directory.
        model: The config of its model.
        pooled: How the model pools its tokens if it is a cross-encoder.
        warnings: Receives warnings for the user.

    Raises:
        UnsupportedError: If there is a module that the engine does not compute.
        ExportError: If a file is damaged.
    """
    if model.scores_pairs:
        model = _with_score(folder, _limited(folder, model, warnings))
        written = {} if model.two_sided else _pair_options(folder, warnings)
        return SentenceModules(model, {}, {pooling.METADATA_KEY: pooled, **_prompt(folder), **written})
    default = {pooling.METADATA_KEY: "mean"} if model.two_sided else {}
    metadata = default | pooling.from_hf(folder, warnings)
    if prompt := _prompt(folder).get("prompt"):
        warnings.append(
            f"{MODEL_SETTINGS}: default_prompt_name names the prompt {shortened(prompt)}, which sentence-transformers "
            "prepends to every text; llamac does not, so prepend it yourself"
        )
    if not (folder / MODULES).is_file():
        return SentenceModules(_limited(folder, model, warnings), {}, metadata)
    names = list(_dense_folders(folder, warnings))
    tensors: dict[str, LazyTensor] = {}
    widths, activations = [model.dim], []
    for index, name in enumerate(names):
        width, activation = _read_dense(folder / name, f"pooled.{index}", widths[-1], tensors)
        widths.append(width)
        activations.append(activation)
    model = replace(
        _limited(folder, model, warnings), pooled_dim=tuple(widths[1:]), pooled_activation=tuple(activations)
    )
    return SentenceModules(model, tensors, metadata)


def _limited(folder: Path, model: ModelConfig, warnings: list[str]) -> ModelConfig:
    """An encoder's config with the length at which sentence-transformers cuts texts."""
    path = folder / SENTENCE_CONFIG
    if not model.two_sided or not path.is_file():
        return model
    keys = Keys(read_object(path))
    longest = keys.integer("max_seq_length", 1, 1 << 30)
    if keys.flag("do_lower_case", default=False, nullable=True):
        warnings.append(f"{SENTENCE_CONFIG}: do_lower_case is true, which llamac does not apply: give lower-case texts")
    if keys.problems:
        raise ExportError(f"{path}: {'; '.join(keys.problems)}")
    return replace(model, context=min(model.context, longest or model.context))


def _with_score(folder: Path, model: ModelConfig) -> ModelConfig:
    """A cross-encoder's config with the activation of its score that newer versions of sentence-transformers store."""
    path = folder / MODEL_SETTINGS
    name = read_object(path).get("activation_fn") if path.is_file() else None
    if name is None:
        return model
    return replace(model, pooled_activation=(*model.pooled_activation[:-1], score_activation(name, MODEL_SETTINGS)))


def _prompt(folder: Path) -> dict[str, str]:
    """The entry with the prompt that sentence-transformers uses by default; none if there is no such prompt."""
    path = folder / MODEL_SETTINGS
    keys = Keys(read_object(path) if path.is_file() else {})
    name, prompts = keys.value("default_prompt_name"), keys.value("prompts")
    if name is None:
        return {}
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise ExportError(f"{path}: default_prompt_name is {shortened(name)}, expected the name of one of its prompts")
    return {"prompt": prompt} if prompt else {}


def _pair_options(folder: Path, warnings: list[str]) -> dict[str, Any]:
    """The entry with the options of the chat template that writes pairs. Options that llamac lacks are a warning."""
    path = folder / SENTENCE_CONFIG
    found = read_object(path) if path.is_file() else {}
    kinds = found.get("processing_kwargs")
    options = kinds.get("chat_template") if isinstance(kinds, dict) else None
    if not options:
        return {}
    if isinstance(options, dict) and all(key in PAIR_OPTIONS and type(options[key]) is bool for key in options):
        return {"pair_options": options}
    warnings.append(
        f"{SENTENCE_CONFIG}: processing_kwargs.chat_template is {shortened(options)}, which llamac does not apply: it "
        f"knows {' and '.join(PAIR_OPTIONS)}, true or false"
    )
    return {}


def _dense_folders(folder: Path, warnings: list[str]) -> Iterator[str]:
    """Yield the folders of the dense modules, in their order."""
    path = folder / MODULES
    modules: list[Any] = parse_array(read_small(path, MAX_BYTES, ExportError), str(path))
    kinds = []
    for module in modules:
        name, kind = (module.get("path"), module.get("type")) if isinstance(module, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(kind, str):
            raise ExportError(f"{path}: the module {shortened(module)} has no path or no type")
        kinds.append(kind.rpartition(".")[2])
        if kinds[-1] == "Dense":
            if not re.fullmatch(r"\d_\w+", name):
                raise ExportError(f"{path}: the path {shortened(name)} is not a folder {MODULE_FOLDERS}")
            yield name
    if not ORDER.fullmatch("".join(KINDS.get(kind, "?") for kind in kinds)):
        raise UnsupportedError(
            f"{MODULES} lists the modules {', '.join(kinds)}; supported are Transformer alone or before LogitScore, "
            "and Transformer, Pooling, Dense layers and Normalize, in this order"
        )
    if "LogitScore" in kinds:
        warnings.append(f'{MODULES} lists LogitScore: rerank gives the probability of "yes", whatever its tokens are')


def _read_dense(folder: Path, part: str, columns: int, tensors: dict[str, LazyTensor]) -> tuple[int, str]:
    """Add the tensors of a dense module. Returns its width and its activation."""
    keys = Keys(read_object(folder / "config.json"))
    rows, inputs = keys.size("out_features", "pooled_dim"), keys.size("in_features", "pooled_dim")
    has_bias = keys.flag("bias", default=True)
    kind = keys.value("activation_function")
    source = keys.value("module_input_name") or POOLED
    target = keys.value("module_output_name") or source
    if (source, target) != (POOLED, POOLED):
        raise UnsupportedError(
            f"{folder / 'config.json'}: the module makes {shortened(target)} from {shortened(source)}; supported are "
            f"modules that change the {POOLED}"
        )
    if keys.flag("use_residual", default=False):
        raise UnsupportedError(f"{folder / 'config.json'}: use_residual is true, which llamac does not compute")
    keys.problems += [f"{key}: no such key, and it could change the embedding" for key in keys.unused()]
    if keys.problems:
        raise ExportError(f"{folder / 'config.json'}: {'; '.join(keys.problems)}")
    if kind not in ACTIVATIONS:
        raise UnsupportedError(
            f"{folder / 'config.json'}: the activation {shortened(kind)} is not supported; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    needed = {"weight": (rows, columns), **({"bias": (rows,)} if has_bias else {})}
    safe = folder / "model.safetensors"
    stored = read_safetensors(safe) if safe.is_file() else read_torch(folder / "pytorch_model.bin")
    found = {name: (tensor.shape, tensor.dtype in WEIGHT_DTYPES) for name, tensor in stored.items()}
    if inputs != columns or found != {f"linear.{name}": (shape, True) for name, shape in needed.items()}:
        raise ExportError(f"{folder}: its tensors do not match its config, or the module before it: {sorted(stored)}")
    for name in needed:
        tensors[f"{part}.{name}"] = stored[f"linear.{name}"].lazy()
    return rows, ACTIVATIONS[kind]
