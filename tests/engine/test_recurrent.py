"""Models with recurrent layers (Gated DeltaNet, Mamba 2, short convolutions) and gated attention: the definitions, and
what sessions can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from recurrent_models import both_mixers, delta_nets, mamba2_layers, parts, short_convs

import llamac
from builders import write_model
from llamac import _core
from llamac.cli import run_command
from llamac.engine.cache.moving import copy_content
from llamac.engine.cache.recurrent import can_cut
from llamac.errors import UnsupportedError
from llamac.export.parity.stages import OF_A_LAYER
from llamac.export.reference import forward

IDS = [3 + (7 * i * i + 5 * i) % 200 for i in range(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("recurrent") / "model.bin", delta_nets())) as model:
        yield model


@pytest.fixture(scope="module")
def logits(model: llamac.Model) -> NDArray[Any]:
    """The logits of IDS, computed at once."""
    with model.session() as session:
        return session.eval(IDS, logits="all")


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(x * sigmoid(x))


def delta_net(model: llamac.Model, layer: int, h: NDArray[Any]) -> tuple[Any, Any]:
    """The definition in docs/format.md, in float64: what goes into delta_out, and its result."""
    names = ["dt.bias", *(f"{name}.weight" for name in ("qkv", "z", "beta", "a", "conv", "decay", "norm", "out"))]
    weight = {name: model.file.tensor(f"layers.{layer}.delta_{name}").astype(np.float64) for name in names}
    key_heads, heads, key_dim, value_dim, width = 2, 4, 16, 32, 4
    raw = h @ weight["qkv.weight"].T
    taps = weight["conv.weight"].reshape(width, -1)
    padded = np.vstack([np.zeros((width - 1, raw.shape[1])), raw])
    mixed = silu(sum(taps[t] * padded[t : t + len(raw)] for t in range(width)))
    q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (x.reshape(-1, key_heads, key_dim) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, v = q / np.sqrt(key_dim), v.reshape(-1, heads, value_dim)
    beta = 2 * sigmoid(h @ weight["beta.weight"].T)  # state_beta_doubled
    decay = np.exp(weight["decay.weight"] * np.logaddexp(0, h @ weight["a.weight"].T + weight["dt.bias"]))
    z = (h @ weight["z.weight"].T).reshape(-1, heads, value_dim)
    out = np.zeros_like(v)
    for head in range(heads):
        state, of_key = np.zeros((key_dim, value_dim)), head // (heads // key_heads)
        for t in range(len(h)):
            state *= decay[t, head]
            change = beta[t, head] * (v[t, head] - k[t, of_key] @ state)
            state += np.outer(k[t, of_key], change)
            out[t, head] = q[t, of_key] @ state
    eps = model.config["state_norm_eps"]
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + eps) * weight["norm.weight"] * silu(z)
    mix = out.reshape(len(h), -1)
    return mix, mix @ weight["out.weight"].T


def test_a_delta_net_computes_its_definition(model: llamac.Model) -> None:
    with model.session() as session:
        found = session.observe(IDS[:70], ["attn_norm", "attn_mix", "attn_out", "q", "scores"])
    for layer in (0, 2):
        mix, out = delta_net(model, layer, found["attn_norm", layer].astype(np.float64))
        np.testing.assert_allclose(found["attn_mix", layer], mix, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(found["attn_out", layer], out, rtol=2e-4, atol=2e-5)
        assert np.abs(mix[40:]).max() > 1e-3
        assert not found["q", layer].any()
        assert not found["scores", layer].any()


def test_attention_is_multiplied_by_its_gate(model: llamac.Model) -> None:
    with model.session(kv_dtype="f32") as session:
        found = session.observe(IDS[:20], ["attn_norm", "scores", "v", "attn_mix"])
    heads, head_dim, h = model.config["n_heads"], model.config["head_dim"], found["attn_norm", 1].astype(np.float64)
    scores = found["scores", 1].astype(np.float64)[:, :, :20]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    v = found["v", 1].astype(np.float64).reshape(20, -1, head_dim)
    v = np.repeat(v, heads // v.shape[1], axis=1)
    gate = sigmoid(h @ model.file.tensor("layers.1.attn_gate.weight").astype(np.float64).T)
    expected = np.einsum("rhp,phd->rhd", p, v).reshape(20, -1) * gate
    np.testing.assert_allclose(found["attn_mix", 1][:, : heads * head_dim], expected, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def short_conv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("short_conv") / "model.bin", short_convs())) as model:
        yield model


def test_a_short_convolution_computes_its_definition(short_conv: llamac.Model) -> None:
    with short_conv.session() as session:
        found = session.observe(IDS[:20], ["attn_norm", "attn_mix", "attn_out"])
    for layer in (0, 2):
        h = found["attn_norm", layer].astype(np.float64)
        weights = [short_conv.file.tensor(f"layers.{layer}.conv_{name}.weight") for name in ("in", "taps", "out")]
        b, c, x = np.split(h @ weights[0].astype(np.float64).T, 3, axis=1)
        taps = weights[1].reshape(-1, 32).astype(np.float64)
        padded = np.vstack([np.zeros((len(taps) - 1, 32)), b * x])
        mix = sum(tap * padded[t : t + 20] for t, tap in enumerate(taps))
        if layer == 0:
            mix = mix + short_conv.file.tensor("layers.0.conv_taps.bias")
        np.testing.assert_allclose(found["attn_mix", layer], c * mix, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(found["attn_out", layer], (c * mix) @ weights[2].T, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("mamba2") / "model.bin", mamba2_layers())) as model:
        yield model


@pytest.fixture(scope="module")
def of_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("parts") / "model.bin", parts())) as model:
        yield model


def test_layers_of_one_part_have_zeros_in_place_of_the_other(
    of_parts: llamac.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    with of_parts.session() as session:
        found = session.observe(IDS[:20], ["embedding", *OF_A_LAYER[:6], "scores", *OF_A_LAYER[7:]])
    before = found["embedding", 0]
    for layer, record in enumerate(of_parts.file.layers):
        part, none = ("ffn", "attn_out") if record["mixer"] == "none" else ("attn_out", "ffn")
        np.testing.assert_allclose(found["block", layer], before + found[part, layer], rtol=1e-5, atol=1e-5)
        assert np.abs(found[part, layer]).max() > 1e-3
        absent = ("ffn_norm", "ffn") if none == "ffn" else ("attn_norm", "q", "k", "cache_v", "attn_mix", "attn_out")
        assert not any(found[stage, layer].any() for stage in absent)
        before = found["block", layer]
    assert run_command(["inspect", str(of_parts.file.path)]) == 0
    shown = capsys.readouterr().out
    assert "2 x mamba2\n            1 x FFN experts 24 (2 of 4), shared 20\n" in shown
    assert "1 x FFN plain 40\n" in shown


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    with llamac.load(write_model(tmp_path_factory.mktemp("beside") / "model.bin", both_mixers())) as model:
        yield model


def test_attention_and_mamba2_side_by_side_are_added(beside: llamac.Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the float64 forward pass, with what observers see of both."""
    stages: dict[tuple[str, int], NDArray[Any]] = {}
    ids = IDS[:60]
    expected = forward(
        both_mixers(), [ids], observe=lambda stage, layer, values: stages.update({(stage, layer): values})
    )
    with beside.session(kv_dtype="f32") as session:
        found = session.observe(ids, ["q", "v", "attn_mix", "attn_out", "block", "logits"])
    for layer in (0, 1):
        width = stages["attn_mix", layer].shape[1]
        for stage, numbers in (
            ("attn_mix", found["attn_mix", layer][:, :width]),
            ("attn_out", found["attn_out", layer]),
        ):
            np.testing.assert_allclose(numbers, stages[stage, layer], rtol=2e-4, atol=2e-4)
        assert np.abs(found["q", layer]).max() > 1e-3
    np.testing.assert_allclose(found["logits", 0], expected[0], rtol=1e-3, atol=1e-3)
    assert run_command(["inspect", str(beside.file.path)]) == 0
    assert "4 heads (4 KV) of 8, mamba2 beside them, FFN gated 40" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mamba2", "of_parts", "beside"])
def test_a_prefix_of_mamba_layers_is_reused(name: str, request: pytest.FixtureRequest) -> None:
    mamba2 = request.getfixturevalue(name)
    with mamba2.session() as session:
        session.generate(IDS[:150], max_tokens=3, temperature=0)
        turn = session.generate([*IDS[:148], 7, 8, 9], max_tokens=5, temperature=0)
    assert turn.usage.cached_tokens >= 128
    assert turn.tokens == mamba2.generate([*IDS[:148], 7, 8, 9], max_tokens=5, temperature=0).tokens


@pytest.mark.parametrize("mixer", ["short_conv", "mamba2", "of_parts", "beside"])
def test_sessions_with_other_recurrent_layers_rewind_fork_and_are_saved(
    mixer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(mixer)
    with model.session(sequences=2) as session, model.session(sequences=2) as other:
        expected = session.eval(IDS[:140], logits="all")
        for length in (136, 128, 77, 1, 0):
            session.truncate(length)
            np.testing.assert_array_equal(session.eval(IDS[length : length + 3]), expected[length + 2])
            session.eval(IDS[length + 3 : 140], logits=None)
        with session.fork(length=90) as fork:
            np.testing.assert_array_equal(fork.eval(IDS[90:93]), expected[92])
        session.truncate(100)
        session.save(tmp_path / "session")
        other.load(tmp_path / "session")
        np.testing.assert_array_equal(other.eval(IDS[100:103]), expected[102])


def test_truncating_continues_with_the_same_bits(model: llamac.Model, logits: NDArray[Any]) -> None:
    with model.session() as session:
        session.eval(IDS[:300], logits=None)
        for length in (299, 257, 100, 1, 0):
            session.truncate(length)
            assert session.tokens() == IDS[:length]
            np.testing.assert_array_equal(session.eval(IDS[length : length + 2]), logits[length + 1])
            session.eval(IDS[length + 2 : 310], logits=None)


def test_forks_of_any_length_have_the_same_bits(model: llamac.Model, logits: NDArray[Any]) -> None:
    with model.session(sequences=2) as session:
        session.eval(IDS[:130], logits=None)
        for length in (130, 128, 77):
            with session.fork(length=length) as fork:
                assert fork.length() == length
                np.testing.assert_array_equal(fork.eval(IDS[length : length + 3]), logits[length + 2])
            session.copy_sequence(0, 1, length=length)
            np.testing.assert_array_equal(session.eval(IDS[length : length + 3], sequence=1), logits[length + 2])
        np.testing.assert_array_equal(session.eval(IDS[130:132]), logits[131])


def test_a_second_turn_does_not_compute_the_first_again(model: llamac.Model) -> None:
    """Also if its prompt differs from the text in the last tokens of the first prompt, and after many more tokens."""
    with model.session() as session:
        first = session.generate(IDS[:300], max_tokens=250, ignore_eos=True, temperature=0)
        whole = [*IDS[:300], *first.tokens, *IDS[300:320]]
        dropped = [*IDS[:298], 7, 8, *IDS[300:340]]
        for prompt, most in ((whole, 21), (dropped, 42 + 64), ([*dropped, 3], 1)):
            turn = session.generate(prompt, max_tokens=1, temperature=0)
            assert turn.usage.prompt_tokens - turn.usage.cached_tokens <= most
            assert turn.tokens == model.generate(prompt, max_tokens=1, temperature=0).tokens


def test_saved_sessions_continue(model: llamac.Model, logits: NDArray[Any], tmp_path: Path) -> None:
    """Also from states before the end of a sequence, and where a session moves to another device."""
    with model.session(sequences=2) as session, model.session(sequences=2) as other:
        session.eval(IDS[:90], logits=None)
        session.copy_sequence(0, 1)
        session.save(tmp_path / "session")
        groups = _core.kv_groups(session._core)
        model.kv_budget = model.kv_bytes + 2 * groups[0][3] + groups[1][3]
        copy_content(session, other)
        assert [_core.state_lengths(other._core, sequence) for sequence in (0, 1)] == [[90], [90]]
        model.kv_budget = None
        copy_content(session, other)
        assert [_core.state_lengths(other._core, sequence) for sequence in (0, 1)] == [[90, 64], [90, 64]]
        other.truncate(0)
        other.load(tmp_path / "session")
        assert _core.state_lengths(other._core, 0) == _core.state_lengths(session._core, 0) == [90, 64]
        for sequence in (0, 1):
            np.testing.assert_array_equal(other.eval(IDS[90:95], sequence=sequence), logits[94])
            assert can_cut(other._core, sequence, 90)
            other.truncate(64, sequence=sequence)
            np.testing.assert_array_equal(other.eval(IDS[64:95], sequence=sequence), logits[94])


def test_states_count_as_memory(model: llamac.Model) -> None:
    with model.session() as session:
        session.eval(IDS[:1], logits=None)
        one = session.memory()["kv"]
        assert one > 2 * 4 * 2 * 4 * 16 * 32  # two states of two layers
        session.eval(IDS[1:300], logits=None)
        assert session.memory()["kv"] > 2 * one
        session.truncate(0)
        assert session.memory()["kv"] == model.kv_bytes == 0


def test_an_engine_gives_each_request_its_own_tokens(model: llamac.Model) -> None:
    prompts = [IDS[:200], IDS[:150], [*IDS[:199], 9, 10], IDS[200:230], IDS[:200]]
    options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    expected = [model.generate(prompt, **options).tokens for prompt in prompts]
    with llamac.Engine(model) as engine:
        for _ in range(2):
            requests = [engine.submit(prompt, **options) for prompt in prompts]
            assert [request.result().tokens for request in requests] == expected
        cached = engine.submit(IDS[:200], **options).result()
        assert cached.tokens == expected[0]
        assert cached.usage.cached_tokens >= 192
        several = engine.submit(IDS[:40], n=3, **options).result()
        assert several.tokens == model.generate(IDS[:40], **options).tokens
        assert several.tokens != several.others[0].tokens


def test_a_small_cache_of_an_engine_has_room_for_states(model: llamac.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 5, "seed": 3, "ignore_eos": True}
    prompts = [IDS[:90], IDS[90:170], IDS[40:120]]
    expected = [model.generate(prompt, **options).tokens for prompt in prompts]
    with llamac.Engine(model, kv_tokens=128, context=128) as engine:
        requests = [engine.submit(prompt, **options) for prompt in prompts]
        assert [request.result().tokens for request in requests] == expected


def test_what_a_state_cannot_do_is_refused_by_name(model: llamac.Model) -> None:
    with model.session() as session:
        session.eval(IDS[:20], logits=None)
        with pytest.raises(UnsupportedError, match="cannot shift: this model has recurrent layers"):
            session.shift(2, 4)
    with pytest.raises(UnsupportedError, match="cannot shift: this model has recurrent layers"):
        model.generate(IDS[:5], context_overflow="shift")


def test_inspect_names_the_mixers(model: llamac.Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", str(model.file.path)]) == 0
    assert "3 layers of 32\n            2 x delta_net, FFN gated 40\n" in capsys.readouterr().out
