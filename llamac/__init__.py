"""llamac runs language models on ordinary CPUs: fast, instant to load, the same bits on every machine and thread count.

import llamac

with llamac.load("model.bin") as model:
    print(model.generate("Once upon a time", max_tokens=64).text)
    for piece in model.stream("Once", temperature=0.8, seed=1):
        print(piece, end="", flush=True)
"""

try:
    from llamac._core import stages as _stages
except ModuleNotFoundError as _error:
    if _error.name != "llamac._core":
        raise
    raise ModuleNotFoundError(
        f"{__path__[0]} holds llamac's sources without its compiled core: use the installed llamac from another "
        "folder, or build the core here with `pip install -e .`",
        name=_error.name,
    ) from None
from llamac.chat import ChatTemplate
from llamac.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    CancelledError,
    ChatTemplateError,
    ClosedError,
    ContextFullError,
    ExportError,
    HubError,
    LlamacError,
    ModelError,
    OutOfMemoryError,
    TokenizerError,
    UnsupportedError,
)
from llamac.generation import Completion, Stream, Timings, Usage
from llamac.model import Model, load
from llamac.session import Session
from llamac.tokenizer import SpecialTokens, Tokenizer

__version__ = "0.1.0"

STAGES = _stages()

__all__ = [
    "STAGES",
    "ArgumentError",
    "ArgumentTypeError",
    "BusyError",
    "CancelledError",
    "ChatTemplate",
    "ChatTemplateError",
    "ClosedError",
    "Completion",
    "ContextFullError",
    "ExportError",
    "HubError",
    "LlamacError",
    "Model",
    "ModelError",
    "OutOfMemoryError",
    "Session",
    "SpecialTokens",
    "Stream",
    "Timings",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedError",
    "Usage",
    "__version__",
    "load",
]
