"""What can go wrong in a reconcile.

OperatorError
├── SpecError        the user's fault: a condition, no retry
├── NameConflict     a foreign object has a child's name: a condition, slow retry
├── Invalid          the API server refused an object of ours, or a quota did: retry slowly
├── Forbidden        a right is missing: a condition naming verb and kind, slow retry
└── ApiUnavailable   the API server did not do it: retry with backoff
    ├── Conflict     409: somebody else wrote first
    └── Missing      404: there is no such object, or no such kind
"""

from __future__ import annotations


class OperatorError(Exception):
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
        """`after` so many seconds the API server wants to be asked again."""
        super().__init__(text)
        self.after = after


class Conflict(ApiUnavailable):
    pass


class Missing(ApiUnavailable):
    pass
