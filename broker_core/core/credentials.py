"""How a client proves who it is, and whose certificate it trusts: the options ``user``, ``password``,
``passwordFile``, ``token``, ``tlsCa``, ``tlsCert`` and ``tlsKey``.

Not here: the header that is sent (``flight/authorization.py``), TLS itself (``client/tls.py``).
Invariant: neither ``repr`` nor an error shows a password or a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from broker_core.core.errors import OptionError

PASSWORD_VARIABLE = "TXMQ_PASSWORD"


@dataclass(frozen=True, slots=True)
class Credentials:
    """``password``: the password of ``user``; default: ``password_file``, then TXMQ_PASSWORD.

    ``token``: of a broker's ``endpoint.json``, in place of a user. ``tls_*``: PEM files, for ``txmqs://``;
    without ``tls_ca``, the authorities of the machine are trusted. ``tls_cert``, ``tls_key``: of this client,
    where the broker verifies its peers.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    token: str = field(default="", repr=False)
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def resolved(self, environment: Mapping[str, str] | None = None) -> Credentials:
        """Returns the same, with the password read and absolute paths. Raises OptionError."""
        if self.token and (self.user or self.password or self.password_file):
            raise OptionError("option 'token' is given with a user or a password", "give one of them")
        if self.password and self.password_file:
            raise OptionError("options 'password' and 'passwordFile' are both given", "give one of them")
        if (self.password or self.password_file) and not self.user:
            raise OptionError("a password is given without option 'user'", "give the user too")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise OptionError(
                "one of the options 'tlsCert' and 'tlsKey' is missing", "give both, or none of them"
            )
        found = os.environ if environment is None else environment
        password = self.password
        if self.user and not password:
            if self.password_file:
                password = read_secret(self.password_file, "option 'passwordFile'")
            else:
                password = found.get(PASSWORD_VARIABLE, "")
            if not password:
                raise OptionError(
                    f"option 'user' is {self.user!r}, and there is no password",
                    f"give option 'passwordFile' or 'password', or set {PASSWORD_VARIABLE}",
                )
        for option, value in (("user", self.user), ("password", password), ("token", self.token)):
            if any(each in value for each in "\r\n\0") or (option == "user" and ":" in value):
                raise OptionError(f"option {option!r} has an invalid character", "leave it out")
        if not self.token.isascii() or any(each.isspace() for each in self.token):
            raise OptionError("option 'token' has an invalid character", "leave it out")
        # a task may run in another directory than its driver
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        ca, cert, key = (path and os.path.abspath(os.path.expanduser(path)) for path in files)
        return Credentials(self.user, password, "", self.token, ca, cert, key)


def read_secret(path: str, option: str) -> str:
    """The content of a file, without the end of its line. Raises OptionError."""
    try:
        text = Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise OptionError(f"{option} is {path!r}, which cannot be read: {why}", "name a file") from None
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret:
        raise OptionError(f"{option} is {path!r}, which is empty", "write the password into it")
    return secret
