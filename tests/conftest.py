"""Options and fixtures shared by all tests."""

from __future__ import annotations

import gc
import io
import itertools
import os
import sys
import zlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vocab_samples import tokenizer_json, write_json

from builders import byte_ids, checkpoint, gpt2_config, llama_config, script_checkpoint, write_llama2c_v0, write_model
from commands import Command, Result, Terminal
from golden.cases import CASES
from golden.llama_cpp import LlamaCpp
from golden.tiny_checkpoints import write_checkpoint
from llamac.cli import run_command
from llamac.engine.hardware import machine
from llamac.engine.sampling import params
from llamac.gpu.device_names import KERNEL_FOLDER
from llamac.sources import conversions, digests
from real.models import MODELS

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data",
        type=lambda name: Path(name).resolve(),
        default=ROOT.parent / "shared" / "data",
        help="folder of real models and tokenizers",
    )
    for name, model in MODELS.items():
        parser.addoption(
            f"--{name}",
            type=lambda name: Path(name).resolve(),
            default=model.path,
            help=f"{model.file}, for the tests marked `real`",
        )
    parser.addoption(
        "--device",
        default="emulator",
        help="the device of the tests of sessions on devices, such as cuda:0",
    )
    parser.addoption(
        "--faults",
        type=int,
        default=1,
        metavar="N",
        help="how many calls of each function of CUDA fail, at most",
    )
    parser.addoption(
        "--failing-allocations",
        type=int,
        default=5,
        metavar="N",
        help="how many allocations of each scenario fail, spread evenly; 0: each one",
    )
    parser.addoption(
        "--every-capability",
        action="store_true",
        help="compile the GPU kernels for every compute capability, even if tests/gpu/registers.txt is up to date",
    )
    parser.addoption(
        "--record-llama-cpp",
        action="store_true",
        help="run llama.cpp and replace its recorded results (with tests/export and llama-cpp-python)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, one process runs all tests of a file, since they share fixtures and what those keep on the disk."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_configure() -> None:
    """Let PyTorch compute with one thread: the models are tiny, and threads that wait for each other spin."""
    os.environ.setdefault("MKL_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the tests out of all garbage collections, each of which would visit millions of their objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def llama_cpp(request: pytest.FixtureRequest) -> Iterator[LlamaCpp]:
    """llama.cpp, or its recorded results."""
    results = LlamaCpp(record=request.config.getoption("--record-llama-cpp"))
    yield results
    results.save()


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of kernels that are compiled for emulated devices, which later runs of the suite reuse if they can.

    A process whose LLAMAC_CACHE is the parent of this folder also finds them.
    """
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("gpu") if cache is None else Path(cache.mkdir("gpu"))
    return folder / KERNEL_FOLDER


@pytest.fixture(scope="session", autouse=True)
def isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run tests in an empty directory and with empty caches.

    In the root of a checkout, subprocesses would import the folder llamac/ instead of the installed package. The folder
    lacks the compiled core after a plain `pip install .`.
    """
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    os.environ["LLAMAC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hub"))
    for name in ("COLUMNS", "LINES"):  # which readline sets in the process that starts the workers of `-n`
        os.environ.pop(name, None)
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def seeds_of_requests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give requests without a seed the same ones in each run of a test."""
    original, seeds = params.random_seed, itertools.count(zlib.crc32(request.node.nodeid.encode()) >> 1)
    params.random_seed = lambda: next(seeds)
    yield
    params.random_seed = original


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real test data; skips the test if it does not exist."""
    folder: Path = request.config.getoption("--data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder} (pass --data DIR)")
    return folder


def real_model(request: pytest.FixtureRequest, name: str) -> Path:
    """A model of `real.models.MODELS` as a GGUF file; skips the test if it has not been downloaded."""
    path: Path = request.config.getoption(f"--{name}")
    if not path.is_file():
        pytest.skip(f"no model at {path}: download it with `python tests/real/models.py {name}`, or pass --{name} FILE")
    return path


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    return real_model(request, "smollm2")


@pytest.fixture(scope="session")
def gemma3(request: pytest.FixtureRequest) -> Path:
    """Gemma 3 270M in Q4_K_M: the base model, without a chat template."""
    return real_model(request, "gemma3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA in f32 with a tokenizer; context 600."""
    return write_model(tmp_path_factory.mktemp("models") / "llama.bin", checkpoint(llama_config()))


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 in bf16 with biases; context 600."""
    return write_model(tmp_path_factory.mktemp("models") / "gpt2.bin", checkpoint(gpt2_config()), "bf16")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flat file that every export target can store: it has as many tokens as logits."""
    config = llama_config()
    n_ids = checkpoint(config).config.n_token_ids
    return write_model(tmp_path_factory.mktemp("model") / "tiny.bin", checkpoint(replace(config, vocab_size=n_ids)))


@pytest.fixture(scope="session")
def big_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA whose prompts take seconds; context 8192. It has 90 MB, or less on machines with slow kernels."""
    scalar = (machine.choose_isa(None) or machine.best_isa()) == "scalar"
    size = {"dim": 64, "n_heads": 4, "ffn": 176} if scalar else {"dim": 1024, "n_heads": 16, "ffn": 2816}
    config = llama_config(**size, context=8192)
    return write_model(tmp_path_factory.mktemp("models") / "big.bin", checkpoint(config))


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each of the two tiny models."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A model that continues a prompt of n tokens with the alphabet, from its n-th letter on."""
    return write_model(tmp_path / "script.bin", script_checkpoint(byte_ids("abcdefghijklmnopqrstuvwxyz")))


@pytest.fixture
def llama2c(tmp_path: Path) -> Path:
    """A llama2.c checkpoint with its tokenizer, alone in tmp_path."""
    return write_llama2c_v0(tmp_path / "small.bin")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an empty cache of conversions, which is the default cache during the test.

    Digests are cached at once, although the files are new. No thread finishes drafts.
    """
    monkeypatch.setenv("LLAMAC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversions, "finish_later", lambda draft, file: None)
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**18))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    """A Hugging Face directory of a tiny LLaMA with a tokenizer."""
    return write_json(write_checkpoint(tmp_path / "hf", CASES["llama"].config), tokenizer=tokenizer_json())


@pytest.fixture
def llamac_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """A function that runs a command in this process. stdin: the bytes of a pipe, or None for a terminal."""

    def run(*arguments: object, stdin: bytes | None = None) -> Result:
        source = Terminal(io.BytesIO(b"typed")) if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", source)
        capsys.readouterr()
        try:
            code: int | str | None = run_command([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse exits by itself
            code = exit_.code
        return Result(code, *capsys.readouterr())

    return run
