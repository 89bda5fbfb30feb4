"""llamac and its peers behind one face, each in a process: `python -m bench.engines ENGINE PATH THREADS KIND CONTEXT`.

A worker loads a model, prints "ready", and answers each line "prefill N", "decode N" or "end" with the seconds it took.
All start from an empty context, take fixed tokens, and compute the logits of the last token only. Idle workers wait in
`readline`, so that turns do not disturb each other.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import Any


class Engine(ABC):
    """One loaded model, with room for `context` positions where an engine reserves it. `prefill` and `decode` return
    seconds."""

    @abstractmethod
    def __init__(self, path: str, threads: int, kind: str, context: int) -> None: ...

    @abstractmethod
    def prefill(self, n: int) -> float: ...

    @abstractmethod
    def decode(self, n: int) -> float: ...


class Llamac(Engine):
    """This library."""

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import llamac

        self._model = llamac.load(path)
        self._session = self._model.session(context=context, threads=threads)

    def prefill(self, n: int) -> float:
        self._session.rewind(0)
        tokens = [i % 97 for i in range(n)]
        started = time.perf_counter()
        self._session.eval(tokens)
        return time.perf_counter() - started

    def decode(self, n: int) -> float:
        self._session.rewind(0)
        started = time.perf_counter()
        for i in range(n):
            self._session.step(i % 97)
        return time.perf_counter() - started


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python's bare functions."""

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = (
            context  # a prompt goes in by one call, which cuts it into pieces of n_ubatch
        )
        settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context for {path}")

    def _run(self, tokens: list[int]) -> None:
        numbers = (self._lib.llama_token * len(tokens))(*tokens)
        code = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(numbers, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode ended with {code}")
        self._lib.llama_synchronize(self._context)

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def prefill(self, n: int) -> float:
        self._clear()
        tokens = [i % 97 for i in range(n)]
        started = time.perf_counter()
        self._run(tokens)
        return time.perf_counter() - started

    def decode(self, n: int) -> float:
        self._clear()
        started = time.perf_counter()
        for i in range(n):
            self._run([i % 97])
        return time.perf_counter() - started


class CTranslate2(Engine):
    """CTranslate2's generator. A step is the difference of a generation of n + 1 tokens and of one."""

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(path, compute_type=kind, intra_threads=threads, inter_threads=1)

    def _generate(self, prompt: int, n: int) -> float:
        tokens = [[f"t{1 + i % 97}" for i in range(prompt)]]
        started = time.perf_counter()
        self._generator.generate_batch(
            tokens, max_length=n, min_length=n, beam_size=1, sampling_topk=1, include_prompt_in_result=False
        )
        return time.perf_counter() - started

    def prefill(self, n: int) -> float:
        return self._generate(n, 1)

    def decode(self, n: int) -> float:
        return self._generate(1, n + 1) - self._generate(1, 1)


class Transformers(Engine):
    """transformers with PyTorch on the CPU."""

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self._torch: Any = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, kind)).eval()

    def _run(self, tokens: list[int], cache: Any) -> Any:
        ids = self._torch.tensor([tokens])
        with self._torch.inference_mode():
            done = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return done.past_key_values

    def prefill(self, n: int) -> float:
        started = time.perf_counter()
        self._run([i % 97 for i in range(n)], None)
        return time.perf_counter() - started

    def decode(self, n: int) -> float:
        cache = None
        started = time.perf_counter()
        for i in range(n):
            cache = self._run([i % 97], cache)
        return time.perf_counter() - started


ENGINES: dict[str, Any] = {
    "llamac": Llamac,
    "llama.cpp": LlamaCpp,
    "ctranslate2": CTranslate2,
    "transformers": Transformers,
}
NEEDS = {
    "llamac": ("llamac",),
    "llama.cpp": ("llama_cpp",),
    # its models are converted from a Hugging Face folder
    "ctranslate2": ("ctranslate2", "transformers", "torch"),
    "transformers": ("transformers", "torch"),
}


def missing(engine: str) -> list[str]:
    """The modules that an engine needs and that are not installed."""
    return [name for name in NEEDS[engine] if find_spec(name) is None]


def main() -> None:
    engine, path, threads, kind, context = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    # what libraries print must not stand between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded = ENGINES[engine](path, int(threads), kind, int(context))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        what, _, count = line.partition(" ")
        if what.strip() == "end":
            break
        print(getattr(loaded, what)(int(count)), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # without the engines' own ways to end, some of which take seconds


if __name__ == "__main__":
    main()
