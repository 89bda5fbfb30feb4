"""A restricted unpickler for the instructions that torch.save uses.

A pickle can call any function, fill a memo of any size, and nest shared objects until printing or hashing them takes
forever. Here the caller resolves names, only plain values are hashed, nothing is printed, and each instruction takes
time and memory in proportion to its bytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

from llamac.errors import UnsupportedError

MAX_INSTRUCTIONS = 1 << 21  # about 40 per tensor
INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4")
TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES")
VALUES = frozenset((*INTEGERS, *TEXTS, "BINFLOAT"))
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NO_EFFECT = frozenset(("PROTO", "FRAME", "STOP"))

Lookup = Callable[[str, str], Any]
"""Resolves (module, name), or raises."""


class Dict(dict[Any, Any]):
    """Represents collections.OrderedDict. Attributes that modules attach to it (_metadata) are dropped."""


def unpickle(data: bytes | BinaryIO, name: str, lookup: Lookup, refer: Callable[[Any], Any]) -> Any:
    """Build the object that a pickle describes.

    Args:
        data: The pickle. A stream is read exactly to the end of the pickle, so another one can follow.
        name: The file's name, for messages.
        lookup: Resolves names. It must not return a callable that a pickle must not call with arbitrary arguments.
        refer: Resolves persistent references, under the same rule.

    Raises:
        UnsupportedError: For instructions that plain tensors do not need.
        Exception: Of any kind, if the pickle is damaged.
    """
    machine = _Machine(lookup, refer)
    for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if count >= MAX_INSTRUCTIONS:
            raise ValueError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")
        if not machine.step(instruction.name, argument):
            raise UnsupportedError(
                f"{name}: its pickle has the instruction {instruction.name}, which plain tensors do not need. "
                "Use the model's safetensors file, or rewrite this one from a state dict"
            )
    return machine.stack.pop()


class _Machine:
    """The stack and memo of a pickle while it is read."""

    def __init__(self, lookup: Lookup, refer: Callable[[Any], Any]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._lookup = lookup
        self._refer = refer

    def step(self, name: str, argument: Any) -> bool:
        """Execute one instruction. Returns False if it is unknown."""
        stack = self.stack
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in TUPLES:
            stack.append(tuple(self._popped(len(stack) - TUPLES[name])))
        elif name not in NO_EFFECT:
            return self._other_step(name, argument)
        return True

    def _other_step(self, name: str, argument: Any) -> bool:
        stack = self.stack
        match name:
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._popped(self._marks.pop())))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "SETITEM":
                self._set_items(self._popped(len(stack) - 2))
            case "SETITEMS":
                self._set_items(self._popped(self._marks.pop()))
            case "APPEND":
                self._extend(self._popped(len(stack) - 1))
            case "APPENDS":
                self._extend(self._popped(self._marks.pop()))
            case "GLOBAL":
                module, _, member = argument.partition(" ")
                stack.append(self._lookup(module, member))
            case "STACK_GLOBAL":
                module, member = self._popped(len(stack) - 2)
                if not isinstance(module, str) or not isinstance(member, str):
                    raise ValueError("it looks up a name that is not a string")
                stack.append(self._lookup(module, member))
            case "BINPERSID":
                stack.append(self._refer(stack.pop()))
            case "REDUCE":
                function, arguments = self._popped(len(stack) - 2)
                stack.append(function(*arguments))
            case "BUILD":
                stack.pop()
                if not isinstance(stack[-1], Dict):
                    raise ValueError(f"it sets attributes of a {type(stack[-1]).__name__}")
            case _:
                return False
        return True

    def _popped(self, first: int) -> list[Any]:
        """Pop the stack from index `first` on."""
        if not 0 <= first <= len(self.stack):
            raise ValueError("it pops from an empty stack")
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys = items[::2]
        if not isinstance(target, dict) or not all(isinstance(key, str | int | float | None) for key in keys):
            raise ValueError("it fills an object that is not a dict with strings and numbers as keys")
        target.update(zip(keys, items[1::2], strict=True))

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to an object that is not a list")
        self.stack[-1].extend(items)
