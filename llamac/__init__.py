"""llamac runs language models on ordinary CPUs: fast, instant to load, the same bits on every machine and thread count.

    import llamac

    with llamac.load("model.bin") as model:
        print(model.generate("Once upon a time", max_tokens=64).text)
        for piece in model.stream("Once", temperature=0.8, seed=1):
            print(piece, end="", flush=True)

Public names are imported on first use (PEP 562), so that `import llamac` costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llamac import export, models, ops
    from llamac.engine.batching.async_engine import AsyncEngine
    from llamac.engine.batching.engine import Engine
    from llamac.engine.batching.engine_stats import EngineStats
    from llamac.engine.batching.request import Request
    from llamac.engine.cache.prefix_cache import PrefixStats
    from llamac.engine.generation.logprobs import TokenLogprobs
    from llamac.engine.generation.output import Completion, Timings, Usage
    from llamac.engine.generation.stream import Stream
    from llamac.engine.inspection.explain import ExplainedToken, Explanation
    from llamac.engine.memory import MemoryPlan, MemoryUse
    from llamac.engine.model import Model
    from llamac.engine.receipts.receipt import Receipt
    from llamac.engine.receipts.replay import Replay
    from llamac.engine.rows import STAGES
    from llamac.engine.sampling.params import SamplingParams
    from llamac.engine.scoring.cancellation import Cancellation
    from llamac.engine.scoring.ranking import Ranked
    from llamac.engine.scoring.scores import Score
    from llamac.engine.session import Session
    from llamac.errors import (
        ArgumentError,
        ArgumentTypeError,
        BusyError,
        CancelledError,
        ChatTemplateError,
        ClosedError,
        ContextFullError,
        DeviceError,
        ExportError,
        HubError,
        LlamacError,
        LlamacWarning,
        ModelError,
        OutOfMemoryError,
        QueueFullError,
        SessionFileError,
        TokenizerError,
        UnsupportedError,
    )
    from llamac.guided.guides import Choice, Grammar, Json, Regex
    from llamac.sources.loading import load
    from llamac.sources.names import resolve
    from llamac.sources.replaying import replay
    from llamac.text.chat import ChatTemplate
    from llamac.text.special_tokens import SpecialTokens
    from llamac.text.tokenizer import Tokenizer
    from llamac.tools.functions import tool_schema
    from llamac.tools.message import Delta, Message, ToolCall, ToolCallDelta

# The module that defines each public name. The imports above tell type checkers the same; a test compares the two.
_MODULES = {
    "llamac.engine.batching.async_engine": ["AsyncEngine"],
    "llamac.engine.batching.engine": ["Engine"],
    "llamac.engine.batching.engine_stats": ["EngineStats"],
    "llamac.engine.inspection.explain": ["ExplainedToken", "Explanation"],
    "llamac.engine.generation.stream": ["Stream"],
    "llamac.engine.generation.logprobs": ["TokenLogprobs"],
    "llamac.engine.memory": ["MemoryPlan", "MemoryUse"],
    "llamac.engine.model": ["Model"],
    "llamac.engine.generation.output": ["Completion", "Timings", "Usage"],
    "llamac.engine.cache.prefix_cache": ["PrefixStats"],
    "llamac.engine.scoring.cancellation": ["Cancellation"],
    "llamac.engine.scoring.ranking": ["Ranked"],
    "llamac.engine.receipts.receipt": ["Receipt"],
    "llamac.engine.receipts.replay": ["Replay"],
    "llamac.engine.batching.request": ["Request"],
    "llamac.engine.rows": ["STAGES"],
    "llamac.engine.sampling.params": ["SamplingParams"],
    "llamac.engine.scoring.scores": ["Score"],
    "llamac.engine.session": ["Session"],
    "llamac.errors": [
        "ArgumentError",
        "ArgumentTypeError",
        "BusyError",
        "CancelledError",
        "ChatTemplateError",
        "ClosedError",
        "ContextFullError",
        "DeviceError",
        "ExportError",
        "HubError",
        "LlamacError",
        "LlamacWarning",
        "ModelError",
        "OutOfMemoryError",
        "QueueFullError",
        "SessionFileError",
        "TokenizerError",
        "UnsupportedError",
    ],
    "llamac.guided.guides": ["Choice", "Grammar", "Json", "Regex"],
    "llamac.sources.loading": ["load"],
    "llamac.sources.names": ["resolve"],
    "llamac.sources.replaying": ["replay"],
    "llamac.text.chat": ["ChatTemplate"],
    "llamac.text.special_tokens": ["SpecialTokens"],
    "llamac.text.tokenizer": ["Tokenizer"],
    "llamac.tools.functions": ["tool_schema"],
    "llamac.tools.message": ["Delta", "Message", "ToolCall", "ToolCallDelta"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBPACKAGES = ("export", "models", "ops")

__all__ = [
    "STAGES",
    "ArgumentError",
    "ArgumentTypeError",
    "AsyncEngine",
    "BusyError",
    "Cancellation",
    "CancelledError",
    "ChatTemplate",
    "ChatTemplateError",
    "Choice",
    "ClosedError",
    "Completion",
    "ContextFullError",
    "Delta",
    "DeviceError",
    "Engine",
    "EngineStats",
    "ExplainedToken",
    "Explanation",
    "ExportError",
    "Grammar",
    "HubError",
    "Json",
    "LlamacError",
    "LlamacWarning",
    "MemoryPlan",
    "MemoryUse",
    "Message",
    "Model",
    "ModelError",
    "OutOfMemoryError",
    "PrefixStats",
    "QueueFullError",
    "Ranked",
    "Receipt",
    "Regex",
    "Replay",
    "Request",
    "SamplingParams",
    "Score",
    "Session",
    "SessionFileError",
    "SpecialTokens",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "ToolCallDelta",
    "UnsupportedError",
    "Usage",
    "__version__",
    "export",
    "load",
    "models",
    "ops",
    "replay",
    "resolve",
    "tool_schema",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ImportError as error:
        from llamac.errors import NO_OPENMP, lacks_openmp

        if lacks_openmp(error):
            raise ImportError(f"{NO_OPENMP}: {error}", name="llamac._core") from None
        if importlib.util.find_spec("llamac._core") is not None:
            raise
        raise ModuleNotFoundError(
            f"{__path__[0]} has llamac's sources without its compiled core: run Python in another folder to use the "
            "installed llamac, or build the core here with `pip install -e .`",
            name="llamac._core",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
