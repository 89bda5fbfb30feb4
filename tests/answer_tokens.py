"""Vocabularies with the special tokens of each format, which decoded text does not show."""

from __future__ import annotations

import functools
import json

from vocab_samples import tokenizer_json

from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer

EOS = 257
# The tokens that mark calls in the vocabularies of the models.
MARKS = {
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "deepseek": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    "deepseek-v3.2": ("\uff5cDSML\uff5c",),
    "deepseek-v4": ("\uff5cDSML\uff5c",),
    "command-r-plus": (),
    "kimi": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "qwen3-coder": ("<tool_call>", "</tool_call>"),
    "functionary": (),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "llama4": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "phi4-mini": ("<|tool_call|>", "<|/tool_call|>"),
    "granite": ("<|tool_call|>",),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "ernie": ("<tool_call>", "</tool_call>"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "command-r": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "llama3": ("<|python_tag|>",),
    "gemma": (),
}


@functools.cache
def vocabulary(marks: tuple[str, ...]) -> Tokenizer:
    """A byte-level vocabulary with special tokens."""
    names = ("<s>", "</s>", *marks)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ids = [256, EOS, *range(259, 259 + len(marks))]
    added = [{"id": token, "content": name, **flags} for token, name in zip(ids, names, strict=True)]
    special = SpecialTokens(bos_id=256, add_bos=False, add_eos=False, eos_id=EOS, stop_ids=(EOS,))
    return Tokenizer.from_json(json.dumps(tokenizer_json(added_tokens=added)).encode(), special)
