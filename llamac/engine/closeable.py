"""The base class of objects with a `close` method, such as models and sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

from llamac.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Self


class Closeable(ABC):
    """A context manager that closes itself."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the object has been closed."""

    @abstractmethod
    def close(self) -> None:
        """Free the object's resources. Closing twice is fine."""

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the {type(self).__name__.lower()} is closed")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
