"""Health checks: 200 with ``{"status":"ok"}``, or 503 with the reason."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from broker_core.server.http.call import HttpAnswer, HttpCall
from broker_core.server.http.refusal import bad_request
from broker_core.server.http.route import read

OK = {"status": "ok"}
_MOST_DAYS = 1_000_000  # a date has four digits for its year
_UNITS = {"days": 1, "weeks": 7, "months": 30, "years": 365}


def _failed(reason: str, **more: object) -> HttpAnswer:
    return HttpAnswer(503, {"status": "failed", "reason": reason, **more})


def _alarms(call: HttpCall) -> object:
    stopped = call.backend.broker.committer.failure
    if stopped is not None:
        return _failed("the store has stopped", alarms=[])
    alarm = call.backend.quotas.alarm
    shortage = alarm.now() if alarm is not None else None
    return OK if shortage is None else _failed(f"{shortage.reason} ({shortage.numbers})", alarms=[])


def _single(_call: HttpCall) -> object:
    return {**OK, "reason": "single node cluster"}


def _port(call: HttpCall) -> object:
    text = call.params["port"]
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise bad_request("port is not a number")
    ports = [each.port for each in call.backend.listening()]
    if int(text) in ports:
        return {**OK, "port": int(text)}
    return _failed("No active listener", missing=int(text), ports=ports)


def _protocol(call: HttpCall) -> object:
    name = call.params["protocol"].lower()
    protocols = sorted({each.protocol for each in call.backend.listening()})
    if name in protocols:
        return {**OK, "protocol": name}
    return _failed("No active listener", missing=name[:80], protocols=protocols)


def _certificates(call: HttpCall) -> object:
    within, unit = call.params["within"], _UNITS.get(call.params["unit"])
    if unit is None or not (within.isascii() and within.isdigit() and 0 < len(within) < 5):
        raise bad_request("Invalid expiration unit or number: give days, weeks, months or years")
    days = min(int(within) * unit, _MOST_DAYS)
    until = datetime.now(timezone.utc) + timedelta(days=days)
    files = call.backend.certificate
    expires = files.now.expires if files is not None else None
    if expires is None or expires > until:
        return OK
    return _failed("Certificates expiring", expired=[{"expires_on": expires.isoformat()}])


_CHECKS, _EXPIRES = "/api/health/checks", "/api/health/checks/certificate-expiration"
ROUTES = (
    read(f"{_CHECKS}/alarms", "management", _alarms, "No alarm, and the store takes commits"),
    read(f"{_CHECKS}/local-alarms", "management", _alarms, "The same"),
    read("/api/healthchecks/node", "management", _alarms, "The same, as older tools ask"),
    read(f"{_CHECKS}/virtual-hosts", "management", lambda _call: OK, "All virtual hosts are open"),
    read(f"{_CHECKS}/node-is-mirror-sync-critical", "management", _single, "There are no mirrors"),
    read(f"{_CHECKS}/node-is-quorum-critical", "management", _single, "There is one node"),
    read(f"{_CHECKS}/port-listener/{{port}}", "management", _port, "Something listens on the port"),
    read(f"{_CHECKS}/protocol-listener/{{protocol}}", "management", _protocol, "The protocol is served"),
    read(f"{_EXPIRES}/{{within}}/{{unit}}", "management", _certificates, "No certificate expires soon"),
)
