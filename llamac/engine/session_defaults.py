"""The settings of a session, as a model has them for sessions that do not choose their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from llamac.arguments import KVDtype, Numerics

if TYPE_CHECKING:
    from llamac.engine.model import Model


class SessionDefaults(NamedTuple):
    """Default settings of a model's sessions, as for `Model.session`. None: llamac's default."""

    context: int | None = None
    kv_dtype: KVDtype | None = None
    threads: int | None = None
    isa: str | None = None
    draft_model: Model | None = None
    numerics: Numerics = "exact"
    device: str = "cpu"

    def overridden(self, **chosen: Any) -> SessionDefaults:
        """Return these settings with those that a session has chosen. None: the session has not chosen."""
        return self._replace(**{name: value for name, value in chosen.items() if value is not None})
