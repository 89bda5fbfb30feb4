"""EAGLE-3 heads on an emulated device: states, logits and drafts of the CPU, with losses, and the memory they take."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_models import CONFIG, DEEP, OTHER, QWEN3, WINDOWED, head_tensors, write_head
from gpu.adapters import adapted
from gpu.failing_device import FailingDevice
from gpu.recording import recorded, state_copies

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from golden.tiny_checkpoints import Config, changed
from llamac import _core
from llamac.arguments import KVDtype
from llamac.engine.memory import plan_memory
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.speculation.mtp import MtpDrafter
from llamac.errors import LlamacWarning, OutOfMemoryError
from llamac.export.convert import export
from llamac.format.flatfile import FlatFile
from llamac.gpu.device_model import DeviceModel
from llamac.gpu.emulator.emulator import Emulator
from prophet import results

F32 = dict(_core.dtypes())["f32"]
STATES, PROMPT = 3 * 48, some_ids(70)
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "seed": 2, "ignore_eos": True}
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 0.8, "top_k": 20, "seed": 5}
KINDS: dict[str, tuple[Config, str]] = {
    "plain": (CONFIG, "f32"),
    "own embedding": (changed(OTHER, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}), "q8"),
    "windowed": (WINDOWED, "q4"),
    "deep": (DEEP, "f32"),
    "qwen3": (changed(QWEN3, num_hidden_layers=2), "bf16"),
    "each normed": (changed(QWEN3, norm_before_fc=False, fc_norm=True), "f32"),
}
Results = list[np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def device(drafting_device: str) -> str:
    return drafting_device


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's file ("trunk") and those of its heads."""
    folder = tmp_path_factory.mktemp("heads")
    found = {"trunk": write_model(folder / "trunk.bin", checkpoint(llama_config(n_layers=4)), "q8")}
    for name, (config, dtype) in KINDS.items():
        tensors = head_tensors(config, embedding=config["hidden_size"] != 48)
        found[name] = folder / f"{name}.bin"
        export(write_head(folder / name, config, tensors), found[name], dtype=dtype)
    return found


def pieces(session: llamac.Session, sizes: Sequence[int]) -> Results:
    """The states of PROMPT and the head's own states and logits, in chunks of these sizes; then two drafts in a row."""
    assert session._head is not None
    head, n = session._head.core(), sum(sizes)
    own_dim = session._head.file.config["dim"]  # type: ignore[union-attr]
    states, own = np.empty((n, STATES), np.float32), np.empty((n + 2, own_dim), np.float32)
    logits, at = np.empty((n + 2, head.vocab_size), np.float32), 0
    for size in sizes:
        part = slice(at, at + size)
        session._core.eval_rows(appended_rows(as_ids(PROMPT[part]), 0, at, "last"), hidden=states[part].data)
        at += size
    at = 0
    for size in sizes[::-1]:
        part = slice(at, at + size)
        rows = appended_rows(as_ids(PROMPT[at + 1 : at + size + 1]), 0, at, "all")
        head.eval_rows(rows, logits[part].reshape(-1).data, states=states[part].data, hidden=own[part].data)
        at += size
    for at in n, n + 1:
        row = appended_rows(as_ids([int(logits[at - 1].argmax())]), 0, at, "last")
        inputs = own[at - 1 : at].copy()
        head.eval_rows(row, logits[at].data, inputs=inputs.data, hidden=own[at : at + 1].data)
    return [states, own, logits]


def batch(session: llamac.Session) -> Results:
    """The states of two texts in one pass, then those of the last rows alone."""
    rows = array("i")
    for position, token in enumerate(PROMPT[:9]):
        rows.extend((token, 1, position, 0, token + 1, 2, position, 1))
    states, last = np.empty((18, STATES), np.float32), np.empty((5, STATES), np.float32)
    logits = np.empty(9 * session._core.vocab_size, np.float32)
    session._core.eval_rows(rows, logits.data, hidden=states.data)
    session._core.eval_rows(appended_rows(as_ids(PROMPT[:8]), 1, 9, "last"), hidden=last.data)
    return [states, last, logits]


def assert_same(found: Results, expected: Results) -> None:
    for one, other in zip(found, expected, strict=True):
        assert not np.isnan(other).any()
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_logits_have_the_bits_of_the_cpu(files: dict[str, Path], kind: str, device: str) -> None:
    kv_dtypes: dict[str, KVDtype] = {"plain": "q8", "deep": "f16"}
    with (
        llamac.load(files["trunk"], draft_model=files[kind], kv_dtype=kv_dtypes.get(kind, "f32")) as model,
        model.session(sequences=3, device="cpu") as cpu,
        model.session(sequences=3, device=device) as session,
    ):
        assert_same(pieces(session, (33, 1, 1, 1, 20, 5, 8)), pieces(cpu, (69,)))
        assert_same(batch(session), batch(cpu))


def test_drafts_change_nothing_and_are_those_of_the_cpu(
    files: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sessions and engines. They are drawn on the device where tokens are. Logits and states stay there."""
    if device != "emulator":
        pytest.skip("the copies of an emulated device are counted")
    copied, drafted = recorded(monkeypatch, MtpDrafter)
    count = state_copies(monkeypatch)
    with (
        llamac.load(files["trunk"], draft_model=files["deep"], device=device) as model,
        model.session(device="cpu") as cpu,
    ):
        row = 4 * model.config["vocab_size"]
        for options in GREEDY, DRAWN, {**DRAWN, "logprobs": 1}:
            drafted.clear()
            expected = cpu.generate(PROMPT[:20], **options)
            of_cpu = drafted[:]
            drafted.clear()
            copied.clear()
            found = model.generate(PROMPT[:20], **options)
            assert results(found) == results(expected)
            assert drafted == of_cpu
            assert found.usage.drafted_tokens > 0
            if "logprobs" not in options:
                assert [size for size in copied if size % row == 0] == [row]  # of the prompt
        alone = [cpu.generate(PROMPT[i : i + 20], **GREEDY, speculation=False).tokens for i in range(2)]
        with llamac.Engine(model, max_sequences=2) as engine:
            requests = [engine.submit(PROMPT[i : i + 20], **GREEDY) for i in range(2)]
            assert [request.result(60).tokens for request in requests] == alone
            assert engine.stats().drafted_tokens > 0
        with model.session() as session:
            text = [*PROMPT[:20], *session.generate(PROMPT[:20], **GREEDY).tokens]
            for length in 25, 12:  # cuts
                again = session.generate(text[:length], **GREEDY)
                assert again.tokens == cpu.generate(text[:length], **GREEDY).tokens
                assert again.usage.drafted_tokens > 0
            for other in session.fork(length=8), session.to("cpu"):
                with other:
                    again = other.generate([*text[:8], 3, 4], **GREEDY)
                    assert again.tokens == cpu.generate([*text[:8], 3, 4], **GREEDY).tokens
                    assert again.usage.drafted_tokens > 0
        memory = model.memory()
        assert memory.device is not None
        assert memory.device.kv == 0
        assert count(model) == 0


@pytest.mark.parametrize("is_engine", [False, True])
def test_drafts_go_on_on_the_cpu_if_the_device_is_lost(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, *, is_engine: bool
) -> None:
    failing = FailingDevice(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: failing)
    options, lost = {**GREEDY, "max_tokens": 40}, "computing on the CPU from now on"
    with llamac.load(files["trunk"], draft_model=files["plain"], device="auto") as model:
        expected = model.generate(PROMPT[:20], **options)
        failing.lost_after = failing.launches + 150
        if is_engine:
            with llamac.Engine(model) as engine:
                request = engine.submit(PROMPT[:20], **options)
                with pytest.warns(LlamacWarning, match=lost):
                    assert request.result(60).tokens == expected.tokens
                text = [*PROMPT[:20], *expected.tokens]
                assert engine.submit(text, **GREEDY).result(60).usage.drafted_tokens > 0
            return
        with model.session() as session:
            with pytest.warns(LlamacWarning, match=lost):
                found = session.generate(PROMPT[:20], **options)
            assert session.device == "cpu"
            assert found.tokens == expected.tokens
            assert session.generate([*PROMPT[:20], *found.tokens], **GREEDY).usage.drafted_tokens > 0


def drafts(session: llamac.Session) -> int:
    """The number of tokens that are drafted for a text."""
    return session.generate(PROMPT[:9], **GREEDY).usage.drafted_tokens


def test_a_head_takes_memory_of_the_device_until_it_is_closed(files: dict[str, Path], device: str) -> None:
    """Its weights and its share of the room for pages, in which its own pages are."""
    with llamac.load(files["trunk"], device=device) as model:
        assert model._device is not None
        before, room = model._device._weight_bytes, model._device.kv_room
        with llamac.load(files["deep"]) as head, model.session(draft_model=head) as session:
            assert drafts(session) > 0
            (drafter,) = model._device._drafters
            weights = model._device._weight_bytes - before
            assert weights == drafter.weights.bytes > 0
            # the head has 3 layers, the model has 4
            assert drafter.kv_room == (room - weights) * 3 // 7
            assert model._device.kv_room == room - weights - drafter.kv_room
            pages = session._core.describe()[5] + session._head.core().describe()[5]  # type: ignore[union-attr]
            assert model._core.device_kv_bytes() < pages <= model._device.kv_bytes
            assert model.memory().kv == head.memory().kv == 0  # in memory
            with model.session(draft_model=head) as second:
                assert drafts(second) > 0
            assert len(model._device._drafters) == 1
        with llamac.load(files["plain"]) as other, model.session(draft_model=other) as session:
            assert drafts(session) > 0
            (drafter,) = model._device._drafters
            assert model._device.kv_room == room - drafter.weights.bytes - drafter.kv_room


def test_the_room_of_a_closed_head_is_taken_from_the_pages_of_heads(
    files: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the next session has a head that is on the device already. The passes for the last head go with it."""
    with llamac.load(files["trunk"], device=device) as model, llamac.load(files["plain"]) as other:
        found = model._device
        assert found is not None
        room, budgets = found.kv_room, []
        monkeypatch.setattr(
            DeviceModel,
            "_share_room",
            lambda device, _: budgets.append(sum(each.kv_room for each in device._drafters)),
        )
        with llamac.load(files["deep"]) as head, model.session(draft_model=head) as session:
            assert drafts(session) > 0
            with model.session(draft_model=other) as second:
                assert drafts(second) > 0
            both = budgets[-1]
        with model.session(draft_model=other):
            (drafter,) = found._drafters
            assert budgets[-1] == drafter.kv_room < both
        n_graphs = len(found._graphs)
        other.close()
        with llamac.load(files["deep"]) as head, model.session(draft_model=head):
            (drafter,) = found._drafters
            assert found.kv_room == room - drafter.bytes
            assert len(found._graphs) < n_graphs - 1


def test_a_head_without_room_for_pages_makes_no_drafts(
    files: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamac.gpu.device_model.layers_share", lambda *_: 1)
    with (
        llamac.load(files["trunk"], draft_model=files["plain"], device=device) as model,
        model.session() as session,
        model.session(device="cpu") as cpu,
    ):
        found = session.generate(PROMPT[:9], **GREEDY)
        assert found.usage.drafted_tokens == 0
        assert found.tokens == cpu.generate(PROMPT[:9], **GREEDY).tokens


def test_a_head_that_a_device_has_no_room_for_is_refused_or_left_out_with_one_warning(
    files: dict[str, Path], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of memory does not count it while sessions on the device do without it."""
    driver = Emulator(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: driver)
    why = "the EAGLE-3 head makes no drafts: the weights of the drafter need"
    with llamac.load(files["trunk"], device="auto") as model, llamac.load(files["plain"]) as head:
        model._session_defaults = model._session_defaults._replace(draft_model=head)
        total, planned = driver.memory()[1], plan_memory(model, None, 64)
        assert planned.draft > head.file.header["file_bytes"]
        with monkeypatch.context() as patch:
            patch.setattr(driver, "memory", lambda: (1000, total))
            with pytest.raises(OutOfMemoryError, match=r"the weights of the drafter need .* has 1\.0 kB of .* free"):
                model.session(device="cuda")
            with pytest.warns(LlamacWarning, match=why) as given:
                sessions = [model.session() for _ in range(3)]
            assert len(given) == 1
        for session in sessions:
            with session:
                assert session.device != "cpu"
                assert drafts(session) == 0
        assert plan_memory(model, None, 64).draft == 0
        with model.session(device="cpu") as session:
            assert drafts(session) > 0
        with model.session() as session:  # has room again
            assert drafts(session) > 0
        assert plan_memory(model, None, 64).draft == planned.draft


def test_a_head_with_adapters_has_the_bits_of_the_cpu(files: dict[str, Path], device: str) -> None:
    """Of its inputs, its layer and its output matrix."""
    file = adapted(files["plain"], {"drafter.in.weight": 3, "layers.0.attn_q.weight": 2, "output.weight": 2})
    with (
        llamac.Model(file) as head,
        llamac.load(files["trunk"], draft_model=head) as model,
        model.session(sequences=3, device="cpu") as cpu,
        model.session(sequences=3, device=device) as session,
    ):
        assert_same(pieces(session, (33, 1, 20, 15)), pieces(cpu, (69,)))


def test_plans_are_of_one_model(files: dict[str, Path]) -> None:
    trunk, head = FlatFile(files["trunk"]).core, FlatFile(files["plain"]).core
    with pytest.raises(llamac.ArgumentError, match="more than one of mtp, trunk and state_layers is given"):
        _core.plan(head, trunk=trunk, state_layers=(0, 1, 2))
    with pytest.raises(llamac.ArgumentError, match="after_draft is True, but there is no trunk"):
        _core.plan(trunk, after_draft=True)
    with pytest.raises(llamac.ArgumentError, match=r"state_layers\[1\] is 5, expected 0 to 4"):
        _core.plan(trunk, state_layers=(0, 5, 2))
