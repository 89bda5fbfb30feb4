"""What models, sessions, engines and servers do when their device is lost: an error, or the CPU with the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.failing_device import FailingDevice

import llamac
from builders import Floats, bert_config, checkpoint, encoder, llama_config, some_ids, write_model
from llamac.cli.profile import RunProfile
from llamac.engine.cache import moving
from llamac.engine.cache.moving import compute_again
from llamac.engine.hardware.counters import Counters
from llamac.errors import DeviceError, LlamacWarning

IDS = some_ids(150)
FAILED = r"emulator has failed; computing on the CPU from now on\. KV caches of .* are lost"


@pytest.fixture
def device(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> FailingDevice:
    """The device that models open, whatever its name."""
    device = FailingDevice(kernel_cache)
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: device)
    return device


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return write_model(tmp_path_factory.mktemp("model") / "m.bin", checkpoint(llama_config()))


@pytest.fixture
def auto(device: FailingDevice, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[llamac.Model]:
    """The model, loaded for "auto", on the device."""
    with llamac.load(path, device="auto") as model:
        model._device.name = "emulator"  # type: ignore[union-attr]
        yield model


@pytest.fixture(scope="module")
def expected(path: Path) -> Floats:
    """The logits of IDS on the CPU."""
    with llamac.load(path) as model:
        return model.logits(IDS)


def same(found: Floats, expected: Floats) -> bool:
    return bool((found.view(np.uint32) == expected.view(np.uint32)).all())


# ---- sessions


def test_sessions_for_auto_go_on_on_the_cpu(auto: llamac.Model, device: FailingDevice, expected: Floats) -> None:
    """With the tokens that they held, also after an eval that had computed some chunks before the loss."""
    with auto.session(sequences=2) as session, auto.session() as other, auto.session() as third:
        session.eval(IDS[:20])
        session.copy_sequence(0, 1, length=10)
        other.prefill(IDS[:9])
        third.eval(IDS[:40])
        drawn = other.sample(seed=1)
        device.lost_after = device.launches + 5
        with pytest.warns(LlamacWarning, match=FAILED) as warnings:
            found = session.eval(IDS[20:], logits="all")
        assert len(warnings) == 1
        assert (session.device, other.device) == ("cpu", auto._device.name)  # type: ignore[union-attr]
        assert device.closed
        assert same(found, expected[20:])
        assert same(session.eval(IDS[10:12], sequence=1, logits="all"), expected[10:12])
        assert other.sample(seed=1) == drawn  # its logits were on the host
        other.step(IDS[9])  # without another warning
        assert same(other.eval(IDS[10:11]), expected[10])
        with third.fork(length=30) as fork:
            assert same(fork.eval(IDS[30:32], logits="all"), expected[30:32])
        assert same(third.eval_drafts(IDS[40:42], [-1, 0]), expected[40:42])
        with auto.session() as later, auto.session(device="cpu") as cpu:
            assert (later.device, cpu.device) == ("cpu", "cpu")
        memory = auto.memory()
        assert memory.device is None


def test_a_long_eval_starts_again(auto: llamac.Model, device: FailingDevice) -> None:
    """Its first chunk, of 256 rows because all want logits, has been appended when the device is lost."""
    ids = some_ids(300)
    with auto.session(device="cpu") as cpu, auto.session() as session:
        session.eval(ids[:256], logits="all")
        session.truncate(0)
        device.lost_after = 2 * device.launches
        with pytest.warns(LlamacWarning, match=FAILED):
            assert same(session.eval(ids, logits="all"), cpu.eval(ids, logits="all"))
        assert session.tokens() == ids


def test_generation_gives_the_same_text(auto: llamac.Model, device: FailingDevice) -> None:
    with auto.session(device="cpu") as cpu:
        expected = cpu.generate(IDS[:9], max_tokens=12, seed=1, ignore_eos=True).tokens
    with auto.session() as session:
        stream = session.stream(IDS[:9], max_tokens=12, seed=1, ignore_eos=True)
        next(stream)
        device.lost = True
        with pytest.warns(LlamacWarning, match=FAILED):
            for _ in stream:
                pass
    assert stream.completion.tokens == expected
    assert auto.generate(IDS[:9], max_tokens=12, seed=1, ignore_eos=True).tokens == expected


def test_a_profile_ends_with_the_device(auto: llamac.Model, device: FailingDevice) -> None:
    with auto.session() as session, contextlib.closing(Counters()) as counters:
        stream = session.stream(IDS[:9], max_tokens=4, ignore_eos=True)
        profile = RunProfile(stream, counters)
        next(stream)
        device.lost = True
        with pytest.warns(LlamacWarning, match=FAILED):
            list(stream)
        assert profile.table(stream.completion) == (
            "profile: emulator failed during the run; the rest, on the CPU, has not been measured\n"
        )


def test_shifted_positions_cannot_be_computed_again(
    auto: llamac.Model, device: FailingDevice, expected: Floats
) -> None:
    with auto.session() as session:
        session.eval(IDS[:40])
        session.shift(10, 20)
        device.lost = True
        with pytest.warns(LlamacWarning), pytest.raises(DeviceError, match=r"\(sequence 0 to 10 positions\); eval the"):
            session.step(IDS[0])
        assert (session.device, session.tokens()) == ("cpu", IDS[:10])
        assert same(session.eval(IDS[10:12], logits="all"), expected[10:12])


def test_a_shift_that_the_device_ends_is_done_on_the_cpu(auto: llamac.Model, device: FailingDevice) -> None:
    """It fails when all pages have been read, and the first one is written back."""
    with auto.session() as session, auto.session(device="cpu") as other:
        for one in (session, other):
            one.eval(IDS[:40])
        device.lost_at_upload = True
        with pytest.warns(LlamacWarning, match=FAILED):
            session.shift(10, 20)
        other.shift(10, 20)
        assert (session.device, session.tokens()) == ("cpu", [*IDS[:10], *IDS[20:40]])
        assert same(session.eval([IDS[40]]), other.eval([IDS[40]]))


def test_a_second_shift_that_the_device_ends_keeps_what_precedes_the_first(
    auto: llamac.Model, device: FailingDevice, expected: Floats
) -> None:
    with auto.session() as session:
        session.eval(IDS[:40])
        session.shift(10, 20)
        device.lost_at_upload = True
        with pytest.warns(LlamacWarning), pytest.raises(DeviceError, match=r"\(sequence 0 to 10 positions\); eval the"):
            session.shift(2, 4)
        assert (session.device, session.tokens()) == ("cpu", IDS[:10])
        assert same(session.eval(IDS[10:12], logits="all"), expected[10:12])


def test_session_files_of_a_lost_device(
    auto: llamac.Model, device: FailingDevice, expected: Floats, tmp_path: Path
) -> None:
    with auto.session() as session, auto.session() as other:
        session.eval(IDS[:40])
        device.lost = True
        with pytest.warns(LlamacWarning, match=FAILED):
            session.save(tmp_path / "session")
        other.load(tmp_path / "session")
        assert same(other.eval(IDS[40:42], logits="all"), expected[40:42])


def test_a_cancelled_recovery_leaves_the_session_as_it_was(
    auto: llamac.Model, device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with auto.session() as session:
        session.eval(IDS[:100])
        stream = session.stream(IDS[:101], max_tokens=4, ignore_eos=True)
        device.lost = True

        def cancelled(*arguments: Any) -> dict[int, int]:
            stream.cancel()
            return compute_again(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(moving, "compute_again", cancelled)
            with pytest.warns(LlamacWarning, match=FAILED):
                assert list(stream) == []
        assert stream.completion.finish_reason == "cancelled"
        assert session.tokens() == IDS[:100]
        session.step(IDS[100])
        assert (session.device, session.length()) == ("cpu", 101)


def test_pairs_of_an_encoder_are_scored_on_the_cpu(device: FailingDevice, tmp_path: Path) -> None:
    """With the types of their tokens."""
    config = bert_config(scores_pairs=1, pooled_dim=(40, 1), pooled_activation=("tanh", "none"))
    path, documents = write_model(tmp_path / "m.bin", encoder(config)), ["The end", "hello"]
    with llamac.load(path) as cpu, llamac.load(path, device="auto") as auto:
        auto._device.name = "emulator"  # type: ignore[union-attr]
        expected = cpu.rerank("world", documents)
        assert auto.rerank("world", documents) == expected
        device.lost_after = device.launches + 5
        with pytest.warns(LlamacWarning, match=FAILED):
            assert auto.rerank("world", documents) == expected
        assert device.closed


def test_texts_of_an_encoder_share_no_prefix(device: FailingDevice, tmp_path: Path) -> None:
    """Their positions depend on later ones."""
    path = write_model(tmp_path / "m.bin", encoder(bert_config()))
    with llamac.load(path, device="auto") as auto, auto.session(sequences=3) as session:
        for sequence in (0, 1):
            session.eval(IDS[: 40 + sequence], sequence=sequence, logits=None)
        device.lost = True
        with pytest.warns(LlamacWarning, match="has failed; computing on the CPU from now on"):
            session.eval(IDS[:9], sequence=2, logits=None)
        assert [session.length(i) for i in range(3)] == [40, 41, 9]
        assert session.tokens(1) == IDS[:41]


# ---- engines


def test_requests_of_an_engine_go_on_on_the_cpu(auto: llamac.Model, device: FailingDevice, tmp_path: Path) -> None:
    """With the tokens that they would get, and with prefixes that are stored after the loss."""
    prompts = [IDS[:70], IDS[:70] + IDS[:3], IDS[100:110]]
    with auto.session(device="cpu") as cpu:
        expected = [cpu.generate(ids, max_tokens=9, seed=4, ignore_eos=True).tokens for ids in prompts]

    def answers(engine: llamac.Engine) -> list[list[int]]:
        requests = [engine.submit(ids, max_tokens=9, seed=4, ignore_eos=True) for ids in prompts]
        return [request.result(timeout=60).tokens for request in requests]

    with llamac.Engine(auto, max_sequences=2, prefix_dir=tmp_path) as engine:
        assert answers(engine) == expected
        device.lost_after = device.launches + 80
        with pytest.warns(LlamacWarning, match=FAILED):
            assert answers(engine) == expected
        assert engine.failure is None
        assert answers(engine) == expected
        assert engine.stats().prefix.hits


def test_candidates_and_beams_go_on_on_the_cpu(auto: llamac.Model, device: FailingDevice) -> None:
    requests: list[Any] = [{"n": 3, "seed": 5, "max_tokens": 6}, {"beam_width": 2, "max_tokens": 6}]

    def answers(engine: llamac.Engine) -> list[list[list[int]]]:
        running = [engine.submit(IDS[:9], ignore_eos=True, **each) for each in requests]
        return [[choice.tokens for choice in each.result(60).choices] for each in running]

    with llamac.Engine(auto, max_sequences=3) as engine:
        expected = answers(engine)
        device.lost_after = device.launches + 60
        with pytest.warns(LlamacWarning, match=FAILED):
            found = answers(engine)
    assert found == expected


# ---- servers


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_server_goes_on_on_the_cpu_or_says_what_has_failed(device: FailingDevice, path: Path, name: str) -> None:
    pytest.importorskip("uvicorn")
    from http_server import serving
    from llamac.server.models import Models
    from llamac.server.service import Service
    from llamac.server.settings import Settings

    body = {"prompt": IDS[:9], "max_tokens": 4, "seed": 1, "ignore_eos": True}
    with llamac.load(path, device=name) as model, llamac.Engine(model, max_sequences=2) as engine:
        service = Service(Models.of_one(engine, ("m",)), Settings())
        with serving(service) as server:
            expected = server.post("/v1/completions", body).json()["choices"]
            device.lost = True
            if name == "auto":
                with pytest.warns(LlamacWarning, match="has failed; computing on the CPU from now on"):
                    assert server.post("/v1/completions", body).json()["choices"] == expected
                assert server.client.get("/health").status_code == 200
                return
            for _ in range(2):
                answer = server.post("/v1/completions", body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "device_failed")
                assert "the engine has stopped: the device is lost" in answer.json()["error"]["message"]
            health = server.client.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stopped")
