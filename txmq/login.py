"""How a command logs in to a broker: ``--user``, ``--login-password-file``, ``--token-file``, files for TLS.

Invariant: no argument is a secret, because other users of the machine see the arguments of a process.
"""

from __future__ import annotations

import os
import sys

from broker_core.core.credentials import PASSWORD_VARIABLE, Credentials, read_secret
from broker_core.core.errors import OptionError
from txmq.command.declare import Options, option

STDIN = "-"


LOGIN = (
    option("--user", "NAME", f"with --login-password-file, or {PASSWORD_VARIABLE}"),
    # --password-file is the one of a user that `txmq user` is about
    option("--login-password-file", "FILE", "- reads the password from standard input"),
    option("--token-file", "FILE", "a token in place of a user"),
    option("--tls-ca", "FILE", "PEM: the authority of the broker's certificate"),
    option("--tls-cert", "FILE", "PEM: a certificate of this client"),
    option("--tls-key", "FILE", "PEM: its key"),
)


def credentials(options: Options) -> Credentials:
    """Raises OptionError."""
    login = (options.url or "").rpartition("@")[0].partition("://")[2]
    if ":" in login and options.url != os.environ.get("TXMQ_URL"):
        raise OptionError(
            "--url has a password, which other users of this machine can see",
            f"use --login-password-file or {PASSWORD_VARIABLE}, and --user if the url has none",
        )
    file = options.login_password_file
    user, secrets = options.user or login, (file, options.token_file, os.environ.get(PASSWORD_VARIABLE))
    if user and ":" not in login and not any(secrets):
        raise OptionError(
            f"the user is {user!r}, and there is no password",
            f"give --login-password-file, or set {PASSWORD_VARIABLE}",
        )
    password = ""
    if file == STDIN:
        # not of the text: it would read ahead what `txmq message publish -` reads next
        password = sys.stdin.buffer.readline().decode(errors="surrogateescape").rstrip("\r\n")
        if not password:
            raise OptionError("there is no password on standard input", "write it to standard input")
    return Credentials(
        user=options.user or "",
        password=password,
        password_file="" if password else file or "",
        token=read_secret(options.token_file, "--token-file") if options.token_file else "",
        tls_ca=options.tls_ca or "",
        tls_cert=options.tls_cert or "",
        tls_key=options.tls_key or "",
    )
