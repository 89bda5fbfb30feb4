"""EAGLE-3 heads: what the exporter reads and refuses, and what the core computes against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_models import (
    CONFIG,
    DEEP,
    DRAFTED,
    OTHER,
    QWEN3,
    WINDOWED,
    as_speculators,
    fused,
    head_tensors,
    reference,
    write_head,
)

import hf_reading
import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from golden.tiny_checkpoints import Config, changed
from llamac import _core
from llamac.engine.rows import STAGES, appended_rows, as_ids
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.hf import eagle3

IDS = some_ids(60)
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (CONFIG, (2, 2, 1)),
        (OTHER, (2, 2, 1)),
        (changed(CONFIG, eagle_config={LAYERS: [1, 2, 3], "use_aux_hidden_state": True}), (2, 3, 4)),
        (changed(OTHER, eagle_config={LAYERS: [0, 2, 4]}), (0, 2, 4)),
        (WINDOWED, (2, 2, 1)),
        (DEEP, (2, 2, 1)),
        (changed(QWEN3, num_hidden_layers=2), (2, 2, 1)),
        (changed(QWEN3, norm_before_fc=False, fc_norm=True), (2, 2, 1)),
    ],
)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_a_head_computes_its_definition(config: Config, layers: tuple[int, ...], layout: str, tmp_path: Path) -> None:
    """From the states of a model with four layers, and then from the head's own states."""
    own = config["hidden_size"] != 48
    tensors = head_tensors(config, embedding=own)
    written = (config, tensors)
    if layout == "speculators":
        found = (config.get("eagle_config") or {}).get(LAYERS)
        written = as_speculators(changed(config, eagle_config=None, **{LAYERS: found}), tensors)
        layers = tuple(found or layers)  # the numbers of layers whose inputs are read
    export(write_head(tmp_path / "head", *written), tmp_path / "head.bin", dtype="f32")
    made = checkpoint(llama_config(n_layers=4))
    path = write_model(tmp_path / "model.bin", made)
    with llamac.load(tmp_path / "head.bin") as head_file, llamac.load(path) as model_file:
        head, model = head_file._core, model_file._core
        trunk = _core.Session(model, kv_dtype=1, drafter=head)
        states = np.empty((len(IDS) - 1, 3 * 48), np.float32)
        trunk.eval_rows(appended_rows(as_ids(IDS[:-1]), 0, 0, "last"), hidden=states.data)
        for i, after in enumerate(layers):
            expected = np.empty((len(IDS) - 1, 48), np.float32)
            plain = _core.Session(model, kv_dtype=1)
            stage = ("block", after - 1) if after else ("embedding", 0)
            number = STAGES.index(stage[0])
            rows = appended_rows(as_ids(IDS[:-1]), 0, 0, "last")
            plain.eval_rows(rows, observations=[(number, stage[1], expected.reshape(-1).data)])
            assert states[:, 48 * i : 48 * i + 48].tobytes() == expected.tobytes()
        session = _core.Session(head, kv_dtype=1, trunk=trunk)
        stream = np.empty((len(IDS) - 1, config["hidden_size"]), np.float32)
        logits = np.empty((len(IDS) - 1, session.vocab_size), np.float32)
        session.eval_rows(
            appended_rows(as_ids(IDS[1:]), 0, 0, "all"), logits.reshape(-1).data, hidden=stream.data, states=states.data
        )
        next_stream, next_logits = np.empty((1, config["hidden_size"]), np.float32), np.empty(301, np.float32)
        next_row = appended_rows(as_ids([7]), 0, len(IDS) - 1, "last")
        session.eval_rows(next_row, next_logits.data, hidden=next_stream.data, inputs=stream[-1:].copy().data)
        for one in (session, trunk):
            one.close()
    table = tensors["embed_tokens.weight"] if own else made.tensors["token_embedding.weight"].array()
    embedding = table.astype(np.float64)
    inputs = fused(config, tensors, states.astype(np.float64))
    expected_stream, expected_logits = reference(config, tensors, IDS[1:], inputs, embedding)
    check(stream, expected_stream)
    check(logits, expected_logits)
    inputs = np.vstack([inputs, stream[-1:]])
    expected_stream, expected_logits = reference(config, tensors, [*IDS[1:], 7], inputs, embedding)
    check(next_stream, expected_stream[-1:])
    check(next_logits[None], expected_logits[-1:])


def check(found: Any, expected: Any) -> None:
    """The same numbers up to float32's rounding, and minus infinity in the same places."""
    drafted = expected > -np.inf
    assert np.array_equal(found > -np.inf, drafted)
    assert np.abs(found[drafted] - expected[drafted]).max() < 5e-5 * np.abs(expected[drafted]).max()


def test_a_head_is_read_as_it_is_stored(tmp_path: Path) -> None:
    config = changed(OTHER, draft_vocab_size=CONFIG["vocab_size"])
    tensors = head_tensors(config, embedding=True)
    del tensors["d2t"], tensors["t2d"]  # it drafts all tokens
    made = hf_reading.read(write_head(tmp_path / "head", config, tensors))
    assert np.array_equal(made.tensors["drafter.output_ids.weight"].array(), np.arange(301, dtype=np.float32))
    assert made.metadata["architecture"] == "eagle3"
    report = export(tmp_path / "head", tmp_path / "head.bin", dtype="f32")
    assert report.warnings == []
    again = read_flat(tmp_path / "head.bin")
    assert again.config == made.config
    assert all(np.array_equal(again.tensors[name].array(), made.tensors[name].array()) for name in made.tensors)


# The keys of published heads: what trainers and their documentation write, with small sizes.
SPECULATORS: Config = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 97,
    "dtype": "bfloat16",
    LAYERS: [2, 46, 91],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a model"}},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.8.0.dev0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": (
        {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "draft_vocab_size", "rope_theta")}
        | {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
        | {"layer_types": ["sliding_attention"], "mlp_bias": False, "pad_token_id": None, "pretraining_tp": 1}
        | {"rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"}, "use_cache": True}
        | {"sliding_window": 2048, "use_sliding_window": True}
    ),
    "transformers_version": "5.13.1",
}
_OWN: Config = {"norm_before_fc": True, "target_hidden_size": 48, "num_aux_hidden_states": 3, LAYERS: [2, 21, 39]}
EAGLE: Config = (
    CONFIG
    | {"architectures": ["Eagle3LlamaForCausalLM"], "truncated_vocab_size": 97, "torch_dtype": "bfloat16"}
    | {"sliding_window": 2048, "use_sliding_window": False, "max_window_layers": 36}
    | {**_OWN, "eagle_config": {**_OWN, "use_aux_hidden_state": True, "return_hidden_post_norm": False}}
)


@pytest.mark.parametrize(
    ("config", "window", "expected"),
    [
        (SPECULATORS, 2048, {"eagle_layers": (2, 46, 91), "eagle_out_normed": 1, "eagle_normed": 1}),
        (EAGLE, 0, {"eagle_layers": (2, 21, 39), "eagle_out_normed": 0, "eagle_normed": 0}),
    ],
)
def test_the_keys_of_published_heads_are_read(config: Config, window: int, expected: dict[str, Any]) -> None:
    warnings: list[str] = []
    found = eagle3._config(config, warnings).model
    assert {key: getattr(found, key) for key in expected} == expected
    assert found.eagle_in_norm == "whole"
    assert (found.layers[0].window, found.trunk_dim, found.eagle_vocab_size) == (window, 48, DRAFTED)
    assert warnings == []


def test_a_key_of_the_head_inside_the_config_of_its_layers_is_refused() -> None:
    inner = {**SPECULATORS["transformer_layer_config"], "norm_before_fc": True}
    with pytest.raises(ExportError, match="norm_before_fc is True: llamac does not know this key"):
        eagle3._config(changed(SPECULATORS, transformer_layer_config=inner), [])


def config_with(**changes: object) -> Callable[[Config, dict[str, Any]], Config]:
    return lambda config, tensors: changed(config, **changes)


def tensor_with(name: str, change: Callable[[Any], Any]) -> Callable[[Config, dict[str, Any]], Config]:
    def made(config: Config, tensors: dict[str, Any]) -> Config:
        tensors[name] = change(tensors.pop(name))
        if tensors[name] is None:
            del tensors[name]
        return config

    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config_with(draft_vocab_size="many"), "draft_vocab_size is 'many', expected an integer"),
        (config_with(vocab_size="many", draft_vocab_size=None), "vocab_size is 'many', expected an integer"),
        (config_with(norm_before_fc=True), "missing: model.input_norm.weight"),
        (config_with(norm_before_fc="yes"), "norm_before_fc is 'yes', expected true or false"),
        (config_with(fc_norm=True), "missing: model.fc_norm.0.weight"),
        (config_with(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm are both true"),
        (
            config_with(norm_output=False, eagle_config={"return_hidden_post_norm": True}),
            "norm_output and eagle_config.return_hidden_post_norm differ: False, True",
        ),
        (config_with(eagle_config={"eh_proj_before_attn": True}), "eagle_config.eh_proj_before_attn is True"),
        (config_with(num_aux_hidden_states=4), "num_aux_hidden_states is 4, expected 3"),
        (config_with(fc_input_size=145), "fc_input_size is 145, expected 144"),
        (config_with(truncated_vocab_size=98), "draft_vocab_size and truncated_vocab_size differ: 97, 98"),
        (config_with(layer_types=["sliding_attention"]), "layer_types is ['sliding_attention'], expected full"),
        (
            config_with(layer_types=["sliding_attention"], sliding_window=8, use_sliding_window=False),
            "layer_types is ['sliding_attention'], expected full_attention",
        ),
        (config_with(layer_types=["chunked_attention"]), "layer_types is ['chunked_attention'], expected full"),
        (
            config_with(**{LAYERS: [0, 1, 2]}, eagle_config={LAYERS: [1, 2, 3]}),
            f"{LAYERS} and eagle_config.{LAYERS} differ: [0, 1, 2], [1, 2, 3]",
        ),
        (config_with(eagle_config={"use_mtp_layernorm": True}), "eagle_config.use_mtp_layernorm is True"),
        (config_with(eagle_config={"use_aux_hidden_state": False}), "eagle_config.use_aux_hidden_state is False"),
        (config_with(eagle_config={"another": 1}), "eagle_config.another is 1: llamac does not know this key"),
        (config_with(another=1), "another is 1: llamac does not know this key"),
        (config_with(eagle_config=3), "eagle_config is 3, expected an object"),
        (config_with(eagle_config={LAYERS: [2, 3]}), "expected 3 numbers of layers"),
        (config_with(eagle_config={LAYERS: [0, 1, "2"]}), "expected 3 numbers of layers"),
        (config_with(transformer_layer_config=3), "transformer_layer_config is 3, expected an object"),
        (config_with(model_type="gemma3"), "layers of model_type 'gemma3', expected one of llama, qwen3"),
        (config_with(model_type=["llama"]), "layers of model_type ['llama'], expected one of llama, qwen3"),
        (config_with(model_type="qwen3"), "missing: model.layers.0.self_attn.q_norm.weight"),
        (config_with(num_hidden_layers=2), "missing: model.layers.1.input_layernorm.weight"),
        (tensor_with("norm.weight", lambda norm: norm[1:].copy()), "misshaped: norm.weight is (47,)"),
        (config_with(draft_vocab_size=302), "draft_vocab_size is 302, expected at most vocab_size 301"),
        (config_with(draft_vocab_size=96), "d2t is i64 (97,), expected i64 (96,)"),
        (tensor_with("d2t", lambda ids: ids[::-1].copy()), "do not ascend from 0 to at most 300"),
        (tensor_with("d2t", lambda ids: ids + 200), "do not ascend from 0 to at most 300"),
        (tensor_with("d2t", lambda ids: ids.astype(np.float32)), "d2t is f32 (97,), expected i64 (97,)"),
        (tensor_with("d2t", lambda ids: None), "missing: d2t, with draft_vocab_size 97"),
        (tensor_with("t2d", lambda flags: ~flags), "t2d and d2t name different ids"),
        (tensor_with("t2d", lambda flags: flags[1:].copy()), "t2d is bool (300,), expected bool (301,)"),
        (tensor_with("lm_head.weight", lambda matrix: None), "missing: lm_head.weight"),
        (tensor_with("fc.weight", lambda matrix: matrix[:, 1:].copy()), "misshaped: fc.weight is (48, 143)"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    change: Callable[[Config, dict[str, Any]], Config], message: str, tmp_path: Path
) -> None:
    tensors = head_tensors(CONFIG)
    config = change(CONFIG, tensors)
    with pytest.raises((ExportError, UnsupportedError)) as caught:
        export(write_head(tmp_path / "head", config, tensors), tmp_path / "head.bin")
    assert message in str(caught.value)
    assert not (tmp_path / "head.bin").exists()


def test_a_head_for_all_tokens_needs_no_list_of_them(tmp_path: Path) -> None:
    config = changed(CONFIG, draft_vocab_size=CONFIG["vocab_size"])
    tensors = {name: x for name, x in head_tensors(config).items() if name not in ("d2t", "t2d")}
    found = eagle3.read(write_head(tmp_path / "head", config, tensors), config, [])
    np.testing.assert_array_equal(found.tensors["drafter.output_ids.weight"].array(), np.arange(CONFIG["vocab_size"]))


def test_a_head_keeps_the_rope_table_of_long_texts(tmp_path: Path) -> None:
    half = CONFIG["head_dim"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}
    config = changed(CONFIG, rope_scaling=scaling, original_max_position_embeddings=16)
    found = eagle3.read(write_head(tmp_path / "head", config, head_tensors(config)), config, []).tensors
    short, long = (found[f"rope.0.inv_freq{end}"].array() for end in ("", "_long"))
    np.testing.assert_allclose(short, 4 * long, rtol=1e-6)


@pytest.mark.parametrize("options", [{"to": "gguf"}, {"to": "hf"}, {"calibrate": "self", "dtype": "q4"}])
def test_a_head_has_no_logits_of_its_own(options: dict[str, str], tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))
    with pytest.raises(UnsupportedError, match="a drafter"):
        export(folder, tmp_path / "out", **options)  # type: ignore[arg-type]


def test_pairs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    export(write_head(tmp_path / "head", CONFIG, head_tensors(CONFIG)), tmp_path / "head.bin", dtype="q8")
    paths = [
        write_model(tmp_path / "a.bin", checkpoint(llama_config(dim=60, n_layers=4))),
        write_model(tmp_path / "b.bin", checkpoint(llama_config(n_layers=2))),
    ]
    messages = ["models of dim 48 and vocab_size 301, and the model has 60 and 301", "after -1 layers"]
    with llamac.load(tmp_path / "head.bin") as head:
        for path, message in zip(paths, messages, strict=True):
            with pytest.raises(ArgumentError, match=message):
                llamac.load(path, draft_model=head)
        with pytest.raises(UnsupportedError, match="cannot run alone"):
            head.generate([1], max_tokens=1)
        assert head.config["eagle_vocab_size"] == DRAFTED
