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
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu_erf",
}
# The modules that can follow each other, by the last part of their class. A dropout does nothing after training.
KINDS = {"Transformer": "T", "Pooling": "P", "Dense": "D", "Normalize": "N", "LogitScore": "L", "Dropout": ""}
ORDER = re.compile("T(PD*N*|L)?")
WITH_FILES = ("Dense", "LogitScore")  # modules with files of their own
# What a dense module reads and writes, and what the module of a score reads.
POOLED, LOGITS = "sentence_embedding", "causal_logits"
EMPTY_PROMPTS = ("query", "document")


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

    Args:
        folder: The directory.
        model: The config of its model.
        pooled: How the model pools its tokens if it is a cross-encoder, or an encoder without these modules.
        warnings: Receives warnings for the user.

    Raises:
        UnsupportedError: If there is a module that the engine does not compute.
        ExportError: If a file is damaged.
    """
    settings = _settings(folder)
    if model.scores_pairs:
        model = _with_score(settings, _limited(folder, model, warnings))
        written = _pair_options(folder, warnings)
        return SentenceModules(model, {}, {pooling.METADATA_KEY: pooled, **_prompts(settings), **written})
    default = {pooling.METADATA_KEY: pooled} if model.two_sided else {}
    metadata = default | pooling.from_hf(folder, warnings) | _prompts(settings)
    if not (folder / MODULES).is_file():
        return SentenceModules(_limited(folder, model, warnings), {}, metadata)
    modules = list(_modules(folder))
    names = [name for kind, name in modules if kind == "Dense"]
    tensors: dict[str, LazyTensor] = {}
    widths, activations = [model.dim], []
    if names and pooling.JOINED in metadata.get(pooling.METADATA_KEY, ""):
        raise UnsupportedError(f"{MODULES} lists a dense layer of several poolings at once, which llamac lacks")
    for kind, name in modules:
        if kind == "LogitScore":
            metadata |= _answers(folder, name, settings, model) | _pair_options(folder, warnings)
    metadata |= _comparison(settings, [kind for kind, _ in modules])
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


def _settings(folder: Path) -> Keys:
    """What sentence-transformers has stored about the whole model."""
    path = folder / MODEL_SETTINGS
    return Keys(read_object(path) if path.is_file() else {})


def _with_score(settings: Keys, model: ModelConfig) -> ModelConfig:
    """A cross-encoder's config with the activation of its score that newer versions of sentence-transformers store."""
    name = settings.value("activation_fn")
    if name is None:
        return model
    return replace(model, pooled_activation=(*model.pooled_activation[:-1], score_activation(name, MODEL_SETTINGS)))


def _prompts(settings: Keys) -> dict[str, Any]:
    """The entries with the prompts, by name, and with the one that precedes texts by default.

    sentence-transformers always knows the names of `EMPTY_PROMPTS`, which stand for no prompt unless the file has them.
    """
    name, prompts = settings.value("default_prompt_name"), settings.value("prompts")
    found = prompts if isinstance(prompts, dict) else {}
    texts = {key: text for key, text in found.items() if isinstance(text, str)}
    entries: dict[str, Any] = {"prompts": texts} if any(texts.values()) else {}
    if name is None or (name in EMPTY_PROMPTS and found.get(name) is None):
        return entries
    if not isinstance(name, str) or name not in texts:
        raise ExportError(
            f"{MODEL_SETTINGS}: default_prompt_name is {shortened(name)}, expected the name of one of its prompts"
        )
    return {**entries, "prompt": texts[name]} if texts[name] else entries


def _comparison(settings: Keys, kinds: list[str]) -> dict[str, Any]:
    """The entries that say how vectors are compared: by which function, whether scaled, and how many dimensions."""
    similarity, dimensions = settings.value("similarity_fn_name"), settings.value("truncate_dim")
    entries: dict[str, Any] = {"similarity": similarity} if isinstance(similarity, str) else {}
    entries |= {"dimensions": dimensions} if type(dimensions) is int and dimensions > 0 else {}
    return entries if "Normalize" in kinds or "Pooling" not in kinds else {**entries, "normalizes": False}


def _answers(folder: Path, name: str, settings: Keys, model: ModelConfig) -> dict[str, Any]:
    """The entry with the tokens whose logits are the score of a language model, and with what follows."""
    path = folder / name / "config.json"
    keys = _config_of(folder / name)
    yes, no = (keys.integer(f"{kind}_token_id", 0, model.vocab_size - 1) for kind in ("true", "false"))
    if keys.value("module_input_name") not in (None, LOGITS):
        keys.wrong("module_input_name", LOGITS)
    if yes is None and not keys.problems:
        keys.need("true_token_id")
    if keys.problems or keys.unused():
        raise ExportError(f"{path}: {'; '.join([*keys.problems, *(f'{key}: unknown key' for key in keys.unused())])}")
    function = settings.value("activation_fn")
    activation = "sigmoid" if function is None else score_activation(function, MODEL_SETTINGS)
    return {"answers": {"ids": [yes] if no is None else [yes, no], "activation": activation}}


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


def _config_of(folder: Path) -> Keys:
    """The config of a module."""
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(f"{path} is missing, and {MODULES} lists the module")
    return Keys(read_object(path))


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the folder of each module, in their order.

    Raises:
        UnsupportedError: If there is a module that the engine does not compute.
        ExportError: If the file is damaged.
    """
    path = folder / MODULES
    modules: list[Any] = parse_array(read_small(path, MAX_BYTES, ExportError), str(path))
    kinds = []
    for module in modules:
        name, kind = (module.get("path"), module.get("type")) if isinstance(module, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(kind, str):
            raise ExportError(f"{path}: the module {shortened(module)} has no path or no type")
        kinds.append(kind.rpartition(".")[2])
        if kinds[-1] in WITH_FILES and not re.fullmatch(r"\d_\w+", name):
            raise ExportError(f"{path}: the path {shortened(name)} is not a folder {MODULE_FOLDERS}")
        yield kinds[-1], name
    if not ORDER.fullmatch("".join(KINDS.get(kind, "?") for kind in kinds)):
        raise UnsupportedError(
            f"{MODULES} lists the modules {', '.join(kinds)}; supported are Transformer alone or before LogitScore, "
            "and Transformer, Pooling, Dense layers and Normalize, in this order"
        )


def _read_dense(folder: Path, part: str, columns: int, tensors: dict[str, LazyTensor]) -> tuple[int, str]:
    """Add the tensors of a dense module. Returns its width and its activation."""
    keys = _config_of(folder)
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
    keys.problems += [f"{key}: unknown key, which could change the embedding" for key in keys.unused()]
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
