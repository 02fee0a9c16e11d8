"""The file of ``--users``: a line NAME:PASSWORD or NAME:HASH for each user, for containers.

A user of the file has the tag administrator and all permissions, unless the catalog has a user of this name:
then the catalog says what it may do, and the file what its password is.
"""

from __future__ import annotations

import os
import stat

from broker_core.core import password as passwords
from broker_core.core.errors import OptionError


def read_users(path: str) -> dict[str, str]:
    """Passwords or hashes by name. Raises OptionError, also for a file that others may read."""
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & 0o027:  # the group may read it: so containers mount a secret
                raise OptionError(
                    f"the users file {path} may be read or written by others (mode {mode & 0o777:o})",
                    f"chmod 600 {path}",
                )
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the users file {path} cannot be read: {error}") from error
    users: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            name, colon, password = line.partition(":")
            if not name or not colon or not password:
                raise OptionError(f"line {number} of the users file {path} is not NAME:PASSWORD")
            if passwords.is_hash(password):
                try:
                    passwords.check_hash(password)
                except OptionError as error:
                    raise OptionError(
                        f"line {number} of the users file {path} is wrong", error.message
                    ) from None
            users[name] = password
    if not users:
        raise OptionError(f"the users file {path} has no user: give a line NAME:PASSWORD for each")
    return users
