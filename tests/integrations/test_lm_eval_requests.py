"""The model class for lm-evaluation-harness with a stand-in for the harness: batch sizes and limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import llamac
from llamac import ArgumentError

MODULE = "llamac.integrations.lm_eval"


def stand_in(name: str, **content: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


class TemplateLM:
    """The harness's base class."""

    def __init__(self) -> None:
        self.cache_hook = SimpleNamespace(add_partial=lambda *_: None)


def settings_of(given: dict[str, Any], most: int) -> dict[str, Any]:
    return {"max_gen_toks": most, **given}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class with the stand-in."""
    modules: dict[str, dict[str, object]] = {
        "lm_eval": {"utils": None},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda made: made},
        "lm_eval.models": {},
        "lm_eval.models.utils": {"normalize_gen_kwargs": settings_of},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, stand_in(name, **content))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    from llamac.integrations.lm_eval import LlamacLM

    yield LlamacLM
    sys.modules.pop(MODULE, None)


@pytest.fixture
def opened(adapter: Any, tiny_llama: Path) -> Iterator[Any]:
    made = adapter(str(tiny_llama), max_length=64)
    yield made
    made.close()


@pytest.mark.parametrize(("given", "expected"), [(3, 3), ("3", 3), ("auto", 16), ("auto:4", 16), ("500", 256)])
def test_the_harness_gives_its_batch_size_as_a_text(
    given: int | str, expected: int, adapter: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Engine(llamac.Engine):
        def __init__(self, model: llamac.Model, *, max_sequences: int, **options: Any) -> None:
            sizes.append(max_sequences)
            super().__init__(model, max_sequences=max_sequences, **options)

    monkeypatch.setattr(sys.modules[MODULE], "Engine", Engine)
    made = adapter(str(tiny_llama), batch_size=given)
    made.generate_until([], disable_tqdm=True)
    made.close()
    assert sizes == [expected]


@pytest.mark.parametrize("given", [0, -1, "x", None, 2.5])
def test_a_wrong_batch_size_is_found_before_the_first_task(given: Any, adapter: Any, tiny_llama: Path) -> None:
    with pytest.raises(ArgumentError, match=f"batch_size is {given!r}, expected at least 1, or 'auto'"):
        adapter(str(tiny_llama), batch_size=given)


@pytest.mark.parametrize(
    ("name", "hint"), [("thread", "did you mean 'threads'"), ("n_threads", "did you mean 'threads'"), ("lora", "path,")]
)
def test_an_unknown_argument_is_refused(name: str, hint: str, adapter: Any, tiny_llama: Path) -> None:
    with pytest.raises(TypeError, match=f"unexpected argument '{name}'.*{hint}"):
        adapter(str(tiny_llama), **{name: 1})


def test_arguments_of_the_harness_are_accepted(adapter: Any, tiny_llama: Path) -> None:
    adapter(str(tiny_llama), batch_size="1", max_batch_size=8, device="cpu", trust_remote_code=True).close()


def test_generations_leave_room_for_the_prompt(opened: Any) -> None:
    for settings, asked in (({}, 256), ({"max_gen_toks": 64}, 64), ({"max_gen_toks": 100}, 100)):
        with pytest.raises(ArgumentError, match=f"asks for {asked} new tokens.*at most 63"):
            opened.generate_until([SimpleNamespace(args=("hello", settings))], disable_tqdm=True)
    found = opened.generate_until([SimpleNamespace(args=("hello", {"max_gen_toks": 63}))], disable_tqdm=True)
    assert len(found) == 1


def test_continuations_must_fit_into_the_context(opened: Any) -> None:
    ids = list(range(3, 50))
    ((fits, _),) = opened._loglikelihood_tokens([(None, ids, [30] * 64)], disable_tqdm=True)
    assert fits < -64
    for n in (65, 66, 80):
        with pytest.raises(ArgumentError, match=f"a continuation has {n} tokens.*holds 64"):
            opened._loglikelihood_tokens([(None, ids, [30] * n)], disable_tqdm=True)
