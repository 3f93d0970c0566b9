"""What the engine raises.

DiptychError
└── EngineError                 INTERNAL             a step gave no usable result
    ├── NonFiniteLogits         INTERNAL             … for the rows that it names; the other rows are good
    ├── InvalidSlice            INTERNAL             the caller's tokens and blocks do not fit together
    ├── ModelNotFound           NOT_FOUND            no such model here
    └── UnsupportedArchitecture FAILED_PRECONDITION  the model cannot run over a paged KV cache
"""

from __future__ import annotations

from services.errors import DiptychError


class EngineError(DiptychError):
    """A step of the engine gave no usable result."""

    code = "INTERNAL"
    retryable = False


class NonFiniteLogits(EngineError):
    """The model produced NaN or infinite logits. `rows` are the indices of the bad rows in the batch."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"the model produced non-finite logits in rows {list(rows)}")
        self.rows = rows


class InvalidSlice(EngineError):
    """A slice names tokens outside the vocabulary, blocks outside the arena, or too few blocks."""


class ModelNotFound(EngineError):
    """There is no such model on this machine, and it could not be fetched."""

    code = "NOT_FOUND"


class UnsupportedArchitecture(EngineError):
    """The model's architecture cannot be served over a paged KV cache; the message says which and why."""

    code = "FAILED_PRECONDITION"
