"""A server of many models: names, loading, memory, adapters, and what happens to requests meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx
from adapter_samples import PREFIX, small_adapter
from recurrent_models import states_alone

from builders import write_model
from http_server import ENDLESS, PATIENCE, Running, running, serving
from llamac import models as built_in
from llamac.cli import make_parser
from llamac.cli.serve_models import models_of
from llamac.errors import ArgumentError, OutOfMemoryError
from llamac.progress import Progress, silent
from llamac.server import models_file
from llamac.server.models import Models, _bytes_of
from llamac.server.service import Service
from llamac.server.settings import Settings
from llamac.text import chat_process
from waiting import wait_until

ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def write_models(folder: Path, text: str = "", names: tuple[str, ...] = ("tales", "fables")) -> Path:
    """A folder of small models, each a file of its own, and its models.toml."""
    for name in names:
        shutil.copy(built_in.path(), folder / f"{name}.bin")
    (folder / "models.toml").write_text(text)
    return folder


def table(folder: Path, *options: object) -> Models:
    arguments = ["serve", "--models-dir", str(folder), "--idle-seconds", "0", *map(str, options)]
    return models_of(make_parser().parse_args(arguments))


@contextlib.contextmanager
def serving_models(folder: Path, *options: object, settings: Settings | None = None) -> Iterator[Running]:
    with serving(Service(table(folder, *options), settings or Settings())) as served:
        yield served


def loaded(server: Running) -> set[str]:
    return {model["id"] for model in server.client.get("/v1/models").json()["data"] if model["loaded"]}


def loaded_now(server: Running) -> set[str]:
    """Asked in the server's own threads."""
    return {entry.name for entry, _ in server.service.models.open_ones()}


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def style(folder: Path) -> Path:
    """An adapter that changes what the built-in model writes."""
    numbers = np.random.default_rng(1)
    factors = {
        f"{PREFIX}model.layers.0.mlp.down_proj.lora_{factor}.weight": numbers.standard_normal(shape, np.float32)
        for factor, shape in (("A", (2, 512)), ("B", (256, 2)))
    }
    return small_adapter(folder / "style", tensors=factors)


# ---- names


def test_models_are_loaded_by_name(tmp_path: Path) -> None:
    with serving_models(write_models(tmp_path, '[models.tales]\naliases = ["gpt-4o"]\n')) as server:
        assert loaded(server) == set()
        assert server.client.get("/ready").json() == {"status": "ready"}
        answer = server.post("/v1/completions", {"model": "gpt-4o", **ASK})
        assert answer.json()["model"] == "tales"
        assert loaded(server) == {"tales", "gpt-4o"}
        assert server.client.get("/v1/models/gpt-4o").json()["root"] == "tales"
        assert text_of(server.post("/v1/completions", {"model": "fables", **ASK})) == text_of(answer)
        assert loaded(server) == {"tales", "gpt-4o", "fables"}
        numbers = server.client.get("/metrics").text
        assert 'llamac_model_loads_total{model="tales"} 1\n' in numbers
        assert "llamac_models_loaded 2\n" in numbers


def test_the_process_of_chat_templates_starts_with_the_model() -> None:
    chat_process.WORKER.stop()
    with running(built_in.CHAT):
        wait_until(lambda: chat_process.WORKER.child is not None)


@pytest.mark.parametrize("name", ["other", "../tales.bin", "tales.bin", "/etc/passwd", "hf:org/name", "", "x" * 10_000])
def test_names_are_looked_up_in_the_table_only(tmp_path: Path, name: str) -> None:
    with serving_models(write_models(tmp_path)) as server:
        for path, body in (("/v1/completions", ASK), ("/tokenize", {"prompt": "a"}), ("/execute", {"prompt": "a"})):
            answer = server.post(path, {**body, "model": name})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert len(answer.text) < 500
        messages = {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        anthropic = server.post("/v1/messages", messages)
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")
        assert loaded(server) == set()


def test_a_request_without_a_model_gets_the_default_one(tmp_path: Path) -> None:
    write_models(tmp_path, 'default = "fables"\n')
    with serving_models(tmp_path) as server:
        assert server.post("/v1/completions", ASK).json()["model"] == "fables"
    (tmp_path / "models.toml").unlink()
    with serving_models(tmp_path) as server:
        error = server.post("/v1/completions", ASK).json()["error"]
        assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
        assert "'fables' or 'tales'" in error["message"]
        assert server.post("/v1/completions", {**ASK, "model": 3}).json()["error"]["code"] == "invalid_type"


def test_adapters_and_settings_belong_to_a_name(tmp_path: Path) -> None:
    style(tmp_path)
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = """
        [models.plain]
        file = "tales.bin"
        [models.styled]
        file = "tales.bin"
        adapters = ["style=0.5"]
        context = 64
        chat_template = "template.jinja"
        [models.styled.sampling]
        temperature = 0
    """
    with serving_models(write_models(tmp_path, text, ("tales",))) as server:
        plain, styled = (server.post("/v1/completions", {**ASK, "model": name}) for name in ("plain", "styled"))
        assert text_of(plain) != text_of(styled)
        body = {"model": "styled", "prompt": ASK["prompt"], "max_tokens": 8}
        assert {text_of(server.post("/v1/completions", body)) for _ in range(3)} == {text_of(styled)}
        listed = {model["id"]: model for model in server.client.get("/v1/models").json()["data"]}
        assert set(listed) == {"plain", "styled"}  # a table with a file replaces the file's own name
        assert listed["styled"]["max_model_len"] == 64
        messages = [{"role": "user", "content": "Once"}]
        assert server.post("/apply-template", {"model": "styled", "messages": messages}).json() == {"prompt": "Once"}
        assert server.post("/apply-template", {"model": "plain", "messages": messages}).status_code == 400


# ---- the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[models.tales]\ncontxt = 3\n",
            "models.toml: models.tales.contxt: there is no such key; did you mean 'context'?",
        ),
        ("[model.tales]\n", "models.toml: model: there is no such key; did you mean 'models'?"),
        ("[models.tales]\ncontext = true\n", "models.tales.context: True, expected an integer of at least 1"),
        ("[models.tales]\ncontext = 1.5\n", "models.tales.context: 1.5, expected an integer"),
        ("[models.tales]\nidle_seconds = nan\n", "models.tales.idle_seconds: nan, expected a number of at least 0"),
        ("[models.tales]\npinned = 1\n", "models.tales.pinned: 1 is not true or false"),
        ("[models.tales]\nkv_dtype = 'f64'\n", "models.tales.kv_dtype: 'f64', expected f32 or f16 or q8"),
        ("[models.tales]\nnumerics = 'slow'\n", "models.tales.numerics: 'slow', expected exact or fast"),
        ("[models.tales]\naliases = 'x'\n", "models.tales.aliases: 'x' is not an array"),
        ("[models.tales]\naliases = [1]\n", "models.tales.aliases: [1], expected an array of strings"),
        ("[models.tales]\naliases = ['']\n", "models.tales.aliases: '' is not a name"),
        ("[models.tales]\naliases = ['fables']\n", "two models have the name 'fables'"),
        ("[models.x]\n", "models.x.file: "),
        ("[models.x]\nfile = 'hf:org/name'\n", "models.x.file: 'hf:org/name' is not on this machine"),
        ("[models.x]\nfile = 'none.bin'\n", "none.bin does not exist"),
        ("[models.x]\nfile = 'gone'\n", "gone is a symbolic link to moved, which does not exist"),
        ("[models.tales]\nadapters = ['none']\n", "models.tales.adapters: "),
        (
            "[models.tales.sampling]\ntemprature = 1\n",
            "models.tales.sampling.temprature: there is no such key; did you",
        ),
        ("[models.tales.sampling]\ntemperature = -1\n", "models.tales.sampling: temperature is -1"),
        ("models = 3\n", "models: 3 is not a table"),
        ("default = 'x'\n", "the default model is 'x', expected one of fables, tales"),
        ("x = \n", "models.toml: this is not TOML: "),
        ("#" * (models_file.MAX_FILE_BYTES + 1), f"models.toml has more than {models_file.MAX_FILE_BYTES} bytes"),
    ],
)
def test_mistakes_in_the_file_are_errors_that_say_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gone").symlink_to("moved")
    with pytest.raises(ArgumentError) as caught:
        table(write_models(tmp_path, text))
    assert message in str(caught.value)


def test_files_that_are_not_served_or_cannot_be_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone.gguf").symlink_to("/mnt/gone.gguf")
    (tmp_path / "Llama-3.2").symlink_to("/mnt/Llama-3.2")
    (tmp_path / "loop.bin").symlink_to("loop.bin")
    (tmp_path / "fables.gguf").write_bytes(b"GGUF")
    for name in ("adapter", "checkpoint"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint" / "config.json").touch()
    (tmp_path / "notes.txt").touch()
    os.mkfifo(tmp_path / "pipe.gguf")

    def opened(file: Path, mode: str) -> Any:  # permissions do not stop root, who may run the tests
        if file.name in ("tales.bin", "config.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return open(file, mode)

    write_models(tmp_path)
    monkeypatch.setattr(models_file, "open", opened, raising=False)
    models = table(tmp_path)
    assert set(models.names) == {"tales", "fables", "checkpoint"}
    models.close()
    assert sorted(record.getMessage().removeprefix(f"{tmp_path}/") for record in caplog.records) == [
        "Llama-3.2 is a symbolic link to /mnt/Llama-3.2, which does not exist: it is not served",
        "checkpoint cannot be read: Permission denied",
        "fables.bin is not served: fables.gguf has the same name; name both in models.toml",
        "gone.gguf is a symbolic link to /mnt/gone.gguf, which does not exist: it is not served",
        "loop.bin cannot be read: Too many levels of symbolic links",
        "tales.bin cannot be read: Permission denied",
    ]
    (tmp_path / "models.toml").unlink()
    (tmp_path / "models.toml").symlink_to("/mnt/models.toml")  # without its settings the server would differ
    with pytest.raises(FileNotFoundError):
        table(tmp_path)


def test_folders_without_models_and_options_of_one_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="has no models"):
        table(tmp_path)
    write_models(tmp_path)
    (tmp_path / "tokenizer.bin").touch()  # a file of llama2.c, not a model
    for option in ("--alias=x", "--lora=x", "--tokenizer=x", "x"):
        with pytest.raises(ArgumentError, match="--models-dir serves the models of a folder: omit"):
            table(tmp_path, option)
    models = table(tmp_path)
    assert set(models.names) == {"fables", "tales"}
    models.close()


# ---- loading and unloading


def test_a_model_that_cannot_be_loaded_leaves_the_others_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_models(tmp_path)
    with serving_models(tmp_path) as server:
        (tmp_path / "tales.bin").write_bytes(b"damaged")
        for _ in range(2):  # each request tries again
            answer = server.post("/v1/completions", {**ASK, "model": "tales"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            error = answer.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert error["message"].startswith("the model 'tales' cannot be loaded: tales.bin")
            assert str(tmp_path) not in answer.text
        logged = [record for record in caplog.records if record.getMessage() == "a model cannot be loaded"]
        assert [str(tmp_path) in record.fields["reason"] for record in logged] == [True, True]  # type: ignore[attr-defined]
        assert "Traceback" not in caplog.text  # the reason says what is wrong with the file
        assert server.post("/v1/completions", {**ASK, "model": "fables"}).status_code == 200
        shutil.copy(built_in.path(), tmp_path / "tales.bin")
        assert server.post("/v1/completions", {**ASK, "model": "tales"}).status_code == 200


def test_requests_wait_while_their_model_is_loaded(tmp_path: Path) -> None:
    with serving_models(write_models(tmp_path)) as server:
        entry = server.service.models.names["tales"]
        opens, may_open = entry._opens, threading.Event()

        def slow(limit: int | None) -> Any:
            assert may_open.wait(PATIENCE)
            return opens(limit)

        entry._opens = slow
        with ThreadPoolExecutor(5) as pool:
            body = {**ASK, "model": "tales"}
            answers = [pool.submit(server.post, "/v1/completions", body) for _ in range(4)]
            gone = pool.submit(server.post, "/v1/completions", body, timeout=0.1)
            wait_until(lambda: len(entry._waiters) == 5)
            with pytest.raises(httpx.TimeoutException):  # it does not wait any longer, and the others do
                gone.result()
            may_open.set()
            assert len({text_of(answer.result()) for answer in answers}) == 1
        assert entry.loads == 1
        wait_until(lambda: entry.uses == 0)


def test_idle_models_are_unloaded_and_pinned_ones_are_not(tmp_path: Path) -> None:
    text = "[models.tales]\nidle_seconds = 0.05\n[models.fables]\nidle_seconds = 0.05\npinned = true\n"
    with serving_models(write_models(tmp_path, text)) as server:
        assert loaded(server) == {"fables"}
        body = {**ASK, "model": "tales", "stream": True, **ENDLESS}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            time.sleep(0.2)  # four times its time
            assert loaded(server) == {"fables", "tales"}
        wait_until(lambda: loaded(server) == {"fables"})
        assert 'llamac_model_unloads_total{model="tales"} 1\n' in server.client.get("/metrics").text
        assert server.post("/v1/completions", {**ASK, "model": "tales"}).status_code == 200


def need(folder: Path, *options: object) -> int:
    """What one of the models needs."""
    entry = table(folder, *options).names["tales"]
    return entry._measures(1 << 40).total


def test_the_least_recently_used_model_makes_room(tmp_path: Path) -> None:
    write_models(tmp_path, "[models.first]\npinned = true\n", ("first", "tales", "fables", "legends"))
    with serving_models(tmp_path, "--max-memory", 3 * need(tmp_path) + 1000) as server:
        for name, expected in (
            ("tales", {"tales"}),
            ("fables", {"tales", "fables"}),
            ("tales", {"tales", "fables"}),
            ("legends", {"tales", "legends"}),
            ("first", {"tales", "legends"}),
        ):
            assert server.post("/v1/completions", {**ASK, "model": name}).status_code == 200
            assert loaded(server) == {"first", *expected}


def test_an_unused_model_makes_room_if_a_gpu_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_models(write_models(tmp_path)) as server:
        text_of(server.post("/v1/completions", {**ASK, "model": "tales"}))
        entry = server.service.models.names["fables"]
        opens = entry._opens

        def full(limit: int | None) -> Any:
            if "tales" in loaded_now(server):
                raise OutOfMemoryError("the device has no memory left")
            return opens(limit)

        monkeypatch.setattr(entry, "_opens", full)
        text_of(server.post("/v1/completions", {**ASK, "model": "fables"}))
        assert loaded(server) == {"fables"}
        assert "llamac_device_bytes 0" in server.client.get("/metrics").text


def test_a_model_with_running_requests_is_not_unloaded(tmp_path: Path) -> None:
    write_models(tmp_path)
    room = ("--kv-tokens", 4096)  # for the endless request and another one
    models = table(tmp_path, *room, "--max-memory", need(tmp_path, *room) + 1000)
    models._wait_seconds = 0.1
    with serving(Service(models, Settings())) as server:
        body = {**ASK, "model": "tales", "stream": True, **ENDLESS}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = server.post("/v1/completions", {**ASK, "model": "fables"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
            assert "while requests use others" in refused.json()["error"]["message"]
            assert next(line for line in lines if line)  # the stream goes on
            assert server.post("/v1/completions", {**ASK, "model": "tales"}).status_code == 200
        models._wait_seconds = PATIENCE
        assert server.post("/v1/completions", {**ASK, "model": "fables"}).status_code == 200
        assert loaded(server) == {"fables"}


def test_a_model_that_can_never_fit_is_refused(tmp_path: Path) -> None:
    write_models(tmp_path, "[models.tales]\nkv_tokens = 1000000\n")
    with serving_models(tmp_path, "--max-memory", "100MB") as server:
        answer = server.post("/v1/completions", {**ASK, "model": "tales"})
        assert answer.status_code == 503
        assert "max_memory is 100.0 MB, but the model 'tales' needs" in answer.json()["error"]["message"]
        assert server.post("/v1/completions", {**ASK, "model": "fables"}).status_code == 200
    with pytest.raises(OutOfMemoryError):
        table(write_models(tmp_path, "[models.tales]\npinned = true\n"), "--max-memory", "1MB")


def test_a_limit_has_room_for_the_states_of_a_model(tmp_path: Path) -> None:
    """Recurrent layers alone have no pages of keys and values."""
    write_model(write_models(tmp_path, names=()) / "states.bin", states_alone())
    with serving_models(tmp_path, "--max-memory", "1GB") as server:
        text_of(server.post("/v1/completions", {**ASK, "model": "states"}))


def test_models_of_one_file_need_its_memory_once(tmp_path: Path) -> None:
    write_models(tmp_path, "[models.one]\nfile='tales.bin'\n[models.two]\nfile='tales.bin'\n", ("tales",))
    models = table(tmp_path)
    entries = models.entries
    for entry in entries:
        entry.need = entry._measures(1 << 40)
    first = entries[0].need
    assert first is not None
    assert _bytes_of(set(entries)) == 2 * first.own + os.path.getsize(tmp_path / "tales.bin")


def test_an_engine_that_stops_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_models(write_models(tmp_path)) as server:
        body = {**ASK, "model": "tales"}
        text = text_of(server.post("/v1/completions", body))
        opened = server.service.models.names["tales"].opened
        assert opened is not None

        def fail() -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(opened.engine._batch, "step", fail)
        assert server.post("/v1/completions", body).status_code == 500
        assert text_of(server.post("/v1/completions", body)) == text
        assert server.client.get("/health").status_code == 200


def test_many_requests_for_several_models_with_memory_for_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    style(tmp_path)
    text = """
        [models.styled]
        file = "tales.bin"
        adapters = ["style"]
        [models.other]
        file = "stories-gpt2"
        [models.tales]
        idle_seconds = 0.01
    """
    write_models(tmp_path, text, ("tales", "fables"))
    names = ("tales", "fables", "styled", "other")
    with serving_models(tmp_path) as server:
        expected = {name: text_of(server.post("/v1/completions", {**ASK, "model": name})) for name in names}
        needs = [entry._measures(1 << 40).total for entry in server.service.models.entries]
    most: list[int] = []
    opens = Models._open_now

    def watched(self: Models, entry: Any) -> Any:
        most.append(_bytes_of({each for each, _ in self.open_ones()} | {entry}))
        return opens(self, entry)

    monkeypatch.setattr(Models, "_open_now", watched)
    limit = sum(sorted(needs)[-2:]) + 1000
    numbers = random.Random(1)
    chosen = [numbers.choice(names) for _ in range(120)]
    with serving_models(tmp_path, "--max-memory", limit) as server, ThreadPoolExecutor(8) as pool:

        def ask(index: int) -> None:
            name = chosen[index]
            if index % 10 == 9:  # some go away
                with contextlib.suppress(httpx.TimeoutException):
                    server.post("/v1/completions", {**ASK, "model": name, "max_tokens": 200}, timeout=0.02)
            elif index % 3:
                assert text_of(server.post("/v1/completions", {**ASK, "model": name})) == expected[name]
            else:
                *events, done = server.events("/v1/completions", {**ASK, "model": name})
                assert "".join(event["choices"][0]["text"] for event in events) == expected[name]
                assert done == "[DONE]"

        for result in [pool.submit(ask, index) for index in range(len(chosen))]:
            result.result()
        entries = server.service.models.entries
        wait_until(lambda: all(entry.uses == 0 for entry in entries))
        assert sum(entry.unloads for entry in entries) > 4
        # the engine gives up what nobody waits for after its step
        wait_until(lambda: "llamac_requests_running 0\n" in server.client.get("/metrics").text)
    assert max(most) <= limit
    assert all(entry.opened is None for entry in entries)


@contextlib.contextmanager
def streams(server: Running, *names: str) -> Iterator[None]:
    """Keep models in use with streams that do not end."""
    lines: list[Iterator[str]] = []  # the end of an iterator would close its stream
    with contextlib.ExitStack() as stack:
        for name in names:
            body = {**ASK, "model": name, "stream": True, **ENDLESS}
            stream = stack.enter_context(server.client.stream("POST", "/v1/completions", json=body))
            lines.append(stream.iter_lines())
            next(lines[-1])
        yield


def test_a_model_does_not_wait_for_room_without_a_request(tmp_path: Path) -> None:
    write_models(tmp_path)
    room = ("--kv-tokens", 4096)
    with serving_models(tmp_path, *room, "--max-memory", need(tmp_path, *room) + 1000) as server:
        server.service.models._wait_seconds = 10 * PATIENCE
        tales, fables = (server.service.models.names[name] for name in ("tales", "fables"))
        with streams(server, "tales"):
            with pytest.raises(httpx.TimeoutException):
                server.post("/v1/completions", {**ASK, "model": "fables"}, timeout=0.2)
            wait_until(lambda: fables._loading is None)
            assert not tales._leaving
            assert server.post("/v1/completions", {**ASK, "model": "tales"}).status_code == 200


def test_a_model_that_fits_is_not_held_up_by_one_that_waits(tmp_path: Path) -> None:
    """The one that fits may not take room that has been made for the other."""
    names = ("tales", "fables", "legends", "large")
    room = ("--kv-tokens", 1024)
    write_models(tmp_path, "[models.large]\nkv_tokens = 8000\n", names)
    small = need(tmp_path, *room)
    large = table(tmp_path, *room).names["large"]._measures(1 << 40).total
    assert 2 * small < large < 3 * small
    with serving_models(tmp_path, *room, "--max-memory", large + small // 2) as server, ThreadPoolExecutor(2) as pool:
        with streams(server, "tales"):
            waiting = pool.submit(server.post, "/v1/completions", {**ASK, "model": "large"})
            tales = server.service.models.names["tales"]
            wait_until(lambda: tales._leaving)
            assert server.post("/v1/completions", {**ASK, "model": "fables"}, timeout=PATIENCE / 2).status_code == 200
            wait_until(lambda: loaded_now(server) == {"tales"})  # it makes room for the large one as soon as it can
            again = pool.submit(server.post, "/v1/completions", {**ASK, "model": "fables"})
            wait_until(lambda: len(server.service.models.names["fables"]._waiters) == 1)
            assert not waiting.done()
        assert waiting.result().status_code == 200
        assert again.result().status_code == 200


def test_a_file_that_has_been_replaced_is_measured_again(tmp_path: Path) -> None:
    write_models(tmp_path, "[models.tales]\nidle_seconds = 0.05\n")
    with serving_models(tmp_path, "--max-memory", "1GB") as server:
        for name in ("tales", "fables"):
            assert server.post("/v1/completions", {**ASK, "model": name}).status_code == 200
        wait_until(lambda: loaded_now(server) == {"fables"})
        shutil.copy(built_in.path("helper"), tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "tales.bin")
        assert server.post("/v1/completions", {**ASK, "model": "tales"}).status_code == 200
        assert "fables" in loaded_now(server)
        need = server.service.models.names["tales"].need
        assert need is not None
        assert need.weights == os.path.getsize(built_in.path("helper"))


def test_every_file_that_a_model_reads_tells_whether_it_has_changed(tmp_path: Path) -> None:
    adapter = style(tmp_path) / "adapter_model.safetensors"
    text = "[models.tales]\ndraft_model = 'fables.bin'\nadapters = ['style']\n[models.parts]\nfile = '{}'\n"
    parts = [tmp_path / f"parts-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.touch()
    models = table(write_models(tmp_path, text.format(parts[0].name)))
    for name, files in (("tales", (tmp_path / "tales.bin", tmp_path / "fables.bin", adapter)), ("parts", parts)):
        stamp = models.names[name]._stamp
        for file in files:
            before = stamp()
            assert stamp() == before
            os.utime(file, (1, 1))
            assert stamp() != before
    models.close()


def test_a_missing_file_unloads_no_model_and_its_folder_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path("one's folder: all")
    monkeypatch.chdir(tmp_path)
    folder.mkdir()
    shutil.copy(built_in.path(), folder / "draft.bin")
    write_models(folder, "[models.drafted]\nfile = 'tales.bin'\ndraft_model = 'draft.bin'\n[models.tales]\n")
    with serving_models(folder, "--max-memory", need(folder) + 1000) as server:
        for name in ("tales", "fables"):
            assert server.post("/v1/completions", {**ASK, "model": name}).status_code == 200
        for name, missing in (("drafted", "draft.bin"), ("tales", "tales.bin")):
            (folder / missing).unlink()
            answer = server.post("/v1/completions", {**ASK, "model": name})
            assert answer.status_code == 503
            assert missing in answer.text
            assert "folder" not in answer.text
        assert loaded_now(server) == {"fables"}
    assert "Traceback" not in caplog.text


def test_the_conversion_of_a_model_stops_when_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def convert(*arguments: Any, progress: Progress = silent, **options: Any) -> Any:
        begun.set()
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            progress("converting", 0, 1)
            time.sleep(0.001)
        raise AssertionError

    monkeypatch.setattr("llamac.cli.serve_models.open_model", convert)
    with ThreadPoolExecutor(1) as pool:
        with serving_models(write_models(tmp_path)) as server:
            asked = pool.submit(server.post, "/v1/completions", {**ASK, "model": "tales"})
            assert begun.wait(PATIENCE)
            ending = time.monotonic()
        assert time.monotonic() - ending < PATIENCE / 2
        assert asked.exception() is not None
