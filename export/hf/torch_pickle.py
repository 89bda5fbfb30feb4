"""Reads the pickles that torch.save writes, without obeying them: a machine of its own for the instructions they use.

A pickle can name any function and call it, fill a memo of any size, and nest what it shares until printing or hashing
it takes forever. Here names are looked up by the caller, only keys that are plain values are hashed, nothing is
printed, and every instruction takes about as much time and memory as it has bytes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

from llamac.errors import UnsupportedError

MAX_INSTRUCTIONS = 1 << 21  # a tensor takes about 40
INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4")
TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES")
VALUES = frozenset((*INTEGERS, *TEXTS, "BINFLOAT"))
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NO_EFFECT = frozenset(("PROTO", "FRAME", "STOP"))

Lookup = Callable[[str, str], Any]
"""Gives what stands for (module, name), or raises."""


class Dict(dict[Any, Any]):
    """Stands for collections.OrderedDict; the attributes that modules hang on it (_metadata) are dropped."""


def unpickle(data: bytes | BinaryIO, name: str, lookup: Lookup, refer: Callable[[Any], Any]) -> Any:
    """The object that a pickle describes. name: of the file, for messages. refer: gives the object of a reference.

    Of a stream of bytes in memory no more is read than the pickle has, so that another can follow.

    What `lookup` and `refer` give must not be callable, unless a pickle may call it with any arguments.

    Raises UnsupportedError for instructions that plain tensors do not need, and any Exception for damage.
    """
    machine = _Machine(lookup, refer)
    for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if count >= MAX_INSTRUCTIONS:
            raise ValueError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")
        if not machine.step(instruction.name, argument):
            raise UnsupportedError(
                f"{name}: its pickle has the instruction {instruction.name}, which plain tensors have no need of. "
                "Use the model's safetensors file, or rewrite this one from a state dict"
            )
    return machine.stack.pop()


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self, lookup: Lookup, refer: Callable[[Any], Any]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._lookup = lookup
        self._refer = refer

    def step(self, name: str, argument: Any) -> bool:
        """Carries out one instruction; False if it is not known."""
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
                    raise ValueError("it looks up a name that is no text")
                stack.append(self._lookup(module, member))
            case "BINPERSID":
                stack.append(self._refer(stack.pop()))
            case "REDUCE":
                function, arguments = self._popped(len(stack) - 2)
                stack.append(function(*arguments))
            case "BUILD":
                stack.pop()
                if not isinstance(stack[-1], Dict):
                    raise ValueError(f"it gives attributes to a {type(stack[-1]).__name__}")
            case _:
                return False
        return True

    def _popped(self, first: int) -> list[Any]:
        """Takes what lies on the stack from `first` on."""
        if not 0 <= first <= len(self.stack):
            raise ValueError("it takes more from its stack than there is")
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys = items[::2]
        if not isinstance(target, dict) or not all(isinstance(key, str | int | float | None) for key in keys):
            raise ValueError("it fills something that is no dict with texts and numbers as keys")
        target.update(zip(keys, items[1::2], strict=True))

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to something that is no list")
        self.stack[-1].extend(items)
