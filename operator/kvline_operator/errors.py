"""Errors of a reconcile.

OperatorError
├── PortTaken        one of the operator's own: it ends
├── SpecError        the spec is wrong
├── NewerState       a newer operator keeps the state of a revision
├── NameConflict     a foreign object has a child's name
├── Gone             the service was deleted meanwhile
├── Deleting         a child is being deleted: it is made again once that is done
└── ApiError         the API server's answer, or that there is none
    ├── Forbidden        RBAC denies it
    ├── Denied           an admission plug-in or a webhook refuses the object
    ├── Invalid          the object is not valid
    └── ApiUnavailable   the API server, or a webhook that it must ask, cannot do it now
        ├── Conflict     409: changed by another client meanwhile
        └── Missing      404: no such object, or no such kind
"""

from __future__ import annotations

from kvline_operator.answers import Answer


class OperatorError(Exception):
    pass


class PortTaken(OperatorError):
    pass


class SpecError(OperatorError):
    pass


class NewerState(OperatorError):
    pass


class NameConflict(OperatorError):
    pass


class Gone(OperatorError):
    pass


class Deleting(OperatorError):
    pass


class ApiError(OperatorError):
    def __init__(self, text: str, after: float = 0.0, answer: Answer | None = None) -> None:
        """`after`: seconds of the API server's Retry-After; 0 for none."""
        super().__init__(text)
        self.after = after
        self.answer = answer or Answer()


class Forbidden(ApiError):
    pass


class Denied(ApiError):
    pass


class Invalid(ApiError):
    pass


class ApiUnavailable(ApiError):
    pass


class Conflict(ApiUnavailable):
    pass


class Missing(ApiUnavailable):
    pass
