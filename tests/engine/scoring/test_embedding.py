"""Embeddings: pooling, normalization, the same bits in any batch, refused arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import Floats, checkpoint, llama_config, write_model
from llamac import ArgumentError, ContextFullError, ModelError, UnsupportedError
from llamac.engine.scoring.pooled import Pooling

TEXTS = ["hello world", "The end", "x" * 400, "", "a", *(f"text {i} " * (i % 7 + 1) for i in range(80))]


@pytest.fixture
def with_eos(tmp_path: Path) -> Iterator[llamac.Model]:
    """A random LLaMA whose rules append EOS, as embedding models do."""
    made = checkpoint(llama_config())
    assert made.tokenizer is not None
    data, special, spm = made.tokenizer
    made.tokenizer = (data, replace(special, add_eos=True, eos_id=2), spm)
    with llamac.load(write_model(tmp_path / "model.bin", made)) as model:
        yield model


def norms(model: llamac.Model, ids: list[int]) -> Floats:
    """The output norms of all tokens."""
    with model.session(context=len(ids)) as session:
        return session.observe(ids, ["output_norm"])["output_norm", 0]


def test_the_last_token_is_pooled_by_default(model: llamac.Model, with_eos: llamac.Model) -> None:
    for opened in (model, with_eos):
        ids = opened.tokenizer.encode("hello world", add_special=True)
        last = norms(opened, ids)[-1]
        assert np.array_equal(opened.embed("hello world", normalize=False), last)
        np.testing.assert_allclose(opened.embed("hello world"), last / np.linalg.norm(last), rtol=1e-6)
    assert ids[0] == 1
    assert ids[-1] == 2


@pytest.mark.parametrize("pooling", ["mean", "max", "mean_sqrt_len", "weightedmean"])
def test_other_poolings_use_all_tokens(model: llamac.Model, pooling: Pooling) -> None:
    every = norms(model, model.tokenize("hello world")).astype(np.float64)
    n = len(every)
    expected = {
        "mean": every.sum(axis=0) / n,
        "max": every.max(axis=0),
        "mean_sqrt_len": every.sum(axis=0) / np.sqrt(n),
        "weightedmean": sum((i + 1) * row for i, row in enumerate(every)) / (n * (n + 1) / 2),
    }[pooling]
    found = model.embed("hello world", pooling=pooling, normalize=False)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_dimensions_are_cut_before_the_scaling(model: llamac.Model) -> None:
    whole, cut = model.embed("hello", normalize=False), model.embed("hello", dimensions=10)
    assert cut.shape == (10,)
    np.testing.assert_allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), rtol=1e-6)
    assert np.array_equal(model.embed("hello", dimensions=10, normalize=False), whole[:10])


@pytest.mark.parametrize("pooling", ["last", "mean", "cls", "weightedmean"])
def test_other_texts_change_no_bit(tiny: Path, pooling: Pooling) -> None:
    with llamac.load(tiny) as model:
        together = model.embed(TEXTS, pooling=pooling)
        assert together.shape == (len(TEXTS), model.config["dim"])
        assert together.dtype == np.float32
        for i in (0, 2, 3, 40, 84):
            assert np.array_equal(together[i], model.embed(TEXTS[i], pooling=pooling)), TEXTS[i]
        np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)


def test_token_ids_are_used_unchanged(with_eos: llamac.Model) -> None:
    ids = with_eos.tokenizer.encode("hello world", add_special=True)
    assert ids[-1] == 2
    whole = with_eos.embed("hello world")
    for given in (ids, tuple(ids), np.array(ids)):
        assert np.array_equal(with_eos.embed(given), whole)
    without = with_eos.embed(ids[:-1], normalize=False)
    assert np.array_equal(without, norms(with_eos, ids[:-1])[-1])
    assert np.array_equal(with_eos.embed([ids[:3], "hello world", ids])[1:], np.stack([whole, whole]))


def test_wrong_token_ids_are_refused(model: llamac.Model) -> None:
    size = model.config["vocab_size"]
    with pytest.raises(ArgumentError, match=rf"texts\[1\] has the token id {size}, expected 0 to {size - 1}"):
        model.embed([[1], [1, size]])
    with pytest.raises(ArgumentError, match=r"texts\[0\] has no tokens"):
        model.embed([[]])
    with pytest.raises(ContextFullError, match=r"texts\[0\].*600"):
        model.embed([1] * 700)
    with pytest.raises(TypeError, match="bool"):
        model.embed([True])


def test_no_texts_have_no_embeddings(model: llamac.Model) -> None:
    assert model.embed([]).shape == (0, model.config["dim"])


def test_special_tokens_in_texts_are_text_unless_asked_for(checkpoint_folder: Path, cache_folder: Path) -> None:
    with llamac.load(checkpoint_folder) as model:
        name = model.tokenizer.special_names[-1]
        for parse_special in (False, True):
            ids = model.tokenizer.encode(f"a{name}", add_special=True, parse_special=parse_special)
            found = model.embed(f"a{name}", parse_special=parse_special, normalize=False)
            assert np.array_equal(found, norms(model, ids)[-1])
        assert not np.array_equal(found, model.embed(f"a{name}", normalize=False))


def test_the_file_says_how_to_pool(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mean.bin", checkpoint(llama_config()), pooling="mean")
    with llamac.load(path) as model:
        assert np.array_equal(model.embed("hello"), model.embed("hello", pooling="mean"))
        assert not np.array_equal(model.embed("hello"), model.embed("hello", pooling="last"))
    path = write_model(tmp_path / "cls.bin", checkpoint(llama_config()), pooling="cls")
    with llamac.load(path) as model:
        assert np.array_equal(model.embed("hello", normalize=False), norms(model, model.tokenize("hello"))[0])
    path = write_model(tmp_path / "joined.bin", checkpoint(llama_config()), pooling="cls+max")
    with llamac.load(path) as model:
        every = norms(model, model.tokenize("hello"))
        joined = np.concatenate([every[0], every.max(axis=0)])
        assert np.array_equal(model.embed("hello", normalize=False), joined)
        assert np.array_equal(model.embed("hello", normalize=False, dimensions=50), joined[:50])
        assert model.embed([]).shape == (0, 96)
    path = write_model(tmp_path / "median.bin", checkpoint(llama_config()), pooling="median")
    with llamac.load(path) as model:
        with pytest.raises(UnsupportedError, match="pooling 'median'"):
            model.embed("hello")
        assert model.embed("hello", pooling="last").shape == (48,)


def with_metadata(path: Path, **metadata: object) -> llamac.Model:
    """A random LLaMA whose file also has these entries."""
    return llamac.load(write_model(path, checkpoint(llama_config()), **{"pooling": "mean", **metadata}))


def test_prompts_of_the_file_precede_texts(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": ""}
    with with_metadata(tmp_path / "a.bin", prompts=prompts, prompt="query: ") as model:
        plain, prefixed = model.embed("hello", prompt=""), model.embed("query: hello", prompt="")
        assert np.array_equal(model.embed("hello"), prefixed)
        assert np.array_equal(model.embed("hello", prompt_name="query"), prefixed)
        assert np.array_equal(model.embed(["hello"], prompt="query: ")[0], prefixed)
        assert np.array_equal(model.embed("hello", prompt_name="document"), plain)
        assert np.array_equal(model.embed(model.tokenize("hello")), plain)  # token ids are used unchanged
        assert not np.array_equal(plain, prefixed)
        for options, message in (
            ({"prompt_name": "passage"}, "'passage', which is not a prompt of the model: its prompts are 'document'"),
            ({"prompt_name": "query", "prompt": ""}, "cannot be combined"),
        ):
            with pytest.raises(ArgumentError, match=message):
                model.embed("hello", **options)
        with pytest.raises(ArgumentError, match="a prompt applies only to strings"):
            model.embed(["hello", [1]], prompt_name="query")
        with pytest.raises(TypeError, match="prompt must be a str"):
            model.embed("hello", prompt=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="prompt_name must be a str"):
            model.embed("hello", prompt_name=["query"])  # type: ignore[arg-type]
    for wrong in ({"prompt": 3}, {"prompts": {"query": 3}}, {"dimensions": "3"}):
        with (
            with_metadata(tmp_path / "b.bin", **wrong) as model,
            pytest.raises(ModelError, match=f"{next(iter(wrong))} is"),
        ):
            model.embed("hello", prompt_name="query" if "prompts" in wrong else None)


@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "cls", "max+last"])
def test_tokens_of_a_prompt_can_be_left_out(tmp_path: Path, pooling: str) -> None:
    with with_metadata(tmp_path / "a.bin", pooling=pooling, pools_prompt=False) as model:
        found = model.embed("hello", prompt="query: ", normalize=False)
        every = norms(model, model.tokenize("query: hello"))
        first = len(model.tokenize("query: "))
        assert 0 < first < len(every)
        rows = every[first:].astype(np.float64)
        weights = np.arange(first + 1, len(every) + 1)[:, None]
        expected = {
            "mean": rows.mean(axis=0),
            "weightedmean": (weights * rows).sum(axis=0) / weights.sum(),
            "cls": rows[0],
            "max+last": np.concatenate([rows.max(axis=0), rows[-1]]),
        }[pooling]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        with pytest.raises(ArgumentError, match=r"texts\[1\] has no tokens besides the prompt"):
            model.embed(["a", ""], prompt="query: ")


def test_a_prompt_can_write_special_tokens_and_its_text_cannot(checkpoint_folder: Path, cache_folder: Path) -> None:
    with llamac.load(checkpoint_folder) as model:
        name = model.tokenizer.special_names[-1]
        encode = model.tokenizer.encode
        special = encode(f"{name}a", add_special=True, parse_special=True)
        assert np.array_equal(model.embed("a", prompt=name), model.embed(special))
        ids = encode(name, add_special=True, parse_special=True) + encode(name)
        assert np.array_equal(model.embed(name, prompt=name), model.embed(ids))


def test_lengths_are_kept_if_the_files_compare_them(tmp_path: Path) -> None:
    with with_metadata(tmp_path / "a.bin", similarity="dot", normalizes=False, dimensions=7) as model:
        assert np.array_equal(model.embed("hello"), model.embed("hello", normalize=False))
        assert model.embed("hello").shape == (7,)
        assert np.linalg.norm(model.embed("hello", normalize=True)) == pytest.approx(1)
    for metadata in ({"similarity": "dot"}, {"similarity": "cosine", "normalizes": False}):
        with with_metadata(tmp_path / "b.bin", **metadata) as model:
            assert np.linalg.norm(model.embed("hello")) == pytest.approx(1)


def test_a_model_with_two_rope_tables_uses_one_per_text(tmp_path: Path) -> None:
    config = replace(llama_config(), rope_original_context=(100,))
    half = config.head_dim // 2
    made = checkpoint(config, {"rope.0.inv_freq_long": np.full(half, 0.01, np.float32)})
    with llamac.load(write_model(tmp_path / "long.bin", made)) as model:
        together = model.embed(["hello", "x" * 300])
        assert np.array_equal(together[0], model.embed("hello"))
        assert np.array_equal(together[1], model.embed("x" * 300))


def test_progress_counts_texts(model: llamac.Model) -> None:
    reports: list[tuple[str, int, int]] = []
    model.embed(TEXTS, progress=lambda phase, done, total: reports.append((phase, done, total)))
    assert reports[0] == ("embedding", 0, len(TEXTS))
    assert reports[-1] == ("embedding", len(TEXTS), len(TEXTS))
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)


def test_bad_arguments_are_refused(model: llamac.Model) -> None:
    with pytest.raises(ArgumentError, match="pooling is 'median', expected 'last', 'mean', 'cls', 'max'"):
        model.embed("a", pooling="median")  # type: ignore[arg-type]
    for dimensions in (0, 49):
        with pytest.raises(ArgumentError, match=f"dimensions is {dimensions}, expected 1 to 48"):
            model.embed("a", dimensions=dimensions)
    with pytest.raises(TypeError, match=r"texts\[1\]"):
        model.embed(["a", 3])  # type: ignore[list-item]
    for texts in (None, 3, b"a"):
        with pytest.raises(TypeError, match="texts must be a str, token ids, or a list of these"):
            model.embed(texts)  # type: ignore[arg-type]
    with pytest.raises(ContextFullError, match=r"texts\[1\].*600"):
        model.embed(["a", "x" * 700])
