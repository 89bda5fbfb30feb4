"""Gemma 4's assistants on an emulated device: logits, states and drafts of the CPU, and the memory of both models."""

from __future__ import annotations

import contextlib
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gpu.adapters import adapted
from gpu.failing_device import FailingDevice
from gpu.recording import state_copies

import llamac
from golden import assistant
from llamac import _core
from llamac.arguments import KVDtype
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.speculation.assistant import AssistantDrafter
from llamac.errors import ArgumentError, ClosedError, DeviceError, LlamacWarning, OutOfMemoryError, UnsupportedError
from llamac.export import export
from llamac.gpu.device_model import DeviceModel
from llamac.gpu.draws import Drawing, DrawMemory
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.graph import PassGraph
from prophet import results

F32 = dict(_core.dtypes())["f32"]
VOCABULARY, DIM = assistant.TRUNK["vocab_size"], assistant.TRUNK["hidden_size"]
LONG: dict[str, Any] = {"max_position_embeddings": 700}
TRUNK = {**assistant.TRUNK, **LONG}
KINDS = {
    "plain": (assistant.PLAIN, "f32"),
    "clustered": (assistant.CLUSTERED, "f32"),
    "quantized": (assistant.CLUSTERED, "q8"),
}
TEXT = [(5 * i * i + 3 * i + 7) % VOCABULARY for i in range(330)]
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "seed": 2, "ignore_eos": True}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_k": 20, "seed": 5}


@pytest.fixture(autouse=True)
def device(drafting_device: str) -> str:
    return drafting_device


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's file ("trunk") and those of its assistants."""
    folder = tmp_path_factory.mktemp("assistants")
    found = {}
    for name, (config, dtype) in {"trunk": (TRUNK, "q8"), **KINDS}.items():
        if name != "trunk":
            config = {**config, "text_config": {**config["text_config"], **LONG}}
        found[name] = folder / f"{name}.bin"
        export(assistant.write(folder / name, config), found[name], dtype=dtype, probe_source=None)
    return found


def extend(session: llamac.Session, sequence: int, length: int) -> np.ndarray[Any, Any]:
    """Append tokens of TEXT to a sequence up to a length. Returns the hidden state of the last one, (1, dim)."""
    state = np.empty((1, DIM), np.float32)
    before = session.length(sequence)
    rows = appended_rows(as_ids(TEXT[before:length]), sequence, before, "last")
    session._core.eval_rows(rows, hidden=state.data)
    return state


def drafted(session: llamac.Session, sequences: list[int], states: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Logits and states of three drafts in a row after each of some sequences, which are computed as a batch."""
    assert session._head is not None
    tokens, found = [TEXT[session.length(s)] for s in sequences], []
    for _ in range(3):
        logits, hidden = np.empty((len(sequences), VOCABULARY), np.float32), np.empty_like(states)
        rows = array("i")
        for token, sequence in zip(tokens, sequences, strict=True):
            rows.extend((token, sequence, session.length(sequence), 1))
        session._head.core().eval_rows(rows, logits.reshape(-1).data, inputs=states.data, hidden=hidden.data)
        found += [logits, hidden]
        tokens, states = logits.argmax(1).tolist(), hidden
    return found


def assert_same(found: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def drafts(session: llamac.Session) -> int:
    """The number of tokens that are drafted for a text."""
    return session.generate(TEXT[:9], **GREEDY).usage.drafted_tokens


def failing(*_: Any) -> None:
    """In place of an operation of a device."""
    raise DeviceError("the device fails")


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [("plain", "f32"), ("plain", "q8"), ("clustered", "f16"), ("quantized", "q8")],
)
def test_logits_and_states_have_the_bits_of_the_cpu(
    files: dict[str, Path], kind: str, kv_dtype: KVDtype, device: str
) -> None:
    """Of texts shorter and longer than windows and pages, of forks and cuts, and of several sequences at once."""
    with llamac.load(files["trunk"], draft_model=files[kind], kv_dtype=kv_dtype) as model:
        found: list[list[np.ndarray[Any, Any]]] = []
        for where in "cpu", device:
            with model.session(sequences=3, device=where) as session:
                got = []
                for length in 1, 6, 70:
                    got += drafted(session, [0], extend(session, 0, length))
                states = [extend(session, 0, 300)]
                session.copy_sequence(0, 1, length=290)
                states.append(extend(session, 1, 291))
                states.append(extend(session, 2, 40))
                got += drafted(session, [0, 1, 2], np.concatenate(states))
                session.truncate(session.shortest_length(0) or 60)
                got += drafted(session, [0], states[0])  # sees as much of a window as the session still has
                found.append(got)
        assert_same(*found)


def test_drafts_change_nothing_and_are_those_of_the_cpu(
    files: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sessions and engines. They are drawn on the device where tokens are. Logits and states stay there."""
    count = state_copies(monkeypatch) if device == "emulator" else None
    calls: dict[str, list[list[int]]] = {}
    copied: list[bool] = []  # of each pass whose logits are wanted: whether any of them came to the host
    draft, deliver = AssistantDrafter.draft, DrawMemory.deliver

    def recording(self: AssistantDrafter, *arguments: Any) -> list[int]:
        calls.setdefault(self._head.session.device[:3], []).append(found := draft(self, *arguments))
        return found

    def noting(self: DrawMemory, source: int, logits: Any, drawing: Drawing | None) -> None:
        deliver(self, source, logits, drawing)
        copied.append(drawing is None or None in drawing.tokens)

    monkeypatch.setattr(AssistantDrafter, "draft", recording)
    monkeypatch.setattr(DrawMemory, "deliver", noting)
    prompt = TEXT[:20]
    with llamac.load(files["trunk"], draft_model=files["clustered"], device=device) as model:
        with model.session(device="cpu") as cpu:
            for options in GREEDY, DRAWN, {**DRAWN, "logprobs": 1}:
                copied.clear()
                found = model.generate(prompt, **options)
                assert results(found) == results(cpu.generate(prompt, **options))
                assert found.usage.drafted_tokens > 0
                assert calls.pop(device[:3]) == calls.pop("cpu")
                assert len(copied) > 15
                assert sum(copied) == (len(copied) if "logprobs" in options else 1)  # that of the prompt
            alone = [cpu.generate(TEXT[i : i + 20], **GREEDY, speculation=False).tokens for i in range(2)]
        with llamac.Engine(model, max_sequences=2) as engine:
            requests = [engine.submit(TEXT[i : i + 20], **GREEDY) for i in range(2)]
            assert [request.result(60).tokens for request in requests] == alone
            assert engine.stats().drafted_tokens > 0
        memory = model.memory()
        assert memory.device is not None
        assert memory.device.kv == 0
        assert count is None or count(model) == 0


def test_drafts_go_on_on_the_cpu_if_the_device_is_lost(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingDevice(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: failing)
    options = {**GREEDY, "max_tokens": 40}
    with llamac.load(files["trunk"], draft_model=files["plain"], device="auto") as model:
        expected = model.generate(TEXT[:20], **options)
        failing.lost_after = failing.launches + 150
        with model.session() as session:
            with pytest.warns(LlamacWarning, match="computing on the CPU from now on"):
                found = session.generate(TEXT[:20], **options)
            assert session.device == "cpu"
            assert found.tokens == expected.tokens
            assert session.generate([*TEXT[:20], *found.tokens], **GREEDY).usage.drafted_tokens > 0


def test_the_weights_of_an_assistant_are_freed_after_its_model_is_closed(files: dict[str, Path], device: str) -> None:
    """Not before sessions that use it are. Its bytes are no longer there for KV caches."""
    with llamac.load(files["trunk"], device=device) as model:
        assert model._device is not None
        before, room = model._device._weight_bytes, model._device.kv_room
        drafter = llamac.load(files["clustered"])
        for _ in range(2):
            with model.session(draft_model=drafter) as session:
                assert session.generate(TEXT[:9], **GREEDY).usage.drafted_tokens > 0
        with_drafter = model._device.kv_room
        assert model._device._weight_bytes - before == room - with_drafter > 0
        session = model.session(draft_model=drafter)
        expected = session.generate(TEXT[:9], **GREEDY)
        assert session._head is not None
        core = session._head.core()
        drafter.close()
        with llamac.load(files["plain"]) as other, model.session(draft_model=other):
            assert session.generate(TEXT[:9], **GREEDY).tokens == expected.tokens
            core.eval_rows(array("i", (1, 0, session.length(), 0)), inputs=np.zeros((1, DIM), np.float32).data)
        session.close()
        with llamac.load(files["plain"]) as other, model.session(draft_model=other):
            (part,) = model._device._drafters
            assert model._device.kv_room == room - part.weights.bytes


def test_an_assistant_for_which_the_device_has_no_room_is_refused_or_left_out(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Emulator(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: driver)
    with llamac.load(files["trunk"], device="cuda") as model, llamac.load(files["plain"]) as drafter:
        total = driver.memory()[1]
        with monkeypatch.context() as patch:
            patch.setattr(driver, "memory", lambda: (1000, total))
            with pytest.raises(OutOfMemoryError, match=r"the weights of the drafter need .* has 1\.0 kB of .* free"):
                model.session(draft_model=drafter)
            with pytest.warns(LlamacWarning, match="the assistant makes no drafts: the weights of the drafter need"):
                session = model.session(draft_model=drafter, device="auto")
            session.close()
            with patch.context() as closing:
                closing.setattr(model._memory, "apply", Mock(side_effect=ClosedError("the model is closed")))
                with pytest.raises(OutOfMemoryError, match="the weights of the drafter need"):  # the first error
                    model.session(draft_model=drafter)
            session = model.session(draft_model=drafter, device="auto")
        with session:
            assert session.device != "cpu"
            assert drafts(session) == 0


def test_an_assistant_that_a_device_cannot_have_drafts_where_it_can_be(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto": of a model that is loaded with it. On the CPU, and on the device once that has room."""
    driver = Emulator(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: driver)
    add, total = DeviceModel.add_drafter, driver.memory()[1]

    def without_room(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(driver, "memory", lambda: (1000, total))
            add(*arguments)

    why = "the assistant makes no drafts: the weights of the drafter need"
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceModel, "add_drafter", without_room)
            with pytest.warns(LlamacWarning, match=why):
                model = stack.enter_context(llamac.load(files["trunk"], draft_model=files["plain"], device="auto"))
            with model.session() as session:  # which does not warn again
                assert session.device != "cpu"
                assert drafts(session) == 0
                with session.to("cpu") as copy:
                    assert drafts(copy) > 0
            with model.session(device="cpu") as session:
                assert drafts(session) > 0
        with model.session() as session:
            assert session.device != "cpu"
            assert drafts(session) > 0


def test_an_assistant_takes_its_room_also_if_the_session_fails(files: dict[str, Path], device: str) -> None:
    """The budget of the KV cache is what the device then has."""
    with llamac.load(files["trunk"], device=device) as model:
        with model.session():
            whole = model.kv_budget
        assert whole is not None
        with llamac.load(files["plain"]) as drafter:
            with pytest.raises(ArgumentError, match="sequences is 0"):
                model.session(draft_model=drafter, sequences=0)
            assert model._device is not None
            assert model.kv_budget == model._device.kv_room < whole


def test_an_assistant_with_adapters_has_the_bits_of_the_cpu(files: dict[str, Path], device: str) -> None:
    """Of the products of hidden states and of clusters, and of a layer."""
    ranks = {"drafter.in.weight": 3, "drafter.out.weight": 2, "drafter.clusters.weight": 1, "layers.0.attn_q.weight": 2}
    with (
        llamac.Model(adapted(files["clustered"], ranks)) as drafter,
        llamac.load(files["trunk"], draft_model=drafter) as model,
    ):
        found = []
        for where in "cpu", device:
            with model.session(sequences=2, device=where) as session:
                states = [extend(session, 0, 70), extend(session, 1, 40)]
                found.append(drafted(session, [0, 1], np.concatenate(states)))
        assert_same(*found)


def test_an_adapter_of_clusters_is_refused_or_left_out(files: dict[str, Path], device: str) -> None:
    why = "the drafter has an adapter of its output matrix, whose rows are in clusters"
    with (
        llamac.Model(adapted(files["clustered"], {"output.weight": 1})) as drafter,
        llamac.load(files["trunk"], device=device) as model,
    ):
        with pytest.raises(UnsupportedError, match=why):
            model.session(draft_model=drafter)
        with pytest.warns(LlamacWarning, match=f"the assistant makes no drafts: {why}"):
            session = model.session(draft_model=drafter, device="auto")
        with session:
            assert session.device != "cpu"
            assert drafts(session) == 0
        with model.session(draft_model=drafter, device="cpu") as session:
            assert drafts(session) > 0


def test_an_upload_that_fails_leaves_nothing(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Emulator(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: driver)
    with llamac.load(files["trunk"], device="cuda") as model, llamac.load(files["plain"]) as drafter:
        assert model._device is not None
        before, room = driver.memory(), model._device.kv_room
        with monkeypatch.context() as patch:
            patch.setattr(driver, "upload", failing)
            with pytest.raises(DeviceError, match="the device fails"):
                model.session(draft_model=drafter)
        assert (driver.memory(), model._device.kv_room) == (before, room)
        with model.session(draft_model=drafter) as session:
            assert drafts(session) > 0


@pytest.mark.parametrize("first", [True, False], ids=["the passes", "the weights"])
def test_weights_that_cannot_be_freed_are_freed_later(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, *, first: bool
) -> None:
    """The first or the last thing that is freed of an assistant fails once."""
    driver = Emulator(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: driver)
    with llamac.load(files["trunk"], device="cuda") as model, llamac.load(files["plain"]) as other:
        assert model._device is not None
        room = model._device.kv_room
        with llamac.load(files["clustered"]) as drafter, model.session(draft_model=drafter) as session:
            assert drafts(session) > 0
        (part,) = model._device._drafters
        with monkeypatch.context() as patch:
            patch.setattr(PassGraph if first else part.weights, "close", failing)
            with pytest.raises(DeviceError, match="the device fails"):
                model.session(draft_model=other)
        assert model._device.kv_room == room - part.weights.bytes
        with model.session(draft_model=other) as session:
            assert drafts(session) > 0
        (part,) = model._device._drafters
        assert model._device.kv_room == room - part.weights.bytes
