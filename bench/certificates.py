"""Certificates for tests and figures: an authority, and what it has signed, as PEM files.

Invariant: a renewed certificate has the names of the old one, and another key.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import trustme

NAMES = ("localhost", "127.0.0.1")
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates into ``folder``; ``ca`` is the file of its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._authority = folder, trustme.CA()
        self.ca = str(folder / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def sign(
        self,
        name: str = "broker",
        *names: str,
        expired: bool = False,
        common_name: str | None = None,
        organization: str | None = None,
    ) -> Pair:
        """A certificate for ``names``. Files of this ``name`` that exist are replaced, one by one."""
        leaf = self._authority.issue_cert(
            *(names or NAMES),
            common_name=common_name,
            organization_name=organization,
            organization_unit_name="spark" if organization else None,
            not_before=PAST - datetime.timedelta(days=9) if expired else None,
            not_after=PAST if expired else None,
        )
        pair = Pair(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        _replace(pair.key, leaf.private_key_pem.bytes())
        _replace(pair.cert, b"".join(each.bytes() for each in leaf.cert_chain_pems))
        return pair


def _replace(path: str, data: bytes) -> None:
    aside = Path(f"{path}.new")
    aside.write_bytes(data)
    os.replace(aside, path)
