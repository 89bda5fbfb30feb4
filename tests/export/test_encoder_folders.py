"""Encoders from directories: what sentence-transformers' files say, pairs of texts, and refused configs."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import llamac
from golden.encoder_cases import ENCODER_CASES
from golden.family_cases import FAMILY_CASES
from golden.make_encoders import encoder_checkpoint, encoder_references
from golden.tiny_checkpoints import random_tensor, write_safetensors
from hf_reading import parse
from llamac import ExportError, UnsupportedError
from llamac.cli.inspect import _encoder_lines, describe_file
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.pairs import pair_tokens
from llamac.engine.scoring.pooled import Tokens, pooled_outputs, pooling_of
from llamac.export.hf import model as hf
from llamac.export.hf.families import ENCODERS
from llamac.export.hf.pairs import pair_form
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.outline import outline
from llamac.format.detect import files_of, local_source
from llamac.format.flatfile import FlatFile
from llamac.progress import silent
from sentence_folders import IDENTITY, KINDS, TANH, modules, write_dense, write_json

BERT, XLM = ENCODER_CASES["bert"].config, ENCODER_CASES["xlm-roberta"].config
NOMIC, NOMIC_KEYS = ENCODER_CASES["nomic_bert"].config, ENCODERS["nomic_bert"].old_keys
SCORES, MPNET = ENCODER_CASES["bert-scores"].config, ENCODER_CASES["mpnet"].config
LATE, GTE = ENCODER_CASES["eurobert-scores-late"].config, ENCODER_CASES["gte"].config
MODERN = ENCODER_CASES["modernbert"].config
DISTIL, EURO = ENCODER_CASES["distilbert"].config, ENCODER_CASES["eurobert"].config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return encoder_checkpoint(tmp_path / "bert", ENCODER_CASES["bert"])


def exported(folder: Path) -> FlatFile:
    path = folder.with_suffix(".bin")
    llamac.export.export(folder, path, overwrite=True)
    return FlatFile(path)


def test_an_encoder_alone_pools_the_mean(folder: Path) -> None:
    file = exported(folder)
    assert file.metadata["pooling"] == "mean"
    assert file.config["context"] == BERT["max_position_embeddings"]
    assert not file.section("probes")


def test_modules_say_how_texts_become_vectors(folder: Path) -> None:
    write_json(folder / "modules.json", modules("Transformer", "Pooling", "Dense", "Dense", "Normalize"))
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 50, "do_lower_case": False})
    write_dense(folder / "2_Dense", 40, 24, TANH, bias=True)
    write_dense(folder / "3_Dense", 24, 12, IDENTITY, bias=False)
    file = exported(folder)
    assert (file.metadata["pooling"], file.config["context"]) == ("cls", 50)
    assert (file.config["n_pooled"], file.config["pooled_dim"][:2]) == (2, [24, 12])
    assert file.config["pooled_activation"][:2] == ["tanh", "none"]
    assert {"2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"} <= set(files_of(folder))
    with llamac.load(file.path) as model:
        vector = model.embed([5, 6, 7], normalize=False)
        plain = model.embed([5, 6, 7], normalize=False, pooling="last")
    assert vector.shape == (12,)
    assert not np.array_equal(vector, plain)


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Pooling", "LSTM"),
        ("Transformer", "Normalize", "Dense"),
        ("Transformer", "Dense"),  # of ColBERT, with a vector per token
        ("Transformer", "Normalize"),
        ("Transformer", "Pooling", "LogitScore"),
        ("CLIP",),
    ],
)
def test_other_modules_are_refused(folder: Path, kinds: tuple[str, ...]) -> None:
    write_json(folder / "modules.json", modules(*kinds))
    with pytest.raises(UnsupportedError, match=f"lists the modules {', '.join(kinds)}; supported are Transformer"):
        hf.read(folder, [])


def test_wrong_modules_are_errors(folder: Path) -> None:
    write_json(folder / "modules.json", modules("Transformer", "Pooling", "Dense"))
    with pytest.raises(ExportError, match=r"2_Dense/config\.json is missing, and modules\.json lists the module"):
        hf.read(folder, [])
    write_dense(folder / "2_Dense", 40, 24, "torch.nn.modules.activation.Mish", bias=True)
    with pytest.raises(UnsupportedError, match="Mish"):
        hf.read(folder, [])
    write_dense(folder / "2_Dense", 39, 24, TANH, bias=True)
    with pytest.raises(ExportError, match="2_Dense: its tensors do not match its config"):
        hf.read(folder, [])
    write_json(folder / "modules.json", [{"path": "../x", "type": KINDS + "Dense"}])
    with pytest.raises(ExportError, match="is not a folder"):
        hf.read(folder, [])
    write_json(folder / "modules.json", [{"path": 1}])
    with pytest.raises(ExportError, match="has no path or no type"):
        hf.read(folder, [])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("module_input_name", "token_embeddings", "makes 'token_embeddings' from 'token_embeddings'; supported"),
        ("module_output_name", "scores", "makes 'scores' from 'sentence_embedding'; supported are modules that change"),
        ("use_residual", True, "use_residual is true, which llamac does not compute"),
        ("mystery", 3, "mystery: unknown key, which could change the embedding"),
    ],
)
def test_keys_of_dense_modules_that_change_the_embedding_are_refused(
    folder: Path, key: str, value: object, message: str
) -> None:
    write_json(folder / "modules.json", modules("Transformer", "Pooling", "Dense"))
    write_dense(folder / "2_Dense", 40, 24, TANH, bias=True)
    path = folder / "2_Dense" / "config.json"
    usual = json.loads(path.read_text())
    usual |= {"module_input_name": "sentence_embedding", "module_output_name": None, "use_residual": False}
    write_json(path, usual)
    assert hf.read(folder, []).config.pooled_dim == (24,)
    write_json(path, {**usual, key: value})
    with pytest.raises((UnsupportedError, ExportError), match=message):
        hf.read(folder, [])


def test_the_files_say_whether_the_tokens_of_a_prompt_are_pooled(folder: Path) -> None:
    for values, expected in (({"include_prompt": False}, False), ({"include_prompt": True}, None), ({}, None)):
        write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean", **values})
        assert hf.read(folder, []).metadata.get("pools_prompt") is expected


def test_a_reranker_that_is_a_language_model_can_list_its_score(checkpoint_folder: Path) -> None:
    """As sentence-transformers saves Qwen3-Reranker and mxbai-rerank-v2."""
    write_json(checkpoint_folder / "modules.json", modules("Transformer", "LogitScore"))
    settings = checkpoint_folder / "config_sentence_transformers.json"
    path = checkpoint_folder / "1_LogitScore" / "config.json"
    with pytest.raises(ExportError, match=r"1_LogitScore/config\.json is missing"):
        hf.read(checkpoint_folder, [])
    write_json(path, {"true_token_id": 16, "false_token_id": 15})
    answers: dict[str, Any] = {"ids": [16, 15], "activation": "sigmoid"}
    assert hf.read(checkpoint_folder, []).metadata["answers"] == answers
    write_json(path, {"true_token_id": 16, "false_token_id": None, "module_input_name": "causal_logits"})
    write_json(settings, {"activation_fn": IDENTITY})
    assert hf.read(checkpoint_folder, []).metadata["answers"] == {"ids": [16], "activation": "none"}
    for wrong, message in (
        ({}, "true_token_id is missing"),
        ({"true_token_id": 10**6}, "true_token_id is 1000000"),
        ({"true_token_id": 1, "module_input_name": "scores"}, "module_input_name is 'scores', expected causal_logits"),
        ({"true_token_id": 1, "mystery": 3}, "mystery: unknown key"),
    ):
        write_json(path, wrong)
        with pytest.raises(ExportError, match=message):
            hf.read(checkpoint_folder, [])


def test_newer_versions_store_the_activation_of_scores_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = encoder_checkpoint(tmp_path / "m", ENCODER_CASES["bert-scores"])
    path = folder / "config_sentence_transformers.json"
    assert hf.read(folder, []).config.pooled_activation == ("tanh", "sigmoid")
    write_json(path, {"model_type": "CrossEncoder", "activation_fn": IDENTITY, "prompts": {}})
    assert hf.read(folder, []).config.pooled_activation == ("tanh", "none")
    write_json(path, {"model_type": "CrossEncoder", "prompts": {}})
    assert hf.read(folder, []).config.pooled_activation == ("tanh", "sigmoid")
    for wrong in (TANH, 3):
        write_json(path, {"activation_fn": wrong})
        with pytest.raises(UnsupportedError, match=r"config_sentence_transformers\.json: the activation of scores is "):
            hf.read(folder, [])


def test_lower_case_is_a_warning(folder: Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": None, "do_lower_case": True})
    warnings: list[str] = []
    assert hf.read(folder, warnings).config.context == BERT["max_position_embeddings"]
    assert [text for text in warnings if "do_lower_case" in text]


def test_old_names_and_other_heads_are_read(folder: Path) -> None:
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {name: tensor.lazy().array() for name, tensor in stored.items()}
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): values
        for name, values in tensors.items()
    }
    renamed["cls.predictions.bias"] = np.zeros(3, np.float32)
    before = {name: tensor.array() for name, tensor in hf.read(folder, []).tensors.items()}
    write_safetensors(folder / "model.safetensors", renamed)
    after = hf.read(folder, [])
    assert after.tensors.keys() == before.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after.tensors[name].array(), values)


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        (BERT, {"is_decoder": True}, "is_decoder is True"),
        (BERT, {"add_cross_attention": True}, "cross-attention"),
        (BERT, {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        (BERT, {"embedding_size": 128}, "embedding_size is 128: llamac does not know this key"),
        (BERT, {"num_attention_heads": 7}, "num_attention_heads is 7, expected a divisor of hidden_size"),
        (BERT, {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification'?, which is not"),
        (XLM, {"pad_token_id": 64}, "pad_token_id is 64"),
        (MPNET, {"pad_token_id": 0}, "pad_token_id is 0"),
        (MPNET, {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64"),
        (MPNET, {"type_vocab_size": 2}, "type_vocab_size is 2: llamac does not know this key"),
        (DISTIL, {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05"),
        (DISTIL, {"dim": 40, "hidden_size": 80}, "dim is 40, but hidden_size is 80"),
        (DISTIL, {"architectures": ["DistilBertForTokenClassification"]}, "which is not a model of embeddings"),
        (EURO, {"architectures": ["EuroBertForTokenClassification"]}, "which is not a model of embeddings"),
        (LATE, {"classifier_pooling": "cls"}, "classifier_pooling is 'cls', expected bos or mean or late"),
        (LATE, {"clf_pooling": "mean"}, "clf_pooling is 'mean', but classifier_pooling is 'late'"),
        (GTE, {"logn_attention_scale": True}, "logn_attention_scale is True"),
        (GTE, {"layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        (GTE, {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        (GTE, {"rope_parameters": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}}, "mixed_b is 0.6: llamac does not"),
        (EURO, {"rope_scaling": {"type": "ntk", "factor": 8.0}}, "has the type 'ntk'; supported are default"),
        (EURO, {"mystery": 3}, "mystery is 3: llamac does not know this key"),
        (SCORES, {"id2label": {"0": "a", "1": "b"}}, "a classifier with 2 classes"),
        (SCORES, {"id2label": None}, "a classifier with 2 classes"),
        (
            SCORES,
            {"sbert_ce_default_activation_function": "torch.nn.ReLU"},
            "the activation of scores is 'torch.nn.ReLU'",
        ),
    ],
)
def test_configs_that_the_engine_does_not_compute_are_refused(
    start: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedError, ExportError), match=message):
        parse({key: value for key, value in {**start, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "sigmoid"),
        ({"sbert_ce_default_activation_function": IDENTITY}, "none"),
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0.0"}}, "none"),
        ({"sentence_transformers": {"version": "5.0.0"}}, "sigmoid"),
    ],
)
def test_scores_have_the_activation_of_sentence_transformers(keys: dict[str, Any], activation: str) -> None:
    model = parse({**SCORES, **keys}).model
    assert (model.pooled_dim, model.pooled_activation) == ((40, 1), ("tanh", activation))


def test_keys_of_ettin_and_mmbert_are_those_of_modernbert() -> None:
    keys = {"causal_mask": False, "is_causal": False, "mask_token_id": 4, "cls_token_id": 1}
    assert parse({**MODERN, **keys}).model == parse(MODERN).model
    for key in ("causal_mask", "is_causal"):
        with pytest.raises(UnsupportedError, match=f"{key} is True"):
            parse({**MODERN, key: True})


def test_nomic_bert_has_two_sets_of_names(tmp_path: Path) -> None:
    """transformers saves the tensors under the names of the published checkpoints, which also have their own keys."""
    folder = encoder_checkpoint(tmp_path / "nomic", ENCODER_CASES["nomic_bert"])
    stored = read_safetensors(folder / "model.safetensors")
    assert "encoder.layers.0.attn.Wqkv.weight" in stored
    before = {name: tensor.array() for name, tensor in hf.read(folder, []).tensors.items()}
    renamed = hf._renamed(ENCODERS["nomic_bert"], stored, hf.read(folder, []).config)
    assert "layers.0.self_attn.q_proj.weight" in renamed
    write_safetensors(folder / "native.safetensors", {name: x.lazy().array() for name, x in renamed.items()})
    (folder / "native.safetensors").replace(folder / "model.safetensors")
    config = {key: value for key, value in NOMIC.items() if key not in NOMIC_KEYS.values() and key != "rope_parameters"}
    old = {key: NOMIC[name] for key, name in NOMIC_KEYS.items() if name in NOMIC} | {"rotary_emb_base": 500}
    flags = {"prenorm": False, "activation_function": "swiglu", "rotary_emb_fraction": 1.0, "fused_bias_fc": True}
    write_json(folder / "config.json", config | old | flags)
    after = hf.read(folder, [])
    assert after.tensors.keys() == before.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after.tensors[name].array(), values)
    for wrong, message in (
        ({"prenorm": True}, "prenorm is True"),
        ({"n_embd": 41, "hidden_size": 40}, "n_embd is 41, but hidden_size is 40"),
        ({"rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
    ):
        with pytest.raises((UnsupportedError, ExportError), match=message):
            parse({**config, **old, **flags, **wrong})


def test_gte_under_its_first_name_is_the_same_model(tmp_path: Path) -> None:
    """Published checkpoints have the model_type "new"; transformers saves their names of tensors."""
    folder = encoder_checkpoint(tmp_path / "gte", ENCODER_CASES["gte"])
    stored = read_safetensors(folder / "model.safetensors")
    assert "encoder.layer.0.attention.qkv_proj.weight" in stored
    expected = hf.read(folder, [])
    before = {name: tensor.array() for name, tensor in expected.tensors.items()}
    tensors = {f"new.{name}": tensor.lazy().array() for name, tensor in stored.items()}
    tensors["classifier.weight"] = np.zeros((1, 40), np.float32)  # the weights of tokens, which embeddings do not use
    write_safetensors(folder / "model.safetensors", tensors)
    old = {key: value for key, value in GTE.items() if key != "rope_parameters"} | {"rope_theta": 500.0}
    old |= {"model_type": "new", "architectures": ["NewModel", "NewForTokenClassification"], "pack_qkv": True}
    write_json(folder / "config.json", old)
    found = hf.read(folder, [])
    assert found.config == expected.config
    assert found.tensors.keys() == before.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(found.tensors[name].array(), values)
    write_json(folder / "config.json", old | {"rope_scaling": {"type": "ntk", "factor": 8.0}})
    scaled = hf.read(folder, []).tensors["rope.0.inv_freq"].array()
    j = np.arange(5)  # of heads of 10 dimensions: the base times the factor, and all divided by factor^(2 / 10)
    np.testing.assert_allclose(scaled, (500.0 * 8) ** (-j / 5) / 8 ** (1 / 5), rtol=1e-6)
    assert scaled[-1] == pytest.approx(before["rope.0.inv_freq"][-1] / 8, rel=1e-6)


def template(pair: Any) -> dict[str, Any]:
    """A post-processor whose pair is written as the names of its pieces, each with its type."""
    ids = {"[CLS]": 2, "[SEP]": 3, "[EOS]": 4}
    split = [piece.split(":") for piece in pair.split()] if isinstance(pair, str) else []
    pieces = [
        {"SpecialToken" if name in ids else "Sequence": {"id": name, "type_id": int(kind)}} for name, kind in split
    ]
    tokens = {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in ids.items()}
    return {"type": "TemplateProcessing", "pair": pieces or pair, "special_tokens": tokens}


FIXED_TOKENS: dict[str, Any] = {"sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (None, (2, 0, None)),
        ({"type": "BertProcessing", **FIXED_TOKENS}, (1, 1, (2, 3))),
        ({"type": "RobertaProcessing", **FIXED_TOKENS}, (2, 0, (2, 3))),
        (template("[CLS]:0 A:0 [SEP]:0 [SEP]:0 B:0 [SEP]:0"), (2, 0, (2, 3))),
        ({"type": "Sequence", "processors": [template("[CLS]:0 A:0 [EOS]:0 B:1 [EOS]:1")]}, (1, 1, (2, 4))),
        (template("[CLS]:0 A:0 [SEP]:0 B:0 [SEP]:0"), (1, 0, (2, 3))),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(1)]}, "joins the texts of a pair as "),
        (template("[CLS]:0 A:0 [SEP]:0 [CLS]:0 B:0 [SEP]:0"), "joins the texts of a pair as .*, expected a first to"),
        (template("[CLS]:0 A:0 [CLS]:0 B:0"), "joins the texts of a pair as .*, expected a first token"),
        (
            template("[CLS]:0 A:0 [SEP]:0 B:1 [SEP]:0"),
            "gives the pieces of a pair the types 0 0 0 1 0, expected 0 for ",
        ),
        (
            template("[CLS]:0 A:0 [SEP]:1 B:1 [SEP]:1"),
            "gives the pieces of a pair the types 0 0 1 1 1, expected 0 for ",
        ),
        (
            template("[CLS]:0 A:0 [SEP]:0 B:2 [SEP]:2"),
            "gives the pieces of a pair the types 0 0 0 2 2, expected 0 for ",
        ),
        ({"type": "BertProcessing", "sep": ["[SEP]"], "cls": ["[CLS]", 2]}, r"joins .* as '\[CLS\] \$A sep \$B sep'"),
    ],
)
def test_the_tokenizer_says_how_pairs_are_joined(tmp_path: Path, processor: Any, expected: Any) -> None:
    write_json(tmp_path / "tokenizer.json", {"post_processor": processor})
    if isinstance(expected, tuple):
        assert pair_form(tmp_path, 2, 2) == expected
        assert pair_form(tmp_path, 2, 1) == (expected[0], 0, expected[2])
        write_json(tmp_path / "tokenizer_config.json", {"model_input_names": ["input_ids", "attention_mask"]})
        assert pair_form(tmp_path, 2, 2) == (expected[0], 0, expected[2])
        return
    with pytest.raises(UnsupportedError, match=expected):
        pair_form(tmp_path, 2, 2)
    if "types" in expected:  # which a model without types does not read
        assert pair_form(tmp_path, 2, 1)[:2] == (1, 0)


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "small", "dog", "cat", "is", "##s")


@pytest.mark.parametrize(
    ("name", "separators", "second"),
    [("bert-scores", 1, 1), ("bert-scores", 1, 0), ("xlm-roberta-scores", 2, 0), ("mpnet-scores", 2, 0)],
)
def test_pairs_are_those_of_the_tokenizer(tmp_path: Path, name: str, separators: int, second: int) -> None:
    folder = encoder_checkpoint(tmp_path / "model", ENCODER_CASES[name])
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    library.normalizer = tokenizers.normalizers.BertNormalizer()
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(list(WORDS[:4]))
    middle = "[SEP]" if separators == 1 else "[SEP] [SEP]"
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A {middle} $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    if name == "mpnet-scores":  # as in its published files
        library.post_processor = tokenizers.processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"})
    llamac.export.export(folder, tmp_path / "model.bin")
    with llamac.load(tmp_path / "model.bin") as model:
        for query, document in (("a small dog", "cats"), ("", "is a dog"), ("[SEP] a", "cat [CLS]")):
            found = pair_tokens(model, query, document, None, False, "documents[0]", Cancellation())
            if "[" not in query:
                expected = library.encode(query, document)
                assert found.ids.tolist() == expected.ids
                assert (found.types.tolist() if found.types else [0] * len(found.ids)) == expected.type_ids
            assert found.ids.tolist().count(3) == 1 + separators
        assert 0 < model.rerank("a small dog", ["cats"])[0].score < 1
    other = tmp_path / "tokenizer"
    other.mkdir()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [PAD]",
        pair=f"[CLS] $A {middle} $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3), ("[PAD]", 0)],
    )
    library.save(str(other / "tokenizer.json"))
    library.save(str(folder / "tokenizer.json"))
    for given in (None, other, other / "tokenizer.json"):
        with pytest.raises(UnsupportedError, match=r"puts the tokens 2 and 3 around .* BOS and EOS are 2 and 0"):
            llamac.export.export(folder, tmp_path / "other.bin", tokenizer=given)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A {'[SEP] [SEP]' if separators == 1 else '[SEP]'} $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    library.save(str(other / "tokenizer.json"))
    write_json(other / "tokenizer_config.json", {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"})
    with pytest.raises(
        UnsupportedError, match=rf"pair by {3 - separators} .* the model's own tokenizer by {separators}"
    ):
        llamac.export.export(folder, tmp_path / "other.bin", tokenizer=other)


def test_inspect_says_what_an_encoder_is_for(folder: Path) -> None:
    facts = outline(local_source(folder), silent)
    assert (facts["pooling"], facts["config"]["two_sided"]) == ("mean", 1)
    assert describe_file(exported(folder))["config"]["n_types"] == 2
    with_pooling = _encoder_lines(facts["config"], facts["pooling"])
    assert with_pooling == ["encoder     embeds texts, 40 numbers each: embed (pooling mean); it generates no text"]
    flat = describe_file(FlatFile(folder.with_suffix(".bin")))
    assert _encoder_lines(flat["config"], flat["metadata"]["pooling"]) == with_pooling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classifier_activation": "relu"}, "classifier_activation is relu; supported is gelu"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max', expected cls or mean"),
        ({"id2label": {"0": "a", "1": "b"}}, "a classifier with 2 classes"),
    ],
)
def test_heads_of_modernbert_that_the_engine_does_not_compute_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedError, ExportError), match=message):
        parse({**ENCODER_CASES["modernbert-scores"].config, **changes})


def test_modernbert_scores_pairs(tmp_path: Path) -> None:
    for name, pooling in (("modernbert-scores", "mean"), ("modernbert-scores-cls", "cls")):
        folder = encoder_checkpoint(tmp_path / name, ENCODER_CASES[name])
        file = exported(folder)
        assert file.metadata["pooling"] == pooling
        assert file.config["pooled_norm"][:2] == [1, 0]
        assert file.config["pooled_activation"][:2] == ["gelu_erf", "sigmoid"]
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {key: tensor.lazy().array() for key, tensor in stored.items() if key != "head.norm.weight"}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ExportError, match=r"missing: .*head\.norm\.weight"):
        hf.read(folder, [])


@pytest.mark.parametrize("options", [{"to": "hf"}, {"to": "gguf"}, {"calibrate": "self", "dtype": "q4"}])
def test_exports_that_need_logits_are_refused(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="encoder"):
        llamac.export.export(folder, tmp_path / "out", **options)


def test_quantized_encoders_embed(folder: Path) -> None:
    exact = exported(folder)
    llamac.export.export(folder, folder.with_name("q8.bin"), dtype="q8")
    with llamac.load(exact.path) as model, llamac.load(folder.with_name("q8.bin")) as rounded:
        one, other = (opened.embed([5, 6, 7, 8]) for opened in (model, rounded))
    assert 0.99 < float(one @ other) < 1


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_decoders_that_see_both_sides_embed(tmp_path: Path, name: str) -> None:
    """As gte-Qwen2 is published: a class with an output matrix, which embeddings do not need, and the last token."""
    case = ENCODER_CASES[name]
    folder = encoder_checkpoint(tmp_path / name, case)
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {f"model.{key.removeprefix('model.')}": tensor.lazy().array() for key, tensor in stored.items()}
    write_safetensors(folder / "model.safetensors", tensors | {"lm_head.weight": np.ones((3, 3), np.float32)})
    write_json(folder / "modules.json", modules("Transformer", "Pooling", "Normalize"))
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    with llamac.load(exported(folder).path) as model:
        vector = model.embed(case.ids)
        last = encoder_references()[name][-1]
        assert np.abs(vector - last / np.linalg.norm(last)).max() < 1e-5
        with pytest.raises(UnsupportedError, match="the model is an encoder"):
            model.generate("a")
    changed = {"architectures": ["ForSequenceClassification"], "id2label": {"0": "a"}}
    with pytest.raises(UnsupportedError, match="which is not a model of embeddings"):
        parse({**case.config, **changed})
    if name != "llama":
        with pytest.raises(UnsupportedError, match="use_sliding_window is True"):
            parse({**case.config, "use_sliding_window": True})


def test_llama_bidirec_embeds_and_scores(tmp_path: Path) -> None:
    """NVIDIA's names of a LLaMA that sees both sides: the score is that of the mean, divided by a temperature."""
    folder = encoder_checkpoint(tmp_path / "llama", ENCODER_CASES["llama"])
    expected = hf.read(folder, [])
    config = {key: value for key, value in ENCODER_CASES["llama"].config.items() if key != "is_causal"}
    config |= {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}
    write_json(folder / "config.json", config | {"temperature": 0.02})
    found = hf.read(folder, [])
    assert (found.config, found.metadata["pooling"]) == (expected.config, "mean")
    ids = ENCODER_CASES["llama"].ids[:9]
    with llamac.load(exported(folder).path) as model:
        mean = model.embed(ids, normalize=False).astype(np.float64)
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {f"model.{key.removeprefix('model.')}": tensor.lazy().array() for key, tensor in stored.items()}
    score = random_tensor("score", (1, config["hidden_size"]))
    write_safetensors(folder / "model.safetensors", tensors | {"score.weight": score})
    scorer = {"architectures": ["LlamaBidirectionalForSequenceClassification"], "id2label": {"0": "a"}}
    write_json(folder / "config.json", config | scorer | {"temperature": 4.0})
    file = exported(folder)
    assert (file.metadata["pooling"], file.metadata["pair_separators"]) == ("mean", 0)
    with llamac.load(file.path) as model:
        tokens = Tokens(array("i", ids))
        [[found_score]] = pooled_outputs(model, [tokens], pooling_of(model, None), "", silent, Cancellation())
    assert found_score == pytest.approx(1 / (1 + np.exp(-(mean @ score[0]) / 4)), abs=1e-5)
    for wrong, message in (
        ({"pooling": "max"}, "pooling is 'max', expected avg or cls or last"),
        ({"temperature": 0}, "above 0"),
    ):
        with pytest.raises(ExportError, match=message):
            parse({**config, **scorer, **wrong})


def test_is_causal_of_other_decoders_must_be_true() -> None:
    mistral = FAMILY_CASES["mistral"].config
    assert parse({**mistral, "is_causal": True}).model == parse(mistral).model
    with pytest.raises(UnsupportedError, match=r"is_causal is False \(attention to later positions\)"):
        parse({**mistral, "is_causal": False})


def test_the_files_say_what_precedes_texts_and_how_vectors_are_compared(folder: Path) -> None:
    settings: dict[str, Any] = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    for name, expected in ((None, None), ("document", None), ("query", "query: ")):
        write_json(folder / "config_sentence_transformers.json", settings | {"default_prompt_name": name})
        metadata = hf.read(folder, []).metadata
        assert (metadata.get("prompt"), metadata["prompts"]) == (expected, settings["prompts"])
    settings = {"prompts": {}, "default_prompt_name": "query", "similarity_fn_name": "dot", "truncate_dim": 16}
    write_json(folder / "config_sentence_transformers.json", settings)
    for kinds, normalizes in ((("Transformer", "Pooling"), False), (("Transformer", "Pooling", "Normalize"), None)):
        write_json(folder / "modules.json", modules(*kinds))
        metadata = hf.read(folder, []).metadata
        assert not {"prompt", "prompts"} & metadata.keys()
        assert (metadata["similarity"], metadata["dimensions"]) == ("dot", 16)
        assert metadata.get("normalizes") is normalizes
    write_json(folder / "modules.json", modules("Transformer", "Pooling", "Dense"))
    write_dense(folder / "2_Dense", 80, 24, TANH, bias=True)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": ["cls", "max"]})
    with pytest.raises(UnsupportedError, match="lists a dense layer of several poolings at once"):
        hf.read(folder, [])
