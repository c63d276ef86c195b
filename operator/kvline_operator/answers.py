"""Why the API server refuses a call, from the Status that it answers with. Pure.

Fields decide where one tells. Admission plug-ins differ in their messages alone. Each has a fixed
grammar at a fixed place: it is matched there, so that no name of an object is taken for it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum


class Refusal(StrEnum):
    """Who refuses. The values are reasons of conditions."""

    RIGHTS = "Forbidden"  # RBAC
    QUOTA = "QuotaExceeded"
    LIMIT_RANGE = "LimitRangeViolated"
    POD_SECURITY = "PodSecurityViolated"
    ADMISSION = "AdmissionDenied"  # a webhook, a ValidatingAdmissionPolicy, any other plug-in
    WEBHOOK = "WebhookUnavailable"  # one that must be asked does not answer
    NAMESPACE = "NamespaceTerminating"
    SCHEMA = "SpecInvalid"  # the object is not valid
    NONE = "ApiUnavailable"  # nobody: the API server cannot do it now


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A Status of the API server; without a code where it did not answer."""

    code: int = 0
    reason: str = ""
    message: str = ""
    kind: str = ""  # of the object, as the API server has it: a resource such as pods
    name: str = ""
    causes: tuple[Cause, ...] = ()

    @classmethod
    def parse(cls, code: int, raw: bytes | str) -> Answer:
        """Of a body that may be anything: a proxy's page has no fields."""
        try:
            body = json.loads(raw)
            details = body.get("details") or {}
            found = [c for c in details.get("causes") or [] if isinstance(c, dict)]
            causes = tuple(
                Cause(str(c.get("reason", "")), str(c.get("field", "")), str(c.get("message", "")))
                for c in found
            )
            of = str(details.get("kind", "")), str(details.get("name", ""))
            return cls(code, str(body.get("reason", "")), str(body.get("message", "")), *of, causes)
        except (ValueError, AttributeError):
            return cls(code)

    @property
    def exists(self) -> bool:
        """Whether an object of that name is there already."""
        return self.reason == "AlreadyExists"

    @property
    def refusal(self) -> Refusal:
        if any(c.reason == "NamespaceTerminating" for c in self.causes):
            return Refusal.NAMESPACE
        if (named := of_message(self.message)) is not None:
            return named
        if self.code == 403:
            return Refusal.RIGHTS
        return Refusal.SCHEMA if self.code in (400, 413, 422) else Refusal.NONE


DENIED = re.compile(r'admission webhook "[^"]+" denied the request')
SILENT = re.compile(r'Internal error occurred: failed calling webhook "[^"]+": ')
FORBIDDEN = re.compile(r'(?:\S+ (?:"[^"]*" )?is )?forbidden: (.*)', re.DOTALL)
# A LimitRange's default limit that is below the request. A limit of ours never is.
BELOW = re.compile(
    r'Pod "[^"]+" is invalid: spec\.\w+\[\d+\]\.resources\.requests: Invalid value: "[^"]*": '
    r"must be less than or equal to \S+ limit"
)
_AMOUNT = r"(?:minimum|maximum) \S+ usage per \w+ is |\S+ max limit to request ratio per \w+ is "
# Of what follows «NAME is forbidden: ». None of them: another plug-in, such as Priority.
PLUGINS = (
    (Refusal.RIGHTS, re.compile(r'User "[^"]*" cannot ')),
    (Refusal.QUOTA, re.compile(r"(?:exceeded|failed|status unknown for) quota: ")),
    (Refusal.QUOTA, re.compile(r"insufficient quota to match these scopes: ")),
    (Refusal.LIMIT_RANGE, re.compile(rf"\[?(?:{_AMOUNT})")),
    (Refusal.POD_SECURITY, re.compile(r'violates PodSecurity "')),
)


def of_message(message: str) -> Refusal | None:
    """Who refuses, where the message tells: of some a controller keeps nothing else. None where it
    does not."""
    if DENIED.match(message):
        return Refusal.ADMISSION
    if SILENT.match(message):
        return Refusal.WEBHOOK
    if BELOW.match(message):
        return Refusal.LIMIT_RANGE
    forbidden = FORBIDDEN.match(message)
    if forbidden is None:
        return None
    found = (refusal for refusal, grammar in PLUGINS if grammar.match(forbidden[1]))
    return next(found, Refusal.ADMISSION)
