"""`max_memory` with sources that are not flat files: refused with the plan before anything is converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import PREFIX, small_adapter
from gguf_samples import Type, spm_keys, write_gguf
from vocab_samples import tokenizer_json, write_json

import llamac
from golden.cases import CASES
from golden.tiny_checkpoints import changed, tensors, write_checkpoint
from llamac.engine.memory import MemoryPlan
from llamac.engine.model import Model
from llamac.export.checkpoint import LazyTensor
from llamac.sources.conversions import Request, hollow
from llamac.text import tokenizer
from opened_sources import models_in

# whole blocks of Q8_0
CONFIG = changed(CASES["llama"].config, hidden_size=64, head_dim=16, intermediate_size=96)


@pytest.fixture(params=["gguf", "quantized gguf", "hf"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source. What a tokenizer takes is measured, and is 0 here."""
    monkeypatch.setattr(tokenizer, "resident_bytes", lambda: 0)
    if request.param == "hf":
        folder = write_checkpoint(tmp_path / "hf", CONFIG)
        write_json(folder, tokenizer=tokenizer_json())
        return folder
    kind = Type.F16 if request.param == "gguf" else Type.Q8_0
    return write_gguf(tmp_path / "m.gguf", CONFIG, tensors(CONFIG), kind=kind, more=spm_keys())


def plan_of(model: Model) -> MemoryPlan:
    return model.plan_memory(context=64)


@pytest.mark.filterwarnings("ignore:the source")  # of q8 made from Q8_0
@pytest.mark.parametrize("dtype", ["auto", "f32", "q8"])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_hollow_file_plans_what_the_conversion_needs(
    source: Path, cache_folder: Path, dtype: str, with_tokenizer: bool
) -> None:
    file = hollow(Request(source, None, str(source), dtype, with_tokenizer, "map"))
    assert file.path == source
    with Model(file) as model:
        planned = plan_of(model)
        assert model.has_tokenizer == with_tokenizer
    if with_tokenizer:
        with llamac.load(source, dtype=None if dtype == "auto" else dtype) as converted:  # type: ignore[arg-type]
            assert plan_of(converted) == planned
    assert planned.weights > 10_000


@pytest.mark.parametrize("cached", [True, False])
def test_a_limit_that_cannot_be_kept_is_refused_before_a_weight_is_read(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    def refuse(self: LazyTensor, *arguments: object) -> None:
        raise AssertionError("a weight was read")

    with monkeypatch.context() as patched:
        patched.setattr(LazyTensor, "array", refuse)
        patched.setattr("llamac.export.flat.write.write_file", refuse)
        patched.setattr("llamac.export.flat.direct.write_unhashed", refuse)
        notices: list[str] = []
        with pytest.raises(llamac.OutOfMemoryError, match=r"max_memory is .*, but .* are needed") as failure:
            llamac.load(source, max_memory=30_000, cache_dir=None if cached else False, progress=note(notices))
    assert "\n  weights " in str(failure.value)
    assert "\n  KV cache " in str(failure.value)
    assert notices == []
    assert models_in(cache_folder) == []


def test_a_limit_that_can_be_kept_does_not_stop_a_conversion(source: Path, cache_folder: Path) -> None:
    with llamac.load(source) as model:
        limit = model.plan_memory(context=64).total
    with llamac.load(source, max_memory=limit, context=64, cache_dir=False) as model:
        assert model.max_memory == limit
    with pytest.raises(llamac.OutOfMemoryError):
        llamac.load(source, max_memory=limit - 1, context=64, cache_dir=False)


def test_adapters_and_the_draft_model_are_planned_as_they_are_held(source: Path, cache_folder: Path) -> None:
    """One byte less than what the opened model plans is refused before anything is converted."""
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    factors = {
        f"{name}.lora_A.weight": np.ones((2, 64), np.float32),
        f"{name}.lora_B.weight": np.ones((64, 2), np.float32),
    }
    adapter = small_adapter(source.parent / "adapter", tensors=factors)
    options: dict[str, Any] = {"lora": adapter, "draft_model": source, "context": 64, "cache_dir": False}
    with llamac.load(source, **options) as model:
        planned = model.plan_memory(context=64)
        held = model.memory()
        assert planned.adapters == held.adapters > 0
        assert planned.draft >= held.draft > 0
        assert planned.weights == held.weights
    with llamac.load(source, max_memory=planned.total, **options) as model:
        assert model.plan_memory(context=64).total == planned.total
    notices: list[str] = []
    with pytest.raises(llamac.OutOfMemoryError) as failure:
        llamac.load(source, max_memory=planned.total - 1, progress=note(notices), **options)
    assert notices == []
    assert "\n  adapters " in str(failure.value)
    assert "\n  drafts " in str(failure.value)


def test_the_tokenizer_that_replaces_the_sources_own_is_counted(source: Path, cache_folder: Path) -> None:
    other = source.parent / "other"
    other.mkdir()
    write_json(other, tokenizer=tokenizer_json())
    with pytest.raises(llamac.OutOfMemoryError, match="\n  tokenizer "):
        llamac.load(source, tokenizer=other, max_memory=30_000)
    assert models_in(cache_folder) == []


def note(found: list[str]) -> Callable[[str, int, int], None]:
    return lambda phase, done, total: found.append(phase)
