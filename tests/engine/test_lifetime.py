"""Resources: what an import loads, what the library prints, and what it leaves open or allocated."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import llamac
from builders import some_ids
from llamac import _core, models
from llamac.errors import ArgumentError, ExportError, ModelError, OutOfMemoryError, SessionFileError
from llamac.format.flatfile import FlatFile
from openmp import up_to
from processes import UNCOUNTED, output_of, run_python

HEAVY = (
    *("numpy", "tokenizers", "sentencepiece", "tqdm", "click", "torch", "transformers", "safetensors", "gguf"),
    *("llamac.export", "llamac.format.probes", "ctypes", "asyncio", "multiprocessing"),
)


@pytest.fixture(autouse=True)
def no_object_stays_open() -> Iterator[None]:
    """Check that no object of the core outlives a test."""
    gc.collect()
    before = _core.live_objects()
    yield
    gc.collect()
    assert _core.live_objects() == before


def test_a_session_and_a_page_in_a_cycle_let_their_model_close(tiny_llama: Path) -> None:
    """The garbage collector must not take a session's model away before the session is freed."""
    file = FlatFile(tiny_llama)
    session = _core.Session(file.core)
    session.eval_rows(array("i", [1, 0, 0, 0]))
    cycle: list[object] = [session, _core.hold_page(session, 0, 0, 0)]
    cycle.append(cycle)
    del session, cycle
    gc.collect()
    file.close()
    assert file.core.released


# ---- what an import costs


def test_importing_llamac_does_not_import_heavy_modules() -> None:
    program = "import sys, llamac, llamac.cli; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    assert output_of(program, *HEAVY, **UNCOUNTED) == "\n"


def test_running_a_model_on_ids_does_not_import_heavy_modules(tiny_llama: Path) -> None:
    program = """
        import sys, llamac
        with llamac.load(sys.argv[1]) as model, model.session() as session:
            session.eval([1, 2, 3], logits=None)
        print(*(name for name in sys.argv[2:] if name in sys.modules))
    """
    assert output_of(program, tiny_llama, *HEAVY, **UNCOUNTED) == "\n"


def test_running_a_prompt_does_not_import_heavy_modules(tiny_llama: Path) -> None:
    program = """
        import sys
        from llamac.cli import run_command
        code = run_command(["run", sys.argv[1], "-i", "hello", "-n", "20", "-t", "0.9", "-s", "1", "-q", "--no-echo"])
        print(code, *(name for name in sys.argv[2:] if name in sys.modules))
    """
    assert output_of(program, tiny_llama, *HEAVY, **UNCOUNTED).splitlines()[-1] == "0"


# ---- output


def test_the_library_prints_nothing(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged.bin").write_bytes(tiny.read_bytes()[:5000])
    with llamac.load(tiny, threads=up_to(2)) as model:
        model.generate("hello", max_tokens=20, temperature=0.9)
        list(model.stream("hello", max_tokens=5))
        model.logits([1, 2, 3])
        with model.session() as session:
            session.observe([1, 2], llamac.STAGES)
            for wrong in ([-1], [9999], [1] * 700, ["x"]):
                with pytest.raises(llamac.LlamacError):
                    session.eval(wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError):
            model.session(kv_dtype="q4")  # type: ignore[arg-type]
        assert not any(problem for _, problem in model.file.verify_data())
    with pytest.raises(ModelError):
        llamac.load(tmp_path / "damaged.bin")
    with pytest.raises(FileNotFoundError):
        llamac.load(tmp_path / "absent.bin")
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_exiting_with_open_objects_prints_nothing(tiny_llama: Path) -> None:
    program = """
        import sys, llamac
        model = llamac.load(sys.argv[1], threads=int(sys.argv[2]))
        session = model.session()
        session.eval([1, 2, 3], logits=None)
        stream = model.stream("hello")
        next(stream)
        model.self = [model, session, stream]  # a cycle, which only the interpreter's last collection frees
    """
    assert output_of(program, tiny_llama, up_to(2)) == ""


def test_exiting_during_an_eval_in_a_thread_succeeds(big_llama: Path) -> None:
    program = """
        import sys, threading, time, llamac
        session = llamac.load(sys.argv[1], threads=int(sys.argv[2])).session()
        threading.Thread(target=session.eval, args=(list(range(280)) * 25,), daemon=True).start()
        while session.memory()["kv"] == 0:
            time.sleep(0.001)
    """
    assert output_of(program, big_llama, up_to(2)) == ""


def test_exiting_with_an_error_prints_only_that_error(tiny_llama: Path) -> None:
    program = """
        import sys, llamac
        model = llamac.load(sys.argv[1])
        stream = model.stream("hello")
        next(stream)
        raise SystemExit("the end")
    """
    done = run_python(program, tiny_llama)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the end\n")


# ---- leaks


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_opening_and_closing_many_times_leaks_nothing(tiny_llama: Path) -> None:
    program = """
        import gc, os, sys, llamac

        def cycle(number):
            threads = 1 if number % 10 else int(sys.argv[2])
            with llamac.load(sys.argv[1], threads=threads) as model, model.session() as session:
                session.eval([1 + id % 50 for id in range(80)], logits=None)
                model.generate([1, 5], max_tokens=3)

        def used():
            gc.collect()
            with open("/proc/self/statm") as statm:
                pages = int(statm.read().split()[1])
            return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

        for number in range(30):
            cycle(number)
        files, memory = used()
        for number in range(200):
            cycle(number)
        more_files, more_memory = used()
        print(more_files - files, more_memory - memory)
    """
    files, memory = map(int, output_of(program, tiny_llama, up_to(2)).split())  # other tests use no memory of it
    assert files == 0
    assert memory < 3_000_000  # a model and its session hold more than 0.8 MB


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts files in /proc")
def test_an_open_model_holds_at_most_one_file(tiny_llama: Path) -> None:
    files = open_files()
    with llamac.load(tiny_llama):
        assert open_files() <= files + 1  # Python's mmap duplicates the file descriptor
    assert open_files() == files


def test_live_objects_are_counted(tiny_llama: Path) -> None:
    before = _core.live_objects()
    model = llamac.load(tiny_llama)
    assert _core.live_objects() == before + 1
    session = model.session()
    assert _core.live_objects() == before + 2
    model.close()
    assert session.closed
    assert _core.live_objects() == before


def test_dropped_objects_are_freed(tiny_llama: Path) -> None:
    before = _core.live_objects()
    model = llamac.load(tiny_llama)
    session = model.session()
    del model
    assert session.eval([1, 2]) is not None  # a session keeps its model
    del session
    gc.collect()
    assert _core.live_objects() == before


def test_a_failed_load_leaks_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    data = tiny_llama.read_bytes()
    (tmp_path / "damaged.bin").write_bytes(data[:700] + b"\xff" + data[701:])
    files = open_files() if Path("/proc/self/fd").is_dir() else 0
    for _ in range(5):
        with pytest.raises(ModelError):
            llamac.load(tmp_path / "damaged.bin")
        with pytest.raises(ArgumentError):
            llamac.load(tiny_llama, threads=0)
    gc.collect()
    assert not files or open_files() == files


def test_the_file_can_be_replaced_while_a_model_is_open(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(tiny_llama.read_bytes())
    with llamac.load(path) as model:
        expected = model.logits([1, 2, 3])
        other = tmp_path / "other.bin"
        other.write_bytes(b"something else")
        os.replace(other, path)
        assert model.logits([1, 2, 3]).tobytes() == expected.tobytes()


def test_arrays_outlive_their_session_and_model(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        logits = session.eval([1, 2, 3], logits="all")
        stage = session.observe([4], ["embedding"])["embedding", 0]
        embedding = model.file.tensor("token_embedding.weight")
    gc.collect()
    assert logits is not None
    assert np.isfinite(logits).all()
    assert stage[0].tobytes() == embedding[4].tobytes()


def test_sessions_streams_and_files_cannot_be_pickled_or_copied(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        for made in (session, model.file, model._core, session._core, model.stream([1])):
            for use in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError):
                    use(made)


# ---- failing allocations


def failures_of(use: Callable[[], object]) -> int:
    """Fail each allocation of a call in turn until the call succeeds; return how many failed."""
    messages: list[str] = []
    for number in range(1, 100):
        _core.fail_allocation(number)
        try:
            use()
            assert all("memory" in message for message in messages)
            return len(messages)
        except OutOfMemoryError as error:
            messages.append(str(error))
        finally:
            _core.fail_allocation(0)
    raise AssertionError("the call never succeeded")


def test_every_failed_allocation_is_an_out_of_memory_error(tiny_llama: Path) -> None:
    ids = some_ids(200)
    with llamac.load(tiny_llama) as model:
        expected = model.logits(ids)
    assert failures_of(lambda: llamac.load(tiny_llama).close()) >= 3
    with llamac.load(tiny_llama) as model:
        assert failures_of(lambda: model.session(sequences=2).close()) >= 2
        with model.session() as session:

            def evaluate() -> None:
                assert session.length() == 0  # the failed calls changed nothing
                found = session.eval(ids, logits="all")
                assert found is not None
                assert found.tobytes() == expected.tobytes()

            assert failures_of(evaluate) >= 3
            session.truncate(0)
            assert session.observe(ids, ["logits"])["logits", 0].tobytes() == expected.tobytes()


# ---- files that are not models


def test_missing_files_and_unusable_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found:
        llamac.load(tmp_path / "absent.bin")
    assert found.value.errno == errno.ENOENT
    assert "absent.bin" in str(found.value)
    with pytest.raises(ExportError, match="is not a Hugging Face directory"):
        llamac.load(tmp_path)
    for path, problem in (
        (5, "path must be"),
        (b"x", "path must be"),
        ("", "path is ''"),
        ("a\0b", "is not a file name"),
        ("\ud800", "is not a file name"),
    ):
        with pytest.raises(ArgumentError, match=problem) as wrong:
            llamac.load(cast("Any", path))
        assert isinstance(wrong.value, TypeError) == (not isinstance(path, str))
    (tmp_path / "empty.bin").touch()
    with pytest.raises(ModelError, match=r"empty\.bin: the file is empty"):
        llamac.load(tmp_path / "empty.bin")


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    for path in (tmp_path / "pipe.bin", Path("/dev/zero")):
        with pytest.raises(ModelError, match=f"{path.name} is not a regular file"):
            llamac.load(path)


# ---- the built-in models by name


def test_built_in_models_are_loaded_by_name(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in models.NAMES:
        with llamac.load(name) as model:
            assert (model.name, model.file.path) == (name, models.path(name))
    (tmp_path / "stories-gpt2").write_bytes(tiny_llama.read_bytes())
    with llamac.load("stories-gpt2") as model:  # a file takes precedence over a built-in model
        assert model.name == "tiny"
    with llamac.load(Path("stories")) as model:
        assert model.name == "stories"
    (tmp_path / "stories").symlink_to(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        llamac.load("stories")


def test_a_failed_session_load_frees_its_pages_while_the_error_is_handled(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with llamac.load(tiny_llama) as model, model.session() as session:
        session.prefill(some_ids(200))
        session.save(path)
        session.truncate(0)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        with pytest.raises(SessionFileError, match="the checksum") as failure:
            session.load(path)
        assert failure.value.__traceback__ is not None
        assert model.kv_bytes == 0


def test_a_pipe_is_no_session_file(tiny_llama: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.session")
    with (
        llamac.load(tiny_llama) as model,
        model.session() as session,
        pytest.raises(SessionFileError, match=r"a\.session is not a regular file"),
    ):
        session.load(tmp_path / "a.session")
