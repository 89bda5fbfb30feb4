"""What sessions do when their device runs out of memory, fails or is closed, or when garbage is collected meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu.failing_device import FailingDevice, nothing
from graph_cases import CASES
from held_engines import held

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from llamac import _core
from llamac.errors import ClosedError, DeviceError, LlamacWarning, OutOfMemoryError
from llamac.gpu.buffers import Buffers
from llamac.gpu.emulator.emulator import Emulator

IDS = some_ids(70)


@pytest.fixture
def device(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> FailingDevice:
    """The device that models open as "emulator"."""
    device = FailingDevice(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: device)
    return device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model."""
    return write_model(tmp_path / "m.bin", checkpoint(llama_config()))


@pytest.fixture
def model(device: FailingDevice, path: Path) -> Iterator[llamac.Model]:
    """The model on the device."""
    with llamac.load(path, device="emulator") as model:
        yield model


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The exceptions that nobody could handle: those while an object was freed."""
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: found.append(hook.exc_value))
    return found


def replayed(session: llamac.Session) -> Floats:
    """The logits of one token, which is computed until a captured graph has been replayed."""
    for _ in range(3):
        session.truncate(0)
        found = session.eval(IDS[:1])
    return found


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_pass_without_memory_leaves_sessions_usable(model: llamac.Model, device: FailingDevice, failing: int) -> None:
    """If any of its allocations fails, passes of other shapes compute what they did before.

    Those are of page tables, of buffers, of tiles, and of partial results.
    """
    others = [(IDS[0], sequence, 0, False) for sequence in range(1, 51)]
    small, large = [(7, 0, 300, True)], [(8, 0, 300, True), *((2, sequence, 1, True) for _, sequence, *_ in others)]

    def run(session: llamac.Session, rows: list[tuple[int, int, int, bool]]) -> Floats:
        for _, sequence, position, _ in rows:
            session.truncate(position, sequence=sequence)
        return session.eval_rows(rows)

    found = []
    for name in ("cpu", "emulator"):
        with model.session(device=name, sequences=51) as session:
            for first in range(0, 300, 60):  # in passes that need less memory than the large one
                session.eval(some_ids(300)[first : first + 60], logits=None)
            session.eval_rows(others)
            for _ in range(3):  # the last one replays a captured graph
                before = run(session, small)
            if name != "cpu":
                device.failing = failing
                with pytest.raises(OutOfMemoryError):
                    run(session, large)
                device.failing = 0
            found.append(np.concatenate([before, *(run(session, rows) for rows in (small, small, small, large))]))
    np.testing.assert_array_equal(found[1], found[0])


def test_a_first_pass_without_memory_leaves_nothing(tmp_path: Path, device: FailingDevice) -> None:
    """Not even some of the tables of experts, which are the first allocations after a slab of pages."""
    path = write_model(tmp_path / "m.bin", checkpoint(CASES["shared experts"]))
    with llamac.load(path, device="emulator") as model, model.session(context=64) as session:
        before = len(device._sizes)
        device.failing = 4
        with pytest.raises(OutOfMemoryError):
            session.eval([1])
        assert len(device._sizes) == before


def test_closing_twice_is_allowed(model: llamac.Model, device: FailingDevice) -> None:
    replayed(model.session())
    model.close()
    model.close()
    assert device.closed
    with pytest.raises(ClosedError):
        model.session()


def test_a_lost_device_is_an_error_and_everything_can_be_closed(
    model: llamac.Model, device: FailingDevice, unraisable: list[object]
) -> None:
    session, other = model.session(), model.session()
    replayed(session)
    replayed(other)
    device.lost = True
    for _ in range(2):
        with pytest.raises(DeviceError, match="the device is lost"):
            session.eval(IDS)
    with pytest.raises(DeviceError, match=r"emulator has failed .* Session\.to\('cpu'\) for sessions that are open"):
        model.session()
    assert session.tokens() == IDS[:1]
    assert model.memory().device is None
    with session.to("cpu") as moved, model.session(device="cpu") as new:
        assert moved.tokens() == IDS[:1]
        np.testing.assert_array_equal(moved.eval(IDS[1:9]), new.eval(IDS[:9]))
    session.close()
    model.close()
    assert (device.closed, unraisable) == (True, [])


def test_a_sequence_that_a_shift_has_lost_is_computed_again(model: llamac.Model, device: FailingDevice) -> None:
    with model.session(device="cpu") as expected, model.session() as session:
        session.eval(IDS[:40])
        device.lost_at_upload = True
        with pytest.raises(DeviceError, match="the device is lost"):
            session.shift(10, 20)
        assert session.tokens() == []
        with session.to("cpu") as moved:
            assert moved.tokens() == IDS[:40]
            expected.eval(IDS[:40])
            np.testing.assert_array_equal(moved.eval(IDS[40:42]), expected.eval(IDS[40:42]))


def test_an_engine_reports_a_lost_device(model: llamac.Model, device: FailingDevice) -> None:
    with llamac.Engine(model) as engine:
        with held(engine, after=2) as is_held:
            request = engine.submit(IDS[:5], max_tokens=400, ignore_eos=True)
            assert is_held.wait(60)
            device.lost = True
        with pytest.raises(DeviceError, match="the engine has stopped: the device is lost") as caught:
            request.result(timeout=60)
        assert caught.value.lost
        with pytest.raises(DeviceError, match="the engine has stopped"):
            engine.submit(IDS[:5])


def test_an_engine_shares_too_little_memory_of_a_device(
    model: llamac.Model, device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has memory for one prompt at a time: the other requests pause, and get the tokens that they would."""
    reserve = Buffers.reserve

    def limited(self: Buffers, rows: int, wanted: int, hidden: int) -> bool:
        if rows > 64:
            raise OutOfMemoryError("no memory is left")
        return reserve(self, rows, wanted, hidden)

    monkeypatch.setattr(Buffers, "reserve", limited)
    prompts = [IDS[i : i + 50] for i in range(3)]
    expected = [model.generate(ids, max_tokens=4, seed=3, ignore_eos=True).tokens for ids in prompts]
    with llamac.Engine(model, max_sequences=3) as engine:
        requests = [engine.submit(ids, max_tokens=4, seed=3, ignore_eos=True) for ids in prompts]
        assert [request.result(timeout=20).tokens for request in requests] == expected
        assert engine.stats().preemptions > 0


def test_garbage_sessions_free_their_pages_after_the_pass(
    model: llamac.Model, device: FailingDevice, unraisable: list[object]
) -> None:
    """A graph is being captured when the garbage collector runs."""
    garbage = []
    with model.session() as session:
        expected = replayed(session)
        for ids in (IDS[:2], IDS[:2], IDS[:3]):
            garbage.append(model.session())
            garbage[-1].eval(IDS)
            device.before_launch = garbage.clear
            session.truncate(0)
            session.eval(ids)
        device.before_launch = nothing
        np.testing.assert_array_equal(replayed(session), expected)
    memory = model.memory().device
    assert memory is not None
    assert (memory.kv, unraisable) == (0, [])


def test_pages_that_outlive_their_model(model: llamac.Model, device: FailingDevice, unraisable: list[object]) -> None:
    session = model.session()
    session.eval(IDS)
    found, _ = _core.snapshot(session._core)
    model.close()
    del session, found
    gc.collect()
    assert (device.closed, unraisable) == (True, [])


def test_a_model_that_nobody_closes_frees_its_device(path: Path, device: FailingDevice) -> None:
    model = llamac.load(path, device="emulator")
    replayed(model.session())
    del model
    gc.collect()
    assert device.closed


def test_memory_does_not_grow_with_the_number_of_shapes(
    model: llamac.Model, device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamac.gpu.graph.MAX_SHAPES", 3)
    with model.session() as session:
        session.eval(IDS[:16])
        found = []
        for n in range(1, 17):
            session.truncate(0)
            session.eval(IDS[:n])
            found.append(len(device._sizes))
    assert max(found) - min(found) < 3


def test_auto_computes_on_the_cpu_if_a_model_does_not_fit(
    path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llamac.gpu.device_model.open_driver", lambda name, progress: Emulator(kernel_cache, memory=100_000)
    )
    with (
        pytest.warns(LlamacWarning, match="computing on the CPU: the weights need"),
        llamac.load(path, device="auto") as model,
        model.session() as session,
    ):
        assert session.device == "cpu"
