"""Files of architectures that are only read, in llamac and in llama.cpp: logits of decoders, rows of encoders.

The samples follow the rules of llama.cpp's converter. test_to_gguf_families compares the files that llamac writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_samples import checkpoint_tensors, metadata, write_gguf
from nomic_moe_samples import moe_tensors
from test_gguf_alike import FURTHER, LIKE_LLAMA, further, write_as
from test_gguf_encoders import CASES as ENCODERS_BY_NAME
from test_gguf_encoders import NO_VOCABULARY, tensors_of, write, write_decoder, write_moe
from test_gguf_families import case_of
from to_gguf_cases import ALL_EXPERTS, NO_BIAS, TIED, fitting

import llamac
from golden.case_table import FULL, SLIDING
from golden.cases import CASES as LLAMA_CASES
from golden.encoder_cases import ENCODER_CASES
from golden.family_cases import FAMILY_CASES
from golden.llama_cpp import INSTALLED, LlamaCpp
from golden.make import relative_errors
from golden.make_encoders import encoder_checkpoint
from golden.make_families import family_checkpoint
from golden.parity_table import with_table
from golden.tiny_checkpoints import Config, changed, tensors
from llamac.export.convert import export
from llamac.export.gguf.encoders import ENCODERS
from llamac.export.gguf.families import ARCHITECTURES, WRITTEN

DOCUMENT = Path(__file__).parents[2] / "docs" / "gguf.md"
# llama.cpp reads YaRN's slopes only in some architectures. These are its defaults.
_YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# All layers have experts. llama.cpp also uses the base of other layers in those with a window.
_ROPE: Config = {"rope_type": "default", "rope_theta": 500.0}
_MELLUM: Config = {
    **NO_BIAS,
    "num_hidden_layers": 2,
    "layer_types": [FULL, SLIDING],
    "mlp_layer_types": ["sparse", "sparse"],
    "rope_parameters": {FULL: _ROPE, SLIDING: _ROPE},
}
_QWEN2_VL: Config = {"rms_norm_eps": 1e-9}  # llama.cpp does not read the epsilon
_QWEN3_VL_MOE: Config = {
    **NO_BIAS,
    "text_config": changed(FAMILY_CASES["qwen3_vl_moe"].config["text_config"], **NO_BIAS, **ALL_EXPERTS),
}
# The changes of these cases for which llama.cpp can load the files, by architecture.
DECODERS: dict[str, dict[str, Config]] = {
    "afmoe": {"afmoe": NO_BIAS, "afmoe-num_shared_experts": NO_BIAS},
    "bitnet": {"bitnet-attention_bias": TIED},
    "cohere2moe": {
        f"cohere2_moe{end}": NO_BIAS for end in ("", "-rms_norm_eps", "-num_shared_experts", "-norm_topk_prob")
    },
    "falcon": {f"falcon{end}": {"bias": False} for end in ("", "-new_decoder_architecture")},
    "mellum": {
        "mellum": _MELLUM,
        "mellum-sliding_window": _MELLUM,
        "mellum-yarn": {**_MELLUM, "rope_parameters": {FULL: {**_ROPE, **_YARN}, SLIDING: _ROPE}},
    },
    "olmo": {"olmo-attention_bias": {}},
    "qwen2vl": {
        "qwen2_vl": _QWEN2_VL,
        "qwen2_vl-yarn": {**_QWEN2_VL, "rope_scaling": {**_YARN, "mrope_section": [2, 2, 1]}},
    },
    "qwen3vl": {"qwen3_vl-attention_bias": {}},
    "qwen3vlmoe": {"qwen3_vl_moe": _QWEN3_VL_MOE},
}
ALIKE = (*LIKE_LLAMA, *FURTHER, "minicpm")
ALIBI = "alibi"  # a case of Baichuan
UNKNOWN = ("bitnet-b1.58", "lfm3")  # to llama.cpp
IDS = list(range(3, 40))
Compare = Callable[[str, str], float]


def decoder(root: Path, architecture: str, name: str) -> Path:
    """The file of a case."""
    path = root / "m.gguf"
    if architecture in LIKE_LLAMA:
        # in llama.cpp, 32 layers have RoPE, and 40 have ALiBi
        n_layers = {"num_hidden_layers": 40 if name == ALIBI else 32} if architecture == "baichuan" else {}
        config = changed(LLAMA_CASES["llama-no-biases"].config, **n_layers)
        return write_as(path, architecture, config, tensors(config))
    if architecture in FURTHER:
        return write_as(path, architecture, *further(root, architecture))
    case = case_of(name)
    weights = checkpoint_tensors(family_checkpoint(root / "hf", case))
    if architecture == "minicpm":
        return write_as(path, architecture, case.config, weights)
    config = changed(case.config, **DECODERS[architecture][name])
    return write_gguf(path, config, fitting(config, weights), more=NO_VOCABULARY)


def encoder(root: Path, architecture: str) -> Path:
    """The file of an encoder, without the biases that llama.cpp does not have."""
    path = root / "m.gguf"
    if architecture == "nomic-bert-moe":
        return write_moe(path, moe_tensors())
    if architecture in ("llama-embed", "eurobert"):
        case = ENCODER_CASES["llama" if architecture == "llama-embed" else architecture]
        weights = checkpoint_tensors(encoder_checkpoint(root / "hf", case))
        kept = {name for name in weights if architecture == "llama-embed" or not name.endswith(".bias")}
        return write_decoder(path, architecture, case.config, {name: weights[name] for name in kept})
    weights = tensors_of(encoder_checkpoint(root / "hf", ENCODER_CASES[ENCODERS_BY_NAME[architecture]]), architecture)
    if architecture == "modern-bert":
        weights = {name: values for name, values in weights.items() if not name.endswith(".bias")}
    # with windows in all layers, llama.cpp lacks the other mask and stops
    pattern = {"attention.sliding_window_pattern": 2} if architecture == "gemma-embedding" else {}
    return write(path, architecture, weights, **pattern)


@pytest.fixture(scope="module")
def distance(tmp_path_factory: pytest.TempPathFactory, llama_cpp: LlamaCpp) -> Compare:
    """The largest distance of a case's logits or of an encoder's rows from llama.cpp's, in float32."""

    @functools.cache
    def found(architecture: str, name: str) -> float:
        root = tmp_path_factory.mktemp("gguf")
        if architecture in ENCODERS:
            path = encoder(root, architecture)
            rows = llama_cpp.rows(path, IDS)
            export(path, root / "m.bin", probe_source=None)
            with llamac.load(root / "m.bin") as model:
                ours = [model.embed(IDS, pooling=pooling, normalize=False) for pooling in ("cls", "last", "mean")]
            return float(relative_errors(np.stack(ours), np.stack([rows[0], rows[-1], rows.mean(axis=0)])).max())
        path = decoder(root, architecture, name)
        ids = FAMILY_CASES[name].ids if name in FAMILY_CASES else LLAMA_CASES["llama"].ids
        theirs = llama_cpp.logits(path, ids)
        export(path, root / "m.bin", probe_source=None)
        with llamac.load(root / "m.bin", kv_dtype="f32") as model:
            return float(relative_errors(model.logits(ids), theirs).max())

    return found


PAIRS = [(architecture, name) for architecture, names in DECODERS.items() for name in names]
PAIRS += [(architecture, FURTHER.get(architecture, ("",))[0]) for architecture in ALIKE if architecture != "minicpm"]
PAIRS += [("minicpm", "granite"), ("baichuan", ALIBI)]
PAIRS += [(architecture, "") for architecture in ENCODERS]


@pytest.mark.parametrize(("architecture", "name"), PAIRS)
def test_llama_cpp_computes_the_same_numbers(distance: Compare, architecture: str, name: str) -> None:
    """llama.cpp computes GELU from a float16 table, and BERT's and Falcon's with its tanh form.

    Baichuan has 32 or 40 layers.
    """
    has_gelu = architecture in ENCODERS or architecture in ("codeshell", "falcon")
    assert distance(architecture, name) <= (3e-3 if has_gelu else 1e-3 if architecture == "baichuan" else 1e-4)


def test_every_architecture_is_compared() -> None:
    """Those that llamac writes are compared in test_to_gguf_families."""
    read = {architecture for architecture, _ in PAIRS}
    assert ARCHITECTURES.keys() | ENCODERS.keys() == WRITTEN.keys() | read | {*UNKNOWN}
    assert not WRITTEN.keys() & read
    for architecture, names in DECODERS.items():
        assert {metadata(case_of(name).config)[0] for name in names} == {architecture}


def test_the_documented_distances_from_llama_cpp_are_current(distance: Compare) -> None:
    if not DOCUMENT.is_file() or INSTALLED:
        pytest.skip("the documents are not here, or llama.cpp computes the results again")
    found: dict[str, list[float]] = {}
    for pair in PAIRS:
        found.setdefault(pair[0], []).append(distance(*pair))
    rows = [f"| `{arch}` | {len(errors)} | {max(errors):.0e} |" for arch, errors in sorted(found.items())]
    text = DOCUMENT.read_text("utf-8")
    assert with_table(text, "llama.cpp reads", rows) == text, "\n".join(rows)
