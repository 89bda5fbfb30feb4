"""The identity of a session's KV pages: everything that their bytes depend on besides the tokens.

This is the model, its adapters and the number formats, but not the kernel set, the threads or the processor
(docs/determinism.md).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from llamac import _core
from llamac.engine.identity import adapters_hash

if TYPE_CHECKING:
    from llamac.engine.session import Session

LAYOUT = 1  # changes with the arrangement of numbers in a page
FOLLOWERS = ("long_rope", "page_positions", "groups", "vocab_size")  # attributes that follow from the model


class LayerGroup(NamedTuple):
    """Layers whose keys and values have the same shape and the same window; the recurrent layers are a group, too.

    Attributes:
        window: The positions that a row sees; 0: all.
        kv_heads: The KV heads of a layer; 0: the layers are recurrent.
        head_dim: The width of a head.
        page_bytes: Bytes of a page.
    """

    window: int
    kv_heads: int
    head_dim: int
    page_bytes: int

    @property
    def is_recurrent(self) -> bool:
        """Whether the pages are states of recurrent layers."""
        return not self.kv_heads

    def __repr__(self) -> str:
        return repr(tuple(self))


def layer_groups(core: _core.Session) -> tuple[LayerGroup, ...]:
    """Return the groups of a session's layers; the recurrent layers are the last one."""
    return tuple(LayerGroup(*group) for group in _core.kv_groups(core))


@dataclass(frozen=True)
class KVIdentity:
    """The identity of a session's pages. Sessions with equal identities can exchange pages.

    Attributes:
        model: The model's id.
        adapters: SHA-256 of adapters and of replaced tensors; empty if there are none.
        numerics: The version of the order of operations.
        layout: The version of the arrangement of numbers in a page.
        kv_dtype: Number format of the pages.
        session_numerics: How the session's products round their inputs.
        long_rope: For each pair of RoPE tables, whether the session's context selects the long one.
        page_positions: Positions of a page.
        groups: The groups of layers.
        vocab_size: Logits of a row.
    """

    model: str
    adapters: str
    numerics: int
    layout: int
    kv_dtype: str
    session_numerics: str
    long_rope: tuple[bool, ...]
    page_positions: int
    groups: tuple[LayerGroup, ...]
    vocab_size: int

    def as_json(self) -> dict[str, Any]:
        """The identity as a JSON object."""
        return {**asdict(self), "long_rope": list(self.long_rope), "groups": [list(group) for group in self.groups]}

    def digest(self) -> bytes:
        """SHA-256 of the identity."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).digest()

    def differences(self, other: KVIdentity) -> list[str]:
        """Describe the attributes that differ between a file (this identity) and a session (the other one).

        Where the models differ, the attributes that follow from the model do not count.
        """
        followers = () if self.model == other.model else FOLLOWERS
        return [
            f"{field.name} is {_text(mine)} in the file and {_text(its)} in the session"
            for field in fields(self)
            if field.name not in followers
            and (mine := getattr(self, field.name)) != (its := getattr(other, field.name))
        ]


def _text(value: object) -> str:
    return repr(value) if value != "" else "none"


def kv_identity(session: Session) -> KVIdentity:
    """Return the identity of a session's pages. If the model has no checksums yet, the first call reads all weights."""
    model, config = session.model, session.model.config
    positions, _ = session._core.page_size()
    n_tables: int = config["n_rope"]
    originals = list(config["rope_original_context"])[:n_tables]
    return KVIdentity(
        model=model.file.id,
        adapters=adapters_hash(model) or "",
        numerics=model.file.header["numerics"],
        layout=LAYOUT,
        kv_dtype=session.kv_dtype,
        session_numerics=session.numerics,
        long_rope=tuple(bool(original) and session.context > original for original in originals),
        page_positions=positions,
        groups=layer_groups(session._core),
        vocab_size=session._core.vocab_size,
    )
