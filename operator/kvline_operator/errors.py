"""Errors of a reconcile.

OperatorError
├── PortTaken        one of the operator's own: it ends
├── SpecError        the spec is wrong: a condition, no retry
├── NameConflict     a foreign object has a child's name: a condition, slow retry
├── Invalid          the API server or a quota refused an object: a condition, slow retry
├── Forbidden        RBAC denies it: a condition naming verb and kind, slow retry
└── ApiUnavailable   the API server cannot do it now: retry with backoff
    ├── Conflict     409: changed by another client meanwhile
    └── Missing      404: no such object, or no such kind
"""

from __future__ import annotations


class OperatorError(Exception):
    pass


class PortTaken(OperatorError):
    pass


class SpecError(OperatorError):
    pass


class NameConflict(OperatorError):
    pass


class Invalid(OperatorError):
    pass


class Forbidden(OperatorError):
    pass


class ApiUnavailable(OperatorError):
    def __init__(self, text: str, after: float = 0.0) -> None:
        """`after`: seconds of the API server's Retry-After; 0 for none."""
        super().__init__(text)
        self.after = after


class Conflict(ApiUnavailable):
    pass


class Missing(ApiUnavailable):
    pass
