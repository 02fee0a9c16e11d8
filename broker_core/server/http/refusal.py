"""How an error is told: a status, and RabbitMQ's object with ``error`` and ``reason``."""

from __future__ import annotations

from broker_core.core import errors


class HttpRefusal(Exception):
    """Ends a request. ``denied``: for a missing right, which the audit log has."""

    def __init__(self, status: int, error: str, reason: str, *, denied: bool = False) -> None:
        super().__init__(reason)
        self.status, self.error, self.reason, self.denied = status, error, reason, denied

    @property
    def body(self) -> dict[str, str]:
        return {"error": self.error, "reason": self.reason}


def not_found() -> HttpRefusal:
    return HttpRefusal(404, "Object Not Found", "Not Found")


def denied(reason: str) -> HttpRefusal:
    return HttpRefusal(401, "not_authorised", reason, denied=True)


def bad_request(reason: str) -> HttpRefusal:
    return HttpRefusal(400, "bad_request", reason)


_DENIED = (errors.AccessRefused, errors.NotAllowed, errors.LoginRefused)
_NOT_FOUND = (errors.QueueNotFound, errors.ExchangeNotFound, errors.UnknownTransaction)
_UNAVAILABLE = (errors.Busy, errors.ConnectionFailed, errors.ResourceShortage, errors.StoreError)


def refusal_of(error: errors.TxmqError) -> HttpRefusal:
    """Statuses are RabbitMQ's, which knows no 403, 409 and 422."""
    if isinstance(error, _DENIED):
        return denied(error.message)
    if isinstance(error, _NOT_FOUND):
        return HttpRefusal(404, "not_found", error.message)
    if isinstance(error, _UNAVAILABLE):
        return HttpRefusal(503, "unavailable", error.message)
    return bad_request(error.message)
