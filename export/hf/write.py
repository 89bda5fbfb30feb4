"""Writes a Hugging Face directory for transformers: config.json, model.safetensors, the tokenizer and its rules.

It assembles tensors with the table that the reader uses to split them (`families`). Before it writes the weights, it
reads the directory back with the importer and compares it with the checkpoint. Any difference is an error that names
the value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export import generation_config, latent
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.flat.packing import checked_chunks
from llamac.export.flat.plan import matching_tensors
from llamac.export.hf.experts_config import COMBINATION
from llamac.export.hf.families import FAMILIES, HEAD
from llamac.export.hf.family import Family, Module
from llamac.export.hf.model import in_order, read
from llamac.export.hf.safetensors_file import header_bytes
from llamac.export.hf.write_config import config_differences, config_json, same_rope
from llamac.export.lost import lost_parts
from llamac.export.targets import atomic_folder, check_space
from llamac.format.strips import to_dtype
from llamac.progress import Progress, silent
from llamac.text import template_files as chat_templates
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer_json import parse_document
from llamac.text.vocabulary.added import NAMES as TOKEN_NAMES
from llamac.text.vocabulary.added import AddedToken
from llamac.text.vocabulary.load import Vocabulary, load_vocabulary
from llamac.text.vocabulary.spm import looks_like_sentencepiece
from llamac.text.vocabulary.tokenizer_json import canonical_json, token_ids

Json = dict[str, Any]
TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
SAFETENSORS_NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
WEIGHTS = "model.safetensors"
# Keys of families whose tensors are not written as they are read: factors, and layers with one norm or two.
FOLDED = ("key_multiplier", COMBINATION, "num_kv_heads")


@dataclass(frozen=True)
class Stored:
    """A tensor of model.safetensors.

    Attributes:
        tensor: Its numbers as (out, in), even if it is stored `transposed`.
        taps: Of a convolution's vector, the number of taps; 0 for other tensors.
        one_row: The vector is stored as a matrix of one row.
        scalar: The number is stored without dimensions.
    """

    name: str
    tensor: LazyTensor
    dtype: str
    transposed: bool
    taps: int = 0
    one_row: bool = False
    scalar: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""
        if self.taps:
            return (self.tensor.shape[0] // self.taps, 1, self.taps)
        if self.scalar:
            return ()
        if self.one_row:
            return (1, *self.tensor.shape)
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    @property
    def bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * int(np.prod(self.shape))


def write_hf(
    checkpoint: Checkpoint, out: Path, dtype: str, progress: Progress = silent, warnings: list[str] | None = None
) -> int:
    """Write the directory `out`, which must be empty or not exist, and return the total size of its files.

    Args:
        checkpoint: The model.
        out: The directory.
        dtype: Of the matrices. Vectors are float32, as in the flat file.
        progress: Receives progress.
        warnings: Gets messages about what the directory does not hold.

    Raises:
        UnsupportedError: Lists everything that a Hugging Face directory cannot express.
    """
    if dtype not in TORCH_NAMES:
        raise UnsupportedError(f"dtype is {dtype!r}, expected {', '.join(TORCH_NAMES)} for a Hugging Face directory")
    family = FAMILIES.get(checkpoint.metadata.get("architecture", ""))
    if family is None:
        names = ", ".join(FAMILIES)
        raise UnsupportedError(f"only models of the families {names} can be written as Hugging Face directories")
    family = FAMILIES[family.written_as or family.model_type]
    has_experts = any(layer.ffn == "experts" for layer in checkpoint.config.layers)
    is_folded = family.normed_embedding or family.position_offset > 0 or any(key in family.keys for key in FOLDED)
    is_folded |= family.alibi  # the biases follow from the config
    if family.fused_columns or (family.fused_only and has_experts) or is_folded:
        raise UnsupportedError(f"the family {family.model_type!r} cannot be written as a Hugging Face directory")
    if checkpoint.config.rounds_inputs:
        raise UnsupportedError("a model that rounds its inputs to 8 bits cannot be written as a Hugging Face directory")
    if any(layer.expert_norms for layer in checkpoint.config.layers):  # stored only as one tensor of all experts
        raise UnsupportedError("experts with norms of their own cannot be written as a Hugging Face directory")
    matching_tensors(checkpoint)
    numbers, weights = list(_layer_numbers(checkpoint.config, family)), list(_stored_tensors(checkpoint, family, dtype))
    stored = numbers + weights
    files = _texts(checkpoint, family, dtype)
    check_space(out, sum(map(len, files.values())) + sum(tensor.bytes for tensor in stored))
    with atomic_folder(out) as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        with open(folder / WEIGHTS, "wb") as file:
            _write_header(file, stored)
            for tensor in numbers:
                _write_tensor(file, tensor)
            file.flush()  # the reader needs the numbers
            lost = _check_read_back(checkpoint, family, folder)
            if warnings is not None:
                warnings += [f"a Hugging Face directory has no place for {part}" for part in lost]
            done, total = 0, sum(tensor.bytes for tensor in weights)
            progress("writing", done, total)
            for tensor in weights:
                _write_tensor(file, tensor)
                done += tensor.bytes
                progress("writing", done, total)
            file.flush()
            os.fsync(file.fileno())
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- weights


def _stored_tensors(checkpoint: Checkpoint, family: Family, dtype: str) -> Iterator[Stored]:
    model = checkpoint.config
    unnumbered = () if family.numbered_mtp else family.mtp
    mtp_layer = f"{family.prefix}layers.{len(model.layers)}."
    for module in (*family.modules, *family.mtp, replace(HEAD, name=family.head)):
        prefix = "" if module.parts == HEAD.parts else family.mtp_prefix if module in unnumbered else family.prefix
        for index in module.indices(checkpoint.config):
            for kind in ("weight", "bias"):
                name = prefix + module.full_name(kind, **index)
                if unnumbered and name.startswith(mtp_layer):
                    name = f"{family.mtp_prefix}{family.mtp_block}.0.{name.removeprefix(mtp_layer)}"
                parts = {part: checkpoint.tensors.get(part) for part in module.part_names(kind, **index)}
                present = {
                    part: in_order(family, part, tensor, model, inverse=True)
                    for part, tensor in parts.items()
                    if tensor is not None and not family.is_plain_norm(part)
                }
                if not present:  # a bias, the output matrix of tied embeddings
                    continue
                if missing := sorted(parts.keys() - present.keys()):
                    raise UnsupportedError(
                        f"{name} combines {', '.join(parts)}, but the model has no {', '.join(missing)}"
                    )
                tensor = _together(name, module, present, index, model)
                is_matrix = len(tensor.shape) == 2
                taps = model.all_layers[index["l"]].conv_width if module.taps and kind == "weight" else 0
                stored = Stored(name, tensor, dtype if is_matrix else "f32", module.transposed and is_matrix, taps)
                yield replace(stored, one_row=module.one_row)


def _layer_numbers(model: ModelConfig, family: Family) -> Iterator[Stored]:
    """The tensors of one number: fields of the layers' records, and numbers that are the same in all models."""
    for name, value in family.fixed_numbers.items():
        for index in range(len(model.layers)):
            number = LazyTensor.of(np.array([value], np.float32))
            yield Stored(family.prefix + name.format(l=index), number, "f32", transposed=False, scalar=True)
    for name, field in family.layer_numbers.items():
        for index, layer in enumerate(model.layers):
            number = LazyTensor.of(np.array([getattr(layer, field)], np.float32))
            yield Stored(family.prefix + name.format(l=index), number, "f32", transposed=False)


def _together(
    name: str, module: Module, parts: dict[str, LazyTensor], index: dict[str, int], model: ModelConfig
) -> LazyTensor:
    """A module's tensor, assembled from its parts: the inverse of `hf.model.collect`."""
    tensor, *others = parts.values()
    if module.shared:
        if any(not np.array_equal(tensor.array(), other.array()) for other in others):
            raise UnsupportedError(f"{name} is shared by {', '.join(parts)}, but they differ")
        return tensor
    layer = model.all_layers[index["l"]]
    if module.absorbed:
        return latent.together(tensor, others[0], layer.n_heads or model.n_heads)
    if "{h}" in module.name and not module.taps:
        return tensor.rows(*module.span(model, layer, index["h"], tensor.shape[0]))
    if others:
        tensor = LazyTensor.stacked([tensor, *others])
    if (order := module.order(model, layer, tensor.shape[0])) is not None:
        tensor = tensor.in_order(np.argsort(order))
    if module.taps and next(iter(parts)).endswith(".weight"):
        by_channel = tensor.array().reshape(layer.conv_width, -1).T
        first, last = module.span(model, layer, index["h"], len(by_channel))
        tensor = LazyTensor.of(by_channel[first:last].reshape(-1))
    tensor = tensor.times(model.dim**0.5) if module.times_root else tensor
    is_weight = next(iter(parts)).endswith(".weight")
    return tensor.plus(-1) if module.plus_one and is_weight else tensor.log_of_minus() if module.log else tensor


def _write_header(file: BinaryIO, stored: list[Stored]) -> None:
    """Write the safetensors header and reserve space for the data."""
    tensors = [(tensor.name, SAFETENSORS_NAMES[tensor.dtype], tensor.shape) for tensor in stored]
    file.write(header_bytes(tensors, {"format": "pt"}))
    file.flush()
    file.truncate(file.tell() + sum(tensor.bytes for tensor in stored))


def _write_tensor(file: BinaryIO, stored: Stored) -> None:
    """The data in chunks of rows. A transposed tensor is assembled in memory."""
    whole, end = None, 0
    for checked in checked_chunks(stored.name, stored.tensor, stored.dtype):
        rows = to_dtype(checked, stored.dtype)
        if not stored.transposed:
            file.write(np.ascontiguousarray(rows).data)
            continue
        if whole is None:
            whole = np.empty(stored.shape, rows.dtype)
        whole[:, end : end + len(rows)] = rows.T
        end += len(rows)
    if whole is not None:
        file.write(whole.data)


# ---- small files

PLAIN_NAME = re.compile(r"\w[\w.-]{0,100}")  # names of chat templates that can be file names


def _texts(checkpoint: Checkpoint, family: Family, dtype: str) -> dict[str, bytes]:
    """Names and contents of the small files."""
    special = checkpoint.tokenizer[1] if checkpoint.tokenizer else None
    config = config_json(checkpoint, family) | {"dtype": TORCH_NAMES[dtype]}
    config.pop("torch_dtype", None)  # the old name
    if special:
        config |= {"bos_token_id": special.bos_id, "eos_token_id": special.eos_id}
    files: dict[str, Json] = {"config.json": config}
    stop_ids = sorted({*checkpoint.stop_ids, *(special.stop_ids if special else ())})
    generation = generation_config.to_hf(generation_config.from_flat(checkpoint.metadata))
    if special or stop_ids:
        eos = None if not stop_ids else stop_ids[0] if len(stop_ids) == 1 else stop_ids
        generation |= {"bos_token_id": special.bos_id if special else None, "eos_token_id": eos}
    if generation:
        files[generation_config.HF_FILE] = generation
    texts = {name: json.dumps(document, indent=2).encode() + b"\n" for name, document in files.items()}
    if checkpoint.chat_template:
        texts[chat_templates.FILE] = checkpoint.chat_template.encode()
    for name, template in chat_templates.texts_of(checkpoint.metadata, chat_templates.OTHERS).items():
        if PLAIN_NAME.fullmatch(name):  # it becomes a file name
            texts[f"{chat_templates.FOLDER}/{name}.jinja"] = template.encode()
    return texts | _tokenizer_files(checkpoint)


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    if checkpoint.tokenizer is None:
        return {}
    data, special, spm = checkpoint.tokenizer
    document = _tokenizer_document(data, special)
    names = {token: text for text, token in token_ids(document).items()}
    after = [("a token after BOS", token) for token in special.after_bos]
    for role, index in (("BOS", special.bos_id), ("EOS", special.eos_id), *after):
        if index is not None and index not in names:
            raise UnsupportedError(f"{role} is the id {index}, for which the tokenizer has no token")
    document["post_processor"] = _post_processor(special, names)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": special.add_bos,
        "add_eos_token": special.add_eos,
        "bos_token": names.get(special.bos_id) if special.bos_id is not None else None,
        "eos_token": names.get(special.eos_id) if special.eos_id is not None else None,
    }
    config |= _named_tokens(chat_templates.texts_of(checkpoint.metadata, chat_templates.TOKENS), document)
    if (response := checkpoint.metadata.get(chat_templates.RESPONSE)) is not None:
        config[chat_templates.RESPONSE] = response
    files = {
        "tokenizer.json": json.dumps(document, ensure_ascii=False, indent=1).encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode() + b"\n",
    }
    if spm is not None and looks_like_sentencepiece(spm):
        files["tokenizer.model"] = spm
    return files


def _named_tokens(named: Mapping[str, str], document: Json) -> Json:
    """The entries of tokenizer_config.json for special tokens other than BOS and EOS, such as padding.

    transformers adds a token that has a name to the tokenizer, so one that is not among the added tokens gets none.
    """
    added = {entry["content"] for entry in document["added_tokens"]}
    known = {name: text for name, text in named.items() if text in added}
    standard = {name: known[name] for name in TOKEN_NAMES if name in known and name not in ("bos_token", "eos_token")}
    own = {name: text for name, text in known.items() if name not in TOKEN_NAMES}
    return {**standard, **({"extra_special_tokens": own} if own else {})}


def _tokenizer_document(data: bytes, special: SpecialTokens) -> Json:
    """The tokenizer.json with BOS and EOS among its added tokens, where transformers puts named tokens.

    Only llama2.c's vocabularies lack them there: its encoder treats "<s>" in a string as three characters. A tokenizer
    that only the library sentencepiece encodes exactly is written the way transformers would convert it.
    """
    document: Json = parse_document(data, "the tokenizer")
    document["added_tokens"] = document.get("added_tokens") or []
    model = document.pop("sentencepiece", None)
    if model is not None and not model["similar"]:
        raise UnsupportedError(
            "transformers cannot express this SentencePiece model in tokenizer.json; --no-tokenizer leaves it out"
        )
    known = {token["id"] for token in document["added_tokens"]}
    names = {token: text for text, token in token_ids(document).items()}
    for token in sorted(names.keys() & {special.bos_id, special.eos_id} - known):
        document["added_tokens"].append(AddedToken(token, names[token], special=True).document())
    document["added_tokens"].sort(key=lambda entry: entry["id"])
    return document


def _post_processor(special: SpecialTokens, names: dict[int, str]) -> Json | None:
    """The post-processor of the library tokenizers that adds BOS and EOS."""
    front = special.front if special.add_bos else ()
    back = [special.eos_id] if special.add_eos and special.eos_id is not None else []
    if not front and not back:
        return None

    def around(sequence: str, kind: int) -> list[Json]:
        def token(index: int) -> Json:
            return {"SpecialToken": {"id": names[index], "type_id": kind}}

        return [*map(token, front), {"Sequence": {"id": sequence, "type_id": kind}}, *map(token, back)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            names[index]: {"id": names[index], "ids": [index], "tokens": [names[index]]} for index in (*front, *back)
        },
    }


# ---- the check


def _check_read_back(checkpoint: Checkpoint, family: Family, folder: Path) -> list[str]:
    """Compare the written directory with the checkpoint, and return which small parts it does not hold.

    UnsupportedError lists all other differences.
    """
    try:
        again = read(folder, [])
        tokenizer = load_vocabulary(folder) if checkpoint.tokenizer else None
    except (ExportError, UnsupportedError) as error:
        raise UnsupportedError(f"a Hugging Face directory cannot express this model: {error}") from None
    problems = list(_differences(checkpoint, again, family))
    if tokenizer is not None and checkpoint.tokenizer is not None:
        problems += _token_differences(Vocabulary(*checkpoint.tokenizer), tokenizer)
    if problems:
        raise UnsupportedError("a Hugging Face directory cannot express this model:\n  " + "\n  ".join(problems))
    return list(lost_parts(checkpoint, again))


def _differences(checkpoint: Checkpoint, again: Checkpoint, family: Family) -> Iterator[str]:
    for name, (ours, theirs) in config_differences(checkpoint.config, again.config).items():
        yield f"{name} is {ours}, config.json can only express {theirs}"
    for name in sorted(set(checkpoint.tensors) ^ set(again.tensors)):
        yield f"tensor {name} has no place" if name in checkpoint.tensors else f"tensor {name} is missing"
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("rope.") and name in again.tensors and not same_rope(tensor, again.tensors[name]):
            yield f"{name}: config.json has no RoPE with these frequencies"
        if family.is_plain_norm(name) and not np.array_equal(tensor.array(), again.tensors[name].array()):
            yield f"{name}: the norms of the family {family.model_type!r} have no weights"


def _token_differences(ours: Vocabulary, theirs: Vocabulary) -> Iterator[str]:
    if canonical_json(_tokenizer_document(ours.json, ours.special)) != theirs.json:
        yield "the tokenizer reads back differently"
    if ours.special != theirs.special:
        yield f"the rules for special tokens are {ours.special}, but read back as {theirs.special}"
