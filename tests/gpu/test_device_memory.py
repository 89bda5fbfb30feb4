"""A model's memory on a device: counted separately from the process's, planned, and released."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from gpu.failing_device import FailingDevice
from graph_cases import CASES
from recurrent_models import states_alone

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac import _core
from llamac.errors import LlamacWarning, OutOfMemoryError, UnsupportedError
from llamac.gpu.buffers import most_outputs, widest_row
from llamac.gpu.driver import arguments
from llamac.gpu.emulator.emulator import Emulator
from llamac.server.models import need_of

IDS = some_ids(70)


class SharedDevice(Emulator):
    """A driver of the one device that all drivers share."""

    total: ClassVar[int] = 1 << 30
    opened: ClassVar[list[SharedDevice]] = []

    def __init__(self, cache: Path) -> None:
        super().__init__(cache, memory=self.total)
        self.opened.append(self)

    def memory(self) -> tuple[int, int]:
        return self.total - sum(sum(device._sizes.values()) for device in self.opened), self.total


@pytest.fixture
def shared(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> type[SharedDevice]:
    """The device of all models."""
    monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: SharedDevice(kernel_cache))
    monkeypatch.setattr("llamac.gpu.device_model.MARGIN", 0)
    monkeypatch.setattr(SharedDevice, "opened", [])
    return SharedDevice


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return write_model(tmp_path_factory.mktemp("model") / "m.bin", checkpoint(llama_config()))


def used(shared: type[SharedDevice]) -> int:
    return sum(sum(device._sizes.values()) for device in shared.opened)


def test_memory_of_a_device_is_counted_apart_and_given_back(path: Path, shared: type[SharedDevice]) -> None:
    with llamac.load(path, device="cuda") as model:
        with model.session() as session:  # its buffers stay with the model
            session.eval(IDS)
        before, in_use = model.memory(), used(shared)
        assert before.device is not None
        assert (before.kv, before.device.kv, model.kv_bytes) == (0, 0, 0)
        assert before.device.total - before.device.free == in_use
        for _ in range(3):
            with model.session(sequences=2) as session, model.session(device="cpu") as cpu:
                session.eval(IDS)
                cpu.eval(IDS[:10])
                during = model.memory()
                assert during.device is not None
                assert during.device.kv > 0
                assert during.kv == cpu.memory()["kv"] == model.kv_bytes - session.memory()["kv"] > 0
            after = model.memory()
            assert (after.kv, after.device, used(shared)) == (0, before.device, in_use)
    assert used(shared) == 0


def test_max_memory_limits_the_process_and_not_the_device(path: Path, shared: type[SharedDevice]) -> None:
    with llamac.load(path, device="cuda") as model:
        plan = model.plan_memory(context=128, sequences=4)
        assert plan.kv == 0
        assert plan.device_kv > 0
        assert any(line.startswith("on the GPU") for line in plan.lines())
    with llamac.load(path) as cpu:
        assert cpu.plan_memory(context=128, sequences=4).kv == plan.device_kv
    with llamac.load(path, device="cuda", context=128, max_memory=plan.total) as model:
        with model.session(sequences=2) as session:
            session.eval(IDS)
        assert model.kv_budget is not None
        assert model.kv_budget > plan.device_kv
    with pytest.raises(OutOfMemoryError, match="max_memory is"):
        llamac.load(path, context=128, max_memory=plan.total)
    with pytest.raises(OutOfMemoryError, match="max_memory is"):  # it can become the CPU
        llamac.load(path, device="auto", context=128, max_memory=plan.total)


def test_a_context_that_does_not_fit_the_device_is_refused_before_anything_is_uploaded(
    path: Path, shared: type[SharedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    with llamac.load(path, device="cuda", context=64) as model:
        monkeypatch.setattr(SharedDevice, "total", used(shared) + model.plan_memory(context=64).device_kv)
    llamac.load(path, device="cuda", context=64).close()
    with pytest.raises(OutOfMemoryError, match=r"the weights need .*, one KV cache .* has .* free: close other"):
        llamac.load(path, device="cuda", context=128)
    with (
        pytest.warns(LlamacWarning, match="computing on the CPU: the weights need"),
        llamac.load(path, device="auto", context=128) as model,
    ):
        assert model.memory().device is None
    assert used(shared) == 0


def test_models_with_more_outputs_than_grids_have_blocks_are_refused(
    path: Path, shared: type[SharedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    with llamac.load(path) as model:
        outputs = most_outputs(_core.plan(model._core))
        assert outputs >= model.config["vocab_size"]
    monkeypatch.setattr("llamac.gpu.device_model.MOST_OUTPUTS", outputs)
    llamac.load(path, device="cuda").close()
    monkeypatch.setattr("llamac.gpu.device_model.MOST_OUTPUTS", outputs - 1)
    why = f"a product of the model has {outputs} outputs, and GPUs compute at most {outputs - 1}: use device='cpu'"
    with pytest.raises(UnsupportedError, match=why):
        llamac.load(path, device="cuda")


def test_passes_have_no_more_pairs_of_rows_and_experts_than_grids_have_blocks(
    tmp_path: Path, shared: type[SharedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamac.gpu.device_model.MOST_BLOCKS", 2047)
    path = write_model(tmp_path / "m.bin", checkpoint(CASES["shared experts"]))
    with llamac.load(path, device="cuda", context=64) as model:
        assert model._device is not None
        [part] = model._device._parts
        assert (part.plan.max_experts_used, part.most_rows, model._device.most_rows) == (2, 1023, 512)


def test_chunks_have_no_more_numbers_than_kernels_can_count(
    path: Path, shared: type[SharedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of wide models have fewer rows. Models that are too wide even for those are refused."""
    with llamac.load(path, device="cuda") as model:
        width = widest_row(_core.plan(model._core))
        assert width >= model.config["vocab_size"]
    found = []
    for rows in 1024, 1023, 256:
        monkeypatch.setattr("llamac.gpu.device_model.MOST_NUMBERS", rows * width)
        with llamac.load(path, device="cuda") as model:
            assert model._device is not None
            found.append(model._device.most_rows)
    assert found == [1024, 512, 256]
    monkeypatch.setattr("llamac.gpu.device_model.MOST_NUMBERS", 256 * width - 1)
    why = f"the model computes {width} numbers for a token, and GPUs compute at most {width - 1}: use device='cpu'"
    with pytest.raises(UnsupportedError, match=why):
        llamac.load(path, device="cuda")
    with (
        pytest.warns(LlamacWarning, match=f"computing on the CPU: {why}"),
        llamac.load(path, device="auto") as model,
    ):
        assert model.logits(IDS[:2]).shape == (2, model.config["vocab_size"])
    assert used(shared) == 0
    with pytest.raises(UnsupportedError, match="kernels count in 32 bits, and cannot count to 2147483648"):
        arguments("fi", 1 << 31, 1 << 31)


def test_kv_tokens_that_do_not_fit_the_device_are_refused(
    path: Path, shared: type[SharedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedDevice, "total", 1 << 26)
    with llamac.load(path, device="cuda") as model:
        with pytest.raises(OutOfMemoryError, match=r"kv_tokens is 1000000, .* leave .*: at most (\d+) fit") as caught:
            llamac.Engine(model, kv_tokens=1_000_000)
        most = int(str(caught.value).split("at most ")[1].split()[0])
        with llamac.Engine(model, kv_tokens=most - most % 64) as engine:
            assert engine.submit(IDS[:5], max_tokens=2, ignore_eos=True).result(60).tokens
        with model.session(device="cpu") as cpu:
            cpu.eval(IDS)


def test_states_that_do_not_fit_the_device_are_refused(shared: type[SharedDevice], tmp_path: Path) -> None:
    with llamac.load(write_model(tmp_path / "m.bin", states_alone()), device="cuda") as model:
        assert model._device is not None
        model._device.kv_room = 100
        with pytest.raises(OutOfMemoryError, match="leave 100 B: use fewer sequences"):
            llamac.Engine(model, kv_tokens=300)


def test_a_server_plans_the_memory_of_the_process(path: Path, shared: type[SharedDevice]) -> None:
    needs = []
    for device in ("cpu", "cuda", "auto"):
        with llamac.load(path, device=device) as model, llamac.Engine(model) as engine:
            needs.append(need_of(engine, 640, 1 << 40))
            positions, page_bytes = engine.page_size
    assert needs[0].own - needs[1].own >= 640 // positions * page_bytes
    assert needs[2].own - needs[1].own == 640 // positions * page_bytes


def test_a_model_that_is_lost_has_nothing_on_the_device(path: Path, kernel_cache: Path) -> None:
    device = FailingDevice(kernel_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: device)
        with llamac.load(path, device="auto", max_memory="64MiB") as model, model.session() as session:
            session.eval(IDS[:3])
            assert model._device is not None
            assert model._device.bytes > 0
            budget = model.kv_budget
            device.lost = True
            with pytest.warns(LlamacWarning, match="has failed"):
                session.eval(IDS[3:6])
            assert (model._device.bytes, device._sizes) == (0, {})
            assert model.kv_budget != budget  # what the limit leaves
            np.testing.assert_array_equal(session.eval(IDS[6:7]), model.logits(IDS[:7])[-1])
