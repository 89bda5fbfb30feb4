"""Configs of encoders that contradict themselves or the tensors are errors that name the field."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from builders import checkpoint, llama_config, write_model
from flat_hashes import put, read_sections, rehashed
from llamac import ModelError
from llamac.format.flatfile import FlatFile

CONTRADICTIONS: list[tuple[dict[str, int], str]] = [
    ({"n_types": 2}, "config: n_types is 2, expected 0 with two_sided 0"),
    ({"scores_pairs": 1}, "config: tied_output is 0, expected 1 with scores_pairs 1"),
    ({"scores_pairs": 1, "tied_output": 1}, "scores_pairs is 1, but the last of n_pooled 0 layers does not have width"),
    ({"scores_pairs": 1, "mtp_layers": 1}, "mtp_layers is 1, expected 0 unless .* two_sided and scores_pairs are 0"),
    ({"bias_distance": 3, "mtp_layers": 1}, "config: bias_distance is 3, expected 0 with mtp_layers 1"),
    ({"embedding_norm": 1, "mtp_layers": 1}, "config: embedding_norm is 1, expected 0 with mtp_layers 1"),
    (
        {"n_heads": 2048, "n_kv_heads": 1, "bias_distance": 1 << 17},
        "config: n_heads 2048 times the 262145 distances up to bias_distance exceeds 268435456",
    ),
    ({"bias_distance": 3}, r"tensor distance_bias\.weight is missing, with bias_distance 3"),
    ({"two_sided": 1}, "config: tied_output is 0, expected 1 with two_sided 1"),
    (
        {"two_sided": 1, "tied_output": 1, "scores_pairs": 1},
        "scores_pairs is 1, but the last of n_pooled 0 layers does not have width 1",
    ),
    ({"n_pooled": 1}, r"config: pooled_dim\[0\] is 0, pooled_activation\[0\] is 0 and .* with n_pooled 1"),
    ({"pooled_activation": 1}, r"config: pooled_dim\[0\] is 0, pooled_activation\[0\] is 1 and .* with n_pooled 0"),
    ({"pooled_norm": 1}, r"and pooled_norm\[0\] is 1 with n_pooled 0"),
    (
        {"two_sided": 1, "tied_output": 1, "scores_pairs": 1, "n_pooled": 1, "pooled_dim": 1, "pooled_norm": 1},
        "does not have width 1, or has pooled_norm 1",
    ),
    ({"n_pooled": 5}, "config: n_pooled is 5, expected 0 to 4"),
    ({"n_pooled": 1, "pooled_dim": 3}, r"tensor pooled\.0\.weight is missing"),
    (
        {"two_sided": 1, "tied_output": 1, "n_types": 3},
        r"tensor type_embedding\.weight is missing, with n_types 3",
    ),
]


@pytest.mark.parametrize(("values", "message"), CONTRADICTIONS)
def test_a_config_that_contradicts_itself_is_an_error(tmp_path: Path, values: dict[str, int], message: str) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    data = bytearray(path.read_bytes())
    start = read_sections(data)["config"].offset
    for name, value in values.items():
        put(data, "config", start, name, struct.pack("<I", value))
    path.write_bytes(rehashed(data))
    with pytest.raises(ModelError, match=message):
        FlatFile(path)
