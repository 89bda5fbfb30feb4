"""The equations of the gated delta net: what its state remembers, and transformers' own functions."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from llamac.export import delta_net
from llamac.export.rounding import Array


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.RandomState(seed).standard_normal(shape)


def test_a_channel_is_convolved_with_its_last_rows() -> None:
    x, taps = noise(9, 3), noise(3, 4, seed=1)
    expected = [np.convolve(x[:, channel], taps[channel, ::-1])[: len(x)] for channel in range(3)]
    np.testing.assert_allclose(delta_net.convolution(x, taps), np.transpose(expected), atol=1e-14)


def test_the_state_returns_the_last_value_of_each_key() -> None:
    """With orthogonal keys, beta 1 and no decay, the state is a dictionary; a second value replaces the first."""
    keys, values = np.eye(3)[[0, 1, 2, 1]], noise(4, 5)
    everything = np.ones((4, 1))
    for token, latest in ((0, 0), (1, 3), (2, 2)):
        q = np.tile(keys[token], (4, 1))[:, None]
        read = delta_net.delta_rule(q, keys[:, None], values[:, None], everything, everything)
        np.testing.assert_allclose(read[-1, 0], values[latest] / 3**0.5, atol=1e-14)


def test_the_state_decays_and_takes_over_a_part_of_a_value() -> None:
    key = np.array([[[1.0, 0.0]]])
    keys, values = np.concatenate((key, key[..., ::-1], key[..., ::-1])), noise(3, 1, 4)
    beta, decay = np.array([[0.25], [1.0], [1.0]]), np.array([[1.0], [0.5], [0.1]])
    read = delta_net.delta_rule(np.tile(key, (3, 1, 1)), keys, values, beta, decay)
    for row, factor in enumerate((0.25, 0.125, 0.0125)):
        np.testing.assert_allclose(read[row], factor * values[0] / 2**0.5, atol=1e-15)


def test_neighboring_heads_of_values_share_a_head_of_keys() -> None:
    q, k = (delta_net.unit(noise(6, 2, 3, seed=seed)) for seed in (1, 2))
    v, beta, decay = noise(6, 4, 5), 1 / (1 + np.exp(noise(6, 4))), np.exp(-np.abs(noise(6, 4)))
    together = delta_net.delta_rule(q, k, v, beta, decay)
    for head in range(4):
        of_keys, own = slice(head // 2, head // 2 + 1), slice(head, head + 1)
        alone = delta_net.delta_rule(q[:, of_keys], k[:, of_keys], v[:, own], beta[:, own], decay[:, own])
        np.testing.assert_allclose(together[:, own], alone, atol=1e-14)


def test_heads_have_length_one_and_tiny_ones_stay_tiny() -> None:
    np.testing.assert_allclose(np.linalg.norm(delta_net.unit(noise(4, 2, 8)), axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(delta_net.unit(np.array([1e-3, 0.0])), [0.5**0.5, 0.0])


@pytest.mark.parametrize("n", [1, 70])  # transformers computes chunks of 64 tokens at once
def test_the_delta_rule_is_transformers(n: int) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = noise(n, 2, 3, seed=1), noise(n, 2, 3, seed=2), noise(n, 4, 5, seed=3)
    beta, log_decay = 1 / (1 + np.exp(noise(n, 4))), -np.abs(noise(n, 4, seed=4))
    inputs = [torch.tensor(x, dtype=torch.float32)[None] for x in (q, k, v, log_decay, beta)]
    for function in (modeling.torch_recurrent_gated_delta_rule, modeling.torch_chunk_gated_delta_rule):
        expected = function(*inputs, use_qk_l2norm_in_kernel=True)[0][0].numpy()
        found = delta_net.delta_rule(delta_net.unit(q), delta_net.unit(k), v, beta, np.exp(log_decay))
        np.testing.assert_allclose(found, expected, atol=3e-6)
