"""Reads the RoPE keys of config.json, old and new: one table for all layers or one per kind of layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.hf.family import Family
from llamac.export.hf.keys import Keys, shortened
from llamac.export.rope import Rope, make_rope

PROPORTIONAL = "proportional"  # the frequencies of whole heads; only the first ones rotate
# Keys of rope_parameters besides rope_type and rope_theta: required and optional ones per type.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    PROPORTIONAL: ((), ("factor", "partial_rotary_factor")),
}
NTK_ALPHA = "ntk_alpha"  # what "dynamic" with a number alpha means in Hunyuan
# Types that only some families have (`Family.rope_names`): "ntk" of gte's own code.
ROPE_KEYS_OF_FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {"ntk_fixed": (("factor",), ())}
IGNORED = {"yarn": ("attn_factor",)}  # keys of a type that transformers ignores; other programs read this one
WITH_ORIGINAL_CONTEXT = ("yarn", "longrope", "llama3")
ORIGINAL_CONTEXT = "original_max_position_embeddings"
QUERY_BETA = "llama_4_scaling_beta"
ANY_ROPE_KEY = {key for keys in ROPE_KEYS.values() for group in keys for key in group} | {ORIGINAL_CONTEXT}
# Names of the base and of the rotated fraction of a head, depending on the family.
BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
LOCAL_BASES = ("rope_local_base_freq", "local_rope_theta")  # of layers with a window
PARTS = ("partial_rotary_factor", "rotary_pct")
# Kinds of layers that can have separate tables.
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class RopeParameters:
    """The parameters of a RoPE table.

    Attributes:
        kind: The rope_type.
        dim: The dimensions of a head that the frequencies span. If it is odd, one more dimension is rotated.
        values: The parameters of this type, by name.
    """

    kind: str
    dim: int
    values: dict[str, Any]

    def table(self, context: int) -> Rope:
        """Compute the frequencies for a model with `context` positions.

        Raises:
            ExportError: If they are invalid.
        """
        return make_rope(self.kind, self.values, self.dim, context)


def rope_parameters(
    keys: Keys,
    family: Family,
    head_dims: Mapping[str, int],
    context: int,
    warnings: list[str],
    stated_part: float = 1.0,
) -> dict[str, RopeParameters]:
    """Parameters per kind of layer (FULL, SLIDING) if the family has two tables, else only for FULL.

    head_dims: The width of heads in each kind.
    stated_part: The only partial_rotary_factor that a family without such a choice can state.
    """
    name, values = _rope_object(keys, family.harmless)
    values = values or dict(family.default_rope)
    readers = {kind: _Reader(keys, family, dim, context, warnings, stated_part) for kind, dim in head_dims.items()}
    theta = readers[FULL].outer(BASES)
    if not family.two_ropes:
        return {FULL: readers[FULL].read(name, values, theta)}
    local = theta
    if local_key := next((key for key in LOCAL_BASES if key in family.keys), ""):
        local = keys.number(local_key, family.keys[local_key])
    elif "rope_theta" in keys.values and theta != family.keys.get("rope_theta", theta):
        keys.wrong("rope_theta", f"{family.keys['rope_theta']}: with others, versions of transformers differ")
    if name == "rope_scaling" or not values:  # the old keys, whose scaling usually applies to full attention only
        # versions of transformers differ in this case
        if values.get("rope_type") is None and values.get("type", "default") != "default":
            keys.problems.append("rope_scaling.rope_type is missing: transformers does not read rope_scaling.type here")
        if family.default_rope:
            keys.wrong(name, f"rope_parameters with {FULL} and {SLIDING} in its place")
        full = readers[FULL].read(name, values, theta)
        if "local_rope_theta" in family.keys:  # ModernBERT scales all layers, whose heads have the same width
            base = full.values["rope_theta"] if "rope_theta" in values else local
            return {FULL: full, SLIDING: replace(full, values=full.values | {"rope_theta": base})}
        return {FULL: full, SLIDING: readers[SLIDING].read("rope_parameters", {}, local)}
    nested = Keys(values, f"{name}.")
    parts = {kind: nested.value(kind) or {} for kind in (FULL, SLIDING)}
    for kind in parts:
        if not isinstance(parts[kind], dict):
            nested.wrong(kind, "an object")
            parts[kind] = {}
    for key in nested.unused():
        nested.wrong(key, f"only {FULL} and {SLIDING} in {name}")
    keys.problems += nested.problems
    bases = {FULL: theta, SLIDING: local}
    return {kind: readers[kind].read(f"{name}.{kind}", parts[kind], bases[kind]) for kind in parts}


def states_base(keys: Keys) -> bool:
    """Whether config.json has a base of RoPE."""
    _, values = _rope_object(keys)
    return any(value is not None for value in (keys.value("rope_theta"), values.get("rope_theta")))


def refuse_scaling(keys: Keys) -> None:
    """Report a scaling of RoPE in a config.json without a base, whose model has no RoPE."""
    name, values = _rope_object(keys)
    if any(value not in (None, "default") for value in values.values()):
        keys.wrong(name, "none without rope_theta, which this model's RoPE needs")


def _rope_object(keys: Keys, harmless: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """(name, content) of the object with the scaling parameters, unless it is one without effect. It can be empty.

    A config.json for transformers 4 and 5 has both objects, and the base outside, in the second, or both.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("rope_scaling", "rope_parameters"):
        value = None if name in harmless else keys.value(name)
        if isinstance(value, dict) and value:
            found.append((name, value))
        elif value not in (None, {}):
            keys.wrong(name, "an object")
    stated = [{"rope_theta": keys.values.get("rope_theta")} | values for _, values in found]
    if len(stated) > 1 and stated[0] != stated[1]:
        keys.problems.append("rope_scaling and rope_parameters differ, expected only one of them")
    return found[0] if found else ("rope_parameters", {})


@dataclass(frozen=True)
class _Reader:
    """The common inputs of a config's tables."""

    keys: Keys
    family: Family
    head_dim: int
    context: int
    warnings: list[str]
    stated_part: float

    def outer(self, names: tuple[str, ...]) -> float | None:
        """The top-level number of config.json under one of these names of the family, or None."""
        keys, row = self.keys, self.family.keys
        known = [name for name in names if name in row]
        found = {name: keys.number(name) for name in known if name in keys.values}
        default = next((row[name] for name in known if row[name] is not None), None)
        for name in known:
            if row[name] is not None and name in keys.nulls:
                keys.wrong(name, "a number")
        if len(set(found.values())) > 1:
            keys.problems.append(f"{' and '.join(found)} differ, expected only one of them")
        preferred = next((name for name in known if row[name] is not None), "")
        if preferred not in found and set(found.values()) - {default}:  # versions of transformers differ here
            keys.wrong(next(iter(found)), f"{default}: {preferred} is missing, which other versions require")
        return next((value for value in (*found.values(), default) if value is not None), None)

    def read(self, name: str, values: dict[str, Any], theta: float | None) -> RopeParameters:
        """The object `name` of config.json."""
        inner = Keys(values, f"{name}.")
        kind = next((values[key] for key in ("rope_type", "type") if values.get(key) is not None), "default")
        if isinstance(kind, str):
            kind = self.family.rope_names.get(kind, kind)
        # the third has no effect; YaRN's authors wrote it
        for key in ("rope_type", "type", "finetuned", *self.family.rope_harmless):
            inner.value(key)
        known = ROPE_KEYS | {name: ROPE_KEYS_OF_FAMILIES[name] for name in self._own_types()}
        if not isinstance(kind, str) or kind not in known:
            raise UnsupportedError(
                f"config.json: {name} has the type {shortened(kind)}; supported are {', '.join(known)}"
            )
        extras = self.family.rope_extras
        if kind == "default" and self.family.partial_default and values.get(PARTS[0]) not in (None, 1):
            kind = PROPORTIONAL
        if kind == "dynamic" and "alpha" in extras and inner.values.get("alpha"):
            kind = NTK_ALPHA
        needed, optional = ((), ()) if kind == NTK_ALPHA else known[kind]
        for key in needed:
            inner.need(key)
        if kind == "yarn" and "factor" not in values:  # null has a meaning here: the ratio of the two contexts
            inner.need("factor")
        parameters = {key: _parameter(inner, key, is_there=key in values) for key in (*needed, *optional)}
        parameters |= {key: inner.number(key) for key in extras}
        part = self._part()
        if kind == PROPORTIONAL and parameters[PARTS[0]] is None:
            parameters[PARTS[0]] = part
        if self.family.two_ropes and parameters.get("truncate") is False:
            inner.wrong("truncate", "true: with separate tables per kind of layer, transformers always rounds")
        parameters["rope_theta"] = self._theta(inner, theta)
        self._original_context(inner, kind, parameters)
        dim = self._rotated_dims(inner, kind, part)
        for key in inner.unused():
            if key in ANY_ROPE_KEY or key in IGNORED.get(kind, ()):
                self.warnings.append(f"config.json: {key} has no effect for RoPE of type {kind!r}: ignored")
            else:
                inner.unknown(key)
        self.keys.problems += inner.problems
        return RopeParameters(kind, dim, parameters)

    def _own_types(self) -> list[str]:
        return [name for name in ROPE_KEYS_OF_FAMILIES if name in self.family.rope_names.values()]

    def _theta(self, inner: Keys, outer: float | None) -> float:
        theta = inner.number("rope_theta", outer)
        if outer is None:
            inner.need("rope_theta")
        if any(name in self.keys.values for name in BASES) and theta != outer:
            self.warnings.append(
                f"config.json has two values of rope_theta, {outer} and, in its RoPE object, {theta}: using {theta}"
            )
        return theta or 0.0

    def _original_context(self, inner: Keys, kind: str, parameters: dict[str, Any]) -> None:
        """The context before the extension. The top-level key takes precedence over the RoPE object's."""
        keys, default = self.keys, self.family.keys.get(ORIGINAL_CONTEXT)
        outer = keys.size(ORIGINAL_CONTEXT, "context", default) if default else None
        if kind not in WITH_ORIGINAL_CONTEXT:
            return
        nested = inner.size(ORIGINAL_CONTEXT, "context", outer or self.context)
        parameters[ORIGINAL_CONTEXT] = outer or keys.size(ORIGINAL_CONTEXT, "context", nested)
        if outer not in (None, nested):
            self.warnings.append(
                f"config.json has two values of {ORIGINAL_CONTEXT}, {nested} in its RoPE object and {outer}:"
                f" using {outer}"
            )

    def _part(self) -> float | None:
        """The rotated fraction of a head that the top level of config.json states; None: the family has no such key."""
        turned: int | None = self.family.keys.get("rotary_dim")
        if "rotary_dim" in self.family.keys:
            if turned is not None and "rotary_dim" in self.keys.nulls:
                self.keys.wrong("rotary_dim", f"an integer from 1 to {self.head_dim}")
            turned = self.keys.integer("rotary_dim", 1, self.head_dim) or turned
        if turned is not None and PARTS[0] not in self.keys.values:
            return turned / self.head_dim
        return self.outer(PARTS)

    def _rotated_dims(self, inner: Keys, kind: str, outer: float | None) -> int:
        """The number of dimensions of a head that the frequencies span. outer: `_part`."""
        if outer is None:
            for there in (self.keys,) if kind == PROPORTIONAL else (self.keys, inner):
                if there.number(PARTS[0], self.stated_part, nullable=True) != self.stated_part:
                    whole = f"1: {self.family.model_type} rotates whole heads"
                    there.wrong(PARTS[0], whole if self.stated_part == 1 else f"{self.stated_part:g}, by the widths")
        part = 1.0 if outer is None or kind == PROPORTIONAL else inner.number(PARTS[0], outer) or 0.0
        dim = int(self.head_dim * part)
        rotated = dim + dim % 2
        if not self.keys.problems and not (0 < rotated <= self.head_dim and (rotated == dim or self.family.odd_rope)):
            key = next((name for name in PARTS if self.family.keys.get(name) is not None), "head_dim")
            least = "a number from 1" if self.family.odd_rope else "an even number from 2"
            self.keys.problems.append(
                f"{key}: RoPE rotates {dim} of the {self.head_dim} dimensions of a head, expected {least} to "
                f"{self.head_dim - self.head_dim % 2}"
            )
        return max(dim, 1)


def _parameter(inner: Keys, key: str, *, is_there: bool) -> Any:
    if key in ("short_factor", "long_factor"):
        return inner.numbers(key)
    if key == "truncate":
        return inner.flag(key, not is_there, nullable=True)  # null is false, as in transformers
    return inner.number(key)
