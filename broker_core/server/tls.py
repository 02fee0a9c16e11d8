"""The certificates of the broker: files in PEM, read at the start and again when they change.

Not here: listening with them (``listen/listeners.py``, ``flight/listener.py``), and clients' side
(``client/tls.py``).
Invariant: files that cannot be used never replace those that are in use.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from broker_core.core.errors import OptionError

logger = logging.getLogger("txmq.tls")

LOOK_S = 1.0  # how often the files are looked at
STOP_S = 1.0
LoginFrom = Literal["distinguished_name", "common_name"]

# the names of RFC 4514 and, for others, of RabbitMQ
_SHORT = {
    "commonName": "CN", "countryName": "C", "localityName": "L", "stateOrProvinceName": "ST",
    "streetAddress": "STREET", "organizationName": "O", "organizationalUnitName": "OU",
    "domainComponent": "DC", "userId": "UID", "surname": "SN", "givenName": "GIVENNAME",
    "initials": "INITIALS", "generationQualifier": "GENERATIONQUALIFIER", "title": "TITLE",
    "serialNumber": "SERIALNUMBER", "pseudonym": "PSEUDONYM", "emailAddress": "EMAILADDRESS",
    "dnQualifier": "DNQ",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """``cert``: the certificate, then those between it and its authority; ``ca``: the authorities of clients.

    ``verify_peer``: every client must have a certificate. Without it, one that has none may log in with a
    password. ``login_from``: what of a certificate is the user's name, for EXTERNAL.
    """

    cert: str
    key: str
    ca: str = ""
    verify_peer: bool = False
    login_from: LoginFrom = "distinguished_name"


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the files held at one moment. ``context``: for sockets of Python."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes
    context: ssl.SSLContext = field(repr=False, compare=False)

    @property
    def expires(self) -> datetime | None:
        """Returns when the certificate does; None if that cannot be read."""
        first, end, _ = self.cert.decode("ascii", "ignore").partition("-----END CERTIFICATE-----")
        try:
            return _not_after(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN CERT") :] + end))
        except (ValueError, IndexError):
            return None


class TlsFiles:
    """The files of ``options``. Raises OptionError if they cannot be used."""

    def __init__(self, options: TlsOptions) -> None:
        self.options = options
        if options.verify_peer and not options.ca:
            raise OptionError(
                "--tls-verify-peer is given without --tls-ca", "name the authorities of the clients"
            )
        self._seen = self._state()
        self.now = load(options)

    def renew(self, *, always: bool = False) -> bool:
        """Reads the files if they have changed, or ``always``. Returns whether ``now`` is new."""
        state = self._state()
        if state == self._seen and not always:
            return False
        try:
            found = load(self.options)
        except OptionError as error:
            # written one after the other: the next look may find a pair
            if state != self._seen or always:
                logger.warning("the certificates cannot be renewed, the old ones stay: %s", error)
            self._seen = state
            return False
        if self._state() != state:  # changed while they were read
            return False
        self._seen = state
        if found == self.now:
            return False
        self.now = found
        logger.warning("the certificate of %s is used from now on", self.options.cert)
        return True

    def _state(self) -> list[object]:
        """Equal as long as nobody has written one of the files, or has put another one in its place."""
        found: list[object] = []
        for path in (self.options.cert, self.options.key, self.options.ca):
            try:
                at = os.stat(path)
                found.append((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
            except OSError:
                found.append(None)
        return found


def load(options: TlsOptions) -> Certificates:
    """Raises OptionError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    cert, key = _read("--tls-cert", options.cert), _read("--tls-key", options.key)
    ca = _read("--tls-ca", options.ca) if options.ca else b""
    try:
        # without the function, the process would ask a terminal for the password of an encrypted key
        context.load_cert_chain(options.cert, options.key, lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise OptionError(
            f"--tls-cert {options.cert} and --tls-key {options.key} cannot be used: {error}",
            "give a certificate and its key, as PEM and without a password",
        ) from None
    if ca:
        try:
            context.load_verify_locations(options.ca)
        except (OSError, ValueError) as error:
            raise OptionError(
                f"--tls-ca {options.ca} cannot be used: {error}", "give the authorities as PEM"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED if options.verify_peer else ssl.CERT_OPTIONAL
    return Certificates(cert, key, ca, context)


def _not_after(der: bytes) -> datetime:
    """The end of the validity of a certificate (RFC 5280, 4.1). Raises ValueError, IndexError."""
    certificate, _ = _field(der)
    fields, _ = _field(certificate)
    if fields[0] == 0xA0:  # the version
        _, fields = _field(fields)
    for _part in ("serial number", "signature", "issuer"):
        _, fields = _field(fields)
    validity, _ = _field(fields)
    _, rest = _field(validity)
    text, _ = _field(rest)
    form = "%y%m%d%H%M%SZ" if rest[0] == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=timezone.utc)


def _field(data: bytes) -> tuple[bytes, bytes]:
    """The content of the first field of DER, and what is behind it."""
    size, at = data[1], 2
    if size & 0x80:
        at += size & 0x7F
        size = int.from_bytes(data[2:at], "big")
    return data[at : at + size], data[at + size :]


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(
            f"{option} is {path!r}, which cannot be read: {error.strerror}", "give a readable PEM file"
        ) from None


def certified(transport: Any, files: TlsFiles | None) -> str | None:
    """The name in the certificate of a client, for EXTERNAL; "" if it has none, None if none was asked for.

    ``transport``: of asyncio. A distinguished name is written as RFC 4514 does it, last part first, like
    RabbitMQ: ``CN=orders,O=example``.
    """
    encrypted = transport.get_extra_info("ssl_object")
    if files is None or not files.options.ca or encrypted is None:
        return None
    found = encrypted.getpeercert() or {}
    parts = [pair for each in found.get("subject", ()) for pair in each]
    if files.options.login_from == "common_name":
        return ",".join(value for name, value in parts if name == "commonName")
    return ",".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in reversed(parts))


def _escaped(value: str) -> str:
    found = "".join(f"\\{each}" if each in ',+"\\<>;' else each for each in value)
    if found.startswith((" ", "#")):
        found = "\\" + found
    return found[:-1] + "\\ " if found.endswith(" ") and len(found) > 1 else found


class Renewal:
    """A thread that looks at the files."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txmq-tls", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Read the files now, as after SIGHUP."""
        self._wake.set()

    def stop(self) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            woken = self._wake.wait(LOOK_S)
            self._wake.clear()
            try:
                if not self._ended.is_set():
                    self._files.renew(always=woken)
            except Exception:
                logger.exception("the certificates could not be renewed")
