"""MTP layers on an emulated device: the hidden states, logits and drafts of the CPU, with cuts, forks and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.adapters import F32, adapted
from gpu.failing_device import FailingDevice
from gpu.recording import recorded, state_copies
from mtp_models import attention_model, continue_cyclic, cyclic, latent_model, mtp_model

import llamac
from builders import some_ids, write_model
from llamac import _core
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.speculation.draft_model import DraftModel
from llamac.engine.speculation.mtp import MtpDrafter
from llamac.errors import ArgumentError, CancelledError, LlamacWarning, UnsupportedError
from llamac.gpu.device_model import layers_share
from prophet import draft_with_models, results

PROMPT = some_ids(70)
SHORT = PROMPT[:20]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "seed": 2, "ignore_eos": True}
FAILED = "computing on the CPU from now on"
DRAWN: dict[str, Any] = {**GREEDY, "temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1}
MODELS = {"recurrent": (mtp_model, "f32"), "attention": (attention_model, "q4"), "latent": (latent_model, "q8")}


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device (--device). The layer drafts from the first step on."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    draft_with_models(monkeypatch, 5)
    return str(request.config.getoption("device"))


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, dtype = MODELS[str(request.param)]
    return write_model(tmp_path_factory.mktemp("mtp") / "model.bin", make(), dtype)


def states_and_logits(session: llamac.Session, sizes: tuple[int, ...]) -> list[Any]:
    """The hidden states of PROMPT, and the MTP layer's hidden states and logits, in chunks of these sizes."""
    n, dim = len(PROMPT) - 1, session.model.config["dim"]
    hidden, own = np.empty((2, n, dim), np.float32)
    logits = np.empty((n, session.model.config["vocab_size"]), np.float32)
    assert session._head is not None
    head, at = session._head.core(), 0
    for size in sizes:
        part = slice(at, at + size)
        session._core.eval_rows(appended_rows(as_ids(PROMPT[part]), 0, at, "last"), hidden=hidden[part].data)
        at += size
    at = 0
    for size in sizes[::-1]:
        part = slice(at, at + size)
        rows = appended_rows(as_ids(PROMPT[at + 1 : at + size + 1]), 0, at, "all")
        head.eval_rows(rows, logits[part].reshape(-1).data, inputs=hidden[part].data, hidden=own[part].data)
        at += size
    return [hidden, own, logits]


def assert_same(model: llamac.Model, device: str) -> None:
    with model.session() as cpu, model.session(device=device) as session:
        expected, found = states_and_logits(cpu, (69,)), states_and_logits(session, (33, 1, 1, 1, 20, 5, 8))
        for one, other in zip(found, expected, strict=True):
            assert np.isfinite(other).all()
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
        last = np.empty((3, model.config["dim"]), np.float32)  # of the last rows alone
        session._core.eval_rows(appended_rows(as_ids(PROMPT[:9]), 0, 69, "last"), hidden=last.data)
        whole = np.empty((9, model.config["dim"]), np.float32)
        cpu._core.eval_rows(appended_rows(as_ids(PROMPT[:9]), 0, 69, "last"), hidden=whole.data)
        assert last.tobytes() == whole[-3:].tobytes()


def test_states_and_logits_have_the_bits_of_the_cpu(path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = state_copies(monkeypatch) if device == "emulator" else None
    with llamac.load(path) as model:
        assert_same(model, device)
        assert count is None or count(model) > 0  # asked for on the host


def test_adapters_and_replaced_tensors_of_the_layer_have_the_bits_of_the_cpu(tmp_path: Path, device: str) -> None:
    """They are not in the model's file."""
    path = write_model(tmp_path / "m.bin", attention_model())
    with llamac.load(path) as plain:
        layer = plain.config["n_layers"]
    file = adapted(path, {"mtp.in.weight": 3, f"layers.{layer}.attn_q.weight": 2})
    norm = np.random.default_rng(5).standard_normal(file.config["dim"]).astype(np.float32)
    file.core.replace("mtp.hidden_norm.weight", F32, norm.view(np.uint8).data)
    with llamac.Model(file) as model:
        assert_same(model, device)


def test_drafts_change_nothing_and_are_those_of_the_cpu(
    path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sessions, also for drawn tokens and with log probabilities, and of engines. States stay on the device."""
    count = state_copies(monkeypatch) if device == "emulator" else None
    calls: dict[str, list[list[int]]] = {}
    draft = MtpDrafter.draft

    def recording(self: MtpDrafter, *arguments: Any) -> list[int]:
        calls.setdefault(self._head.session.device[:3], []).append(found := draft(self, *arguments))
        return found

    monkeypatch.setattr(MtpDrafter, "draft", recording)
    with llamac.load(path, device=device) as model, model.session(device="cpu") as plain:
        with model.session() as drafting, model.session(device="cpu") as cpu:
            for options in (GREEDY, DRAWN):
                expected = plain.generate(SHORT, **options, speculation=False)
                for session in (drafting, cpu):
                    found = session.generate(SHORT, **options)
                    assert results(found) == results(expected)
                    assert found.usage.drafted_tokens > 0
            assert drafting.eval([3]).tobytes() == plain.eval([3]).tobytes()
        assert calls.pop(device[:3]) == calls.pop("cpu")
        alone = [plain.generate(SHORT[i:], **GREEDY, speculation=False).tokens for i in range(2)]
        with llamac.Engine(model, max_sequences=2) as engine:
            requests = [engine.submit(SHORT[i:], **GREEDY) for i in range(2)]
            assert [request.result(60).tokens for request in requests] == alone
            assert engine.stats().drafted_tokens > 0
        assert sum(map(len, calls[device[:3]])) > 0
        memory = model.memory()
        assert memory.device is not None
        assert memory.device.kv == 0
        assert count is None or count(model) == 0


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose MTP layer predicts every token."""
    return write_model(tmp_path_factory.mktemp("knowing") / "model.bin", cyclic(7))


def test_tokens_of_drafts_and_after_them_are_drawn_on_the_device(
    knowing: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With filters that it knows, as tokens without drafts: logits stay there."""
    if device != "emulator":
        pytest.skip("the copies of an emulated device are counted")
    copied, drafted = recorded(monkeypatch, MtpDrafter)
    rates = []
    drawn = {"temperature": 0.8, "top_k": 40}
    other = write_model(tmp_path / "m.bin", attention_model())
    for path, how in (knowing, {}), (other, drawn):
        with llamac.load(path, device=device) as model, llamac.load(path) as cpu:
            row = 4 * model.config["vocab_size"]
            options = {**GREEDY, "max_tokens": 14, **how}
            drafted.clear()
            expected = cpu.generate(SHORT, **options)
            of_cpu = drafted[:]
            drafted.clear()
            copied.clear()
            found = model.generate(SHORT, **options)
            assert results(found) == results(expected)
            assert drafted == of_cpu
            rates.append(found.usage.accepted_tokens / found.usage.drafted_tokens)
            with llamac.Engine(model) as engine:
                request = engine.submit(SHORT, **options).result(60)
            assert request.tokens == expected.tokens
            assert request.usage.drafted_tokens > 0
            assert len(copied) > 20
            assert [size for size in copied if size % row == 0] == [row]  # of the first stream's prompt
            with model.session() as session:  # which stays open, with the logits of its last token
                session.generate(SHORT, **options)
            assert any(size % row == 0 for size in copied)
    assert rates[1] < rates[0] == 1


@pytest.mark.parametrize("drafting", ["knowing", "recurrent"])
def test_the_drafts_of_a_draft_model_are_drawn_on_the_device(
    knowing: Path, drafting: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent draft model makes them in a fork of the text."""
    if device != "emulator":
        pytest.skip("the copies of an emulated device are counted")
    copied, drafted = recorded(monkeypatch, DraftModel)
    path = draft_path = knowing
    options = {**GREEDY, "max_tokens": 12}
    if drafting == "recurrent":
        path = write_model(tmp_path / "m.bin", attention_model())
        draft_path = write_model(tmp_path / "draft.bin", mtp_model())
        options |= {"temperature": 0.8, "top_k": 40}
    with (
        llamac.load(path, draft_model=draft_path, device=device) as model,
        llamac.load(path, draft_model=draft_path) as cpu,
    ):
        row = 4 * model.config["vocab_size"]
        expected = cpu.generate(SHORT, **options)
        of_cpu = drafted[:]
        drafted.clear()
        copied.clear()
        found = model.generate(SHORT, **options)
        assert results(found) == results(expected)
        assert drafted == of_cpu
        assert sum(map(len, drafted)) > 3
        assert [size for size in copied if size % row == 0] == [row]  # of the stream's prompt


def test_cuts_forks_and_cancelled_drafts(knowing: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with llamac.load(knowing, device=device) as model, model.session() as session:
        text = continue_cyclic(session, PROMPT)
        text = continue_cyclic(session, text)
        text = continue_cyclic(session, [*text[:80], 9, 9])
        session.truncate(10)
        continue_cyclic(session, text)
        with session.fork(length=60) as fork:
            continue_cyclic(fork, text[:75])
        with session.to("cpu") as moved:
            continue_cyclic(moved, [*text, 8, 8])
        draft = MtpDrafter.draft

        def cancelled(self: MtpDrafter, *arguments: Any) -> list[int]:
            draft(self, *arguments)
            session.cancel()
            raise CancelledError("cancelled", 0)

        with monkeypatch.context() as patch:
            patch.setattr(MtpDrafter, "draft", cancelled)
            assert session.generate([*text, 3], **GREEDY).finish_reason == "cancelled"
        continue_cyclic(session, [*text, 3])


def test_a_cancelled_pass_of_the_layer_leaves_its_rows_out(path: Path, device: str) -> None:
    with llamac.load(path, device=device) as model, model.session() as session:
        session.eval(PROMPT)
        assert session._head is not None
        core, dim = session._head.core(), model.config["dim"]
        states = np.zeros((4, dim), np.float32)
        rows = appended_rows(as_ids(PROMPT[:4]), 0, 0, "last")
        scope = _core.CancelScope(session._core)
        scope.cancel()
        with pytest.raises(CancelledError):
            scope.run(lambda: core.eval_rows(rows, inputs=states.data))
        assert core.length() == 0
        core.eval_rows(rows, inputs=states.data)
        assert core.length() == 4


@pytest.mark.parametrize("is_engine", [False, True])
def test_drafts_go_on_on_the_cpu_if_the_device_is_lost(
    knowing: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, is_engine: bool
) -> None:
    failing = FailingDevice(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: failing)
    options = {**GREEDY, "max_tokens": 61}
    with llamac.load(knowing, device="auto") as model:
        expected = model.generate(PROMPT, **options)
        assert expected.usage.accepted_tokens == 50
        failing.lost_after = failing.launches + 150
        if is_engine:
            with llamac.Engine(model) as engine:
                request = engine.submit(PROMPT, **options)
                with pytest.warns(LlamacWarning, match=FAILED):
                    found = request.result(60)
        else:
            with model.session() as session:
                with pytest.warns(LlamacWarning, match=FAILED):
                    found = session.generate(PROMPT, **options)
                assert session.device == "cpu"
                continue_cyclic(session, [*PROMPT, *found.tokens])
        assert found.tokens == expected.tokens
        assert found.usage.accepted_tokens > 20


def test_pages_of_the_layer_have_a_budget_of_their_own(
    knowing: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions are not promised that memory. A layer that finds none does not draft, and generation goes on."""
    assert [layers_share(1000, least_kv, 9, 1) for least_kv in (0, 950, 1000)] == [100, 50, 1]
    with llamac.load(knowing, device=device) as model, model.session() as session:
        expected = session.generate(PROMPT, **GREEDY)
        assert session._head is not None
        assert model._device is not None
        positions, page = session._head.core().page_size()
        rooms = model._device.kv_room, model._device.mtp_kv_room
        assert rooms[1] == sum(rooms) // (model.config["n_layers"] + 1) > page
    needed = page * -(-len(PROMPT) // positions)
    for room, n_drafting in (1, 0), (2 * needed - 1, 1):
        monkeypatch.setattr("llamac.gpu.device_model.layers_share", lambda *_, room=room: room)
        with llamac.load(knowing, device=device) as model, model.session() as one, model.session() as two:
            found = [each.generate(PROMPT, **GREEDY) for each in (one, two)]
            assert [each.tokens for each in found] == [expected.tokens] * 2
            assert sum(each.usage.drafted_tokens > 0 for each in found) == n_drafting


def test_inputs_of_other_rows_are_refused(knowing: Path, device: str) -> None:
    with llamac.load(knowing, device=device) as model, model.session() as session:
        inputs = np.zeros((1, model.config["dim"]), np.float32)
        with pytest.raises(UnsupportedError, match="the session is on a device, and only the CPU reads inputs"):
            session.observe([3], ["block"], inputs=inputs)
        rows = appended_rows(as_ids(PROMPT[:1]), 0, 0, "last")
        assert session._head is not None
        with pytest.raises(ArgumentError, match="must both be on the device, or neither"):
            session._head.core().eval_rows(rows, inputs=inputs.data, hidden=(1 << 20, 1))
        why = "the session is on the CPU, and its hidden states are not"
        with model.session(device="cpu") as cpu, pytest.raises(ArgumentError, match=why):
            cpu._core.eval_rows(rows, hidden=(1 << 20, 1))
