"""A common interface to llamac and its peers. Each engine runs in a separate worker process.

    python -m bench.engines ENGINE PATH THREADS KIND CONTEXT

A worker loads a model and prints "ready". It answers each line "prefill N" or "decode N" with the seconds that it took
(CPU time with BENCH_CLOCK=cpu in the environment), and exits on "end". Every engine starts from an empty context, uses
fixed tokens, and computes the logits of the last token only. Idle workers block in `readline` and do not disturb the
running one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

# CPU time excludes the time of other programs. This is fair only with one thread: waiting threads of some engines spin
clock = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter


class Engine(ABC):
    """One loaded model. `prefill` and `decode` take a number of tokens and return seconds.

    Args:
        path: The model file or folder.
        threads: Threads to compute with.
        kind: The engine's number format.
        context: Positions to reserve, for engines that reserve them.
    """

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

        self._model = llamac.load(path, numerics="fast" if kind.endswith(" fast") else "exact")
        self._session = self._model.session(context=context, threads=threads)

    def prefill(self, n: int) -> float:
        self._session.truncate(0)
        tokens = [i % 97 for i in range(n)]
        started = clock()
        self._session.eval(tokens)
        return clock() - started

    def decode(self, n: int) -> float:
        self._session.truncate(0)
        started = clock()
        for i in range(n):
            self._session.step(i % 97)
        return clock() - started


class LlamaCpp(Engine):
    """llama.cpp through the low-level functions of llama-cpp-python."""

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        # a prompt is one call, which llama.cpp splits into chunks of n_ubatch
        settings.n_ctx = settings.n_batch = context
        settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot create a context for {path}")

    def _run(self, tokens: list[int]) -> None:
        numbers = (self._lib.llama_token * len(tokens))(*tokens)
        code = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(numbers, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        self._lib.llama_synchronize(self._context)

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def prefill(self, n: int) -> float:
        self._clear()
        tokens = [i % 97 for i in range(n)]
        started = clock()
        self._run(tokens)
        return clock() - started

    def decode(self, n: int) -> float:
        self._clear()
        started = clock()
        for i in range(n):
            self._run([i % 97])
        return clock() - started


class Library(Engine):
    """llama.cpp or ik_llama.cpp as a shared library.

    `kind` is the library's path, then the folders of its headers, separated by colons.
    """

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        from bench.llama_library import F16, LlamaLibrary

        library, *headers = map(Path, kind.split(":"))
        self._model = LlamaLibrary(
            library, Path(path), context, threads, cache=F16, step=min(context, 512), headers=headers
        )

    def prefill(self, n: int) -> float:
        self._model.clear()
        tokens = [i % 97 for i in range(n)]
        started = clock()
        self._model.decode(tokens, 0)
        return clock() - started

    def decode(self, n: int) -> float:
        self._model.clear()
        started = clock()
        for i in range(n):
            self._model.decode([i % 97], i)
        return clock() - started


class CTranslate2(Engine):
    """CTranslate2's generator.

    It has no single steps: the time of n steps is that of generating n + 1 tokens minus that of generating one.
    """

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(path, compute_type=kind, intra_threads=threads, inter_threads=1)

    def _generate(self, prompt: int, n: int) -> float:
        tokens = [[f"t{1 + i % 97}" for i in range(prompt)]]
        started = clock()
        self._generator.generate_batch(
            tokens, max_length=n, min_length=n, beam_size=1, sampling_topk=1, include_prompt_in_result=False
        )
        return clock() - started

    def prefill(self, n: int) -> float:
        return self._generate(n, 1)

    def decode(self, n: int) -> float:
        return self._generate(1, n + 1) - self._generate(1, 1)


class OpenVino(Engine):
    """OpenVINO GenAI's pipeline, with its defaults (keys and values in 8 bits, bf16 where the processor multiplies it)
    except one: it keeps no prompts, since all rounds send the same tokens.

    It has no single steps: the time of n steps is that of generating n + 1 tokens minus that of generating one.
    """

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import openvino
        import openvino_genai

        self._tensor: Any = openvino.Tensor
        self._inputs: Any = openvino_genai.TokenizedInputs
        settings = openvino_genai.SchedulerConfig()
        settings.enable_prefix_caching = False
        settings.max_num_batched_tokens = 1 << 30  # a prompt is one batch, as by default
        self._pipeline = openvino_genai.LLMPipeline(
            path, "CPU", scheduler_config=settings, INFERENCE_NUM_THREADS=threads
        )

    def _generate(self, prompt: int, n: int) -> float:
        ids = np.array([[1 + i % 97 for i in range(prompt)]])
        inputs = self._inputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        started = clock()
        self._pipeline.generate(inputs, max_new_tokens=n, min_new_tokens=n, ignore_eos=True, do_sample=False)
        return clock() - started

    def prefill(self, n: int) -> float:
        return self._generate(n, 1)

    def decode(self, n: int) -> float:
        return self._generate(1, n + 1) - self._generate(1, 1)


class OnnxRuntime(Engine):
    """ONNX Runtime GenAI."""

    def __init__(self, path: str, threads: int, kind: str, context: int) -> None:
        import onnxruntime_genai

        self._library: Any = onnxruntime_genai
        config = onnxruntime_genai.Config(path)
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = onnxruntime_genai.Model(config)
        self._params = onnxruntime_genai.GeneratorParams(self._model)
        self._params.set_search_options(max_length=context)

    def _run(self, batches: list[list[int]]) -> float:
        generator = self._library.Generator(self._model, self._params)
        inputs = [np.array([tokens], np.int32) for tokens in batches]
        started = clock()
        for tokens in inputs:
            generator.append_tokens(tokens)
        return clock() - started

    def prefill(self, n: int) -> float:
        return self._run([[i % 97 for i in range(n)]])

    def decode(self, n: int) -> float:
        return self._run([[i % 97] for i in range(n)])


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
            output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.past_key_values

    def prefill(self, n: int) -> float:
        started = clock()
        self._run([i % 97 for i in range(n)], None)
        return clock() - started

    def decode(self, n: int) -> float:
        cache = None
        started = clock()
        for i in range(n):
            cache = self._run([i % 97], cache)
        return clock() - started


ENGINES: dict[str, Any] = {
    "llamac": Llamac,
    "llama.cpp": LlamaCpp,
    "library": Library,
    "ctranslate2": CTranslate2,
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "transformers": Transformers,
}
NEEDS = {
    "llamac": ("llamac",),
    "llama.cpp": ("llama_cpp",),
    "library": (),
    # bench.peer_models converts the models of these from a Hugging Face folder
    "ctranslate2": ("ctranslate2", "transformers", "torch"),
    "openvino": ("openvino_genai", "optimum", "nncf", "torch"),
    "onnxruntime": ("onnxruntime_genai", "onnx_ir", "transformers", "torch"),
    "transformers": ("transformers", "torch"),
}


def missing(engine: str) -> list[str]:
    """Return the modules that an engine needs but that are not installed."""
    return [name for name in NEEDS[engine] if find_spec(name) is None]


def main() -> None:
    engine, path, threads, kind, context = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    # keep the engines' own output out of the answers: redirect it to standard error
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
    os._exit(0)  # skips the engines' shutdown, which takes seconds in some


if __name__ == "__main__":
    main()
