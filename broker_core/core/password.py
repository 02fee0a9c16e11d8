"""Passwords as they are kept: scrypt with a salt, in the form ``$scrypt$ln=14,r=8,p=1$SALT$HASH``.

``ln`` is the binary logarithm of the cost; salt and hash are base64. A hash carries its cost, so a later
version may raise it. One check takes tens of milliseconds and 16 MiB.

A hash of RabbitMQ may be kept too, of a user who was imported: ``$rabbit_sha256$`` or ``$rabbit_sha512$``,
then its text. It costs an attacker who has read it far less; a check takes as long as any other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Callable, Collection
from typing import NamedTuple

from broker_core.core.errors import OptionError

_PREFIX = "$scrypt$"
_RABBIT = {"$rabbit_sha256$": hashlib.sha256, "$rabbit_sha512$": hashlib.sha512}
_RABBIT_SALT_BYTES = 4
_SALT_BYTES, _HASH_BYTES, _MOST_HASH_BYTES = 16, 32, 64
_UNMATCHED = bytes(_HASH_BYTES)  # no password is known to have this digest
_MAX_MEMORY = 256 * 1024 * 1024
MAX_BYTES = 1024  # of a password


class Cost(NamedTuple):
    """scrypt's parameters (RFC 7914): memory is 128 * r * 2**ln bytes."""

    ln: int = 14
    r: int = 8
    p: int = 1


COST = Cost()


class _Hash(NamedTuple):
    cost: Cost
    salt: bytes
    digest: bytes


class _Rabbit(NamedTuple):
    hash: Callable[[bytes], hashlib._Hash]
    salt: bytes
    digest: bytes


def hashed(password: str, cost: Cost = COST) -> str:
    """Raises OptionError for an empty password, one that is too long, and one that is no text. Nor may it
    have zeros: scrypt does not see those at its end.
    """
    salt = os.urandom(_SALT_BYTES)
    digest = _scrypt(_checked(password), salt, cost, _HASH_BYTES)
    return _text(cost, salt, digest)


def unmatched(cost: Cost = COST) -> str:
    """A hash that no password has: to compare with takes the same time."""
    return _text(cost, os.urandom(_SALT_BYTES), _UNMATCHED)


def is_unmatched(text: str) -> bool:
    """Whether ``unmatched`` made this hash."""
    return text.endswith(f"${_base64(_UNMATCHED)}")


def is_hash(text: str) -> bool:
    """Whether ``text`` is meant as a hash."""
    return text.startswith((_PREFIX, *_RABBIT))


def check_hash(text: str) -> None:
    """Raises OptionError, without the text, for one that ``hashed`` could not have made."""
    _parse(text)


def cost_of(text: str) -> Cost:
    """Of a check with this hash."""
    parsed = _parse(text)
    return COST if isinstance(parsed, _Rabbit) else parsed.cost


def is_right(password: str, text: str | None, costs: Collection[Cost] = ()) -> bool:
    """Whether ``text`` is a hash of ``password``; None is the hash of none. The work is one scrypt of each of
    ``costs``, whatever ``text`` is, if its own cost is among them.
    """
    parsed = None if text is None else _parse(text)
    own = parsed.cost if isinstance(parsed, _Hash) else COST
    salt = bytes(_SALT_BYTES) if parsed is None else parsed.salt
    secret = password.encode(errors="surrogateescape")
    digests = {
        cost: _scrypt(secret[:MAX_BYTES], salt, cost, _MOST_HASH_BYTES) for cost in sorted(costs or (own,))
    }
    if parsed is None:
        return False
    if isinstance(parsed, _Rabbit):
        return hmac.compare_digest(parsed.hash(parsed.salt + secret).digest(), parsed.digest)
    if own not in digests:  # the users have changed meanwhile
        digests[own] = _scrypt(secret[:MAX_BYTES], salt, own, _MOST_HASH_BYTES)
    digest = digests[own][: len(parsed.digest)]  # a shorter output of scrypt is the beginning of a longer one
    return hmac.compare_digest(digest, parsed.digest) and len(secret) <= MAX_BYTES and b"\0" not in secret


def _text(cost: Cost, salt: bytes, digest: bytes) -> str:
    return f"{_PREFIX}ln={cost.ln},r={cost.r},p={cost.p}${_base64(salt)}${_base64(digest)}"


def _checked(password: str) -> bytes:
    try:
        encoded = password.encode()
    except UnicodeEncodeError:
        raise OptionError("the password is not UTF-8") from None
    if not encoded or len(encoded) > MAX_BYTES or b"\0" in encoded:
        wrong = f"has {len(encoded)} bytes" if encoded else "is empty"
        raise OptionError(f"the password {wrong}", f"it must have 1 to {MAX_BYTES} bytes, none of them zero")
    return encoded


def _scrypt(password: bytes, salt: bytes, cost: Cost, length: int) -> bytes:
    return hashlib.scrypt(
        password, salt=salt, n=1 << cost.ln, r=cost.r, p=cost.p, maxmem=_MAX_MEMORY + (1 << 20), dklen=length
    )


def of_rabbitmq(algorithm: str, text: str) -> str:
    """The form in which a hash of RabbitMQ's definitions is kept. Raises OptionError for one that is none, or
    whose algorithm is not known.
    """
    found = f"${algorithm.replace('rabbit_password_hashing_', 'rabbit_', 1)}${text}"
    if not found.startswith(tuple(_RABBIT)):
        raise OptionError(f"hashes of {algorithm[:80]!r} are not known", "set the password again")
    check_hash(found)
    return found


def to_rabbitmq(text: str) -> tuple[str, str]:
    """(hashing_algorithm, password_hash) as definitions have them."""
    for prefix in _RABBIT:
        if text.startswith(prefix):
            return prefix.strip("$").replace("rabbit_", "rabbit_password_hashing_"), text[len(prefix) :]
    return "scrypt", text


def _parse_rabbit(prefix: str, text: str) -> _Rabbit:
    try:
        found = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        found = b""
    if len(found) != _RABBIT_SALT_BYTES + _RABBIT[prefix]().digest_size:
        raise OptionError("a hash of RabbitMQ must be base64 of a salt of four bytes and the hash")
    return _Rabbit(_RABBIT[prefix], found[:_RABBIT_SALT_BYTES], found[_RABBIT_SALT_BYTES:])


def _parse(text: str) -> _Hash | _Rabbit:
    for prefix in _RABBIT:
        if text.startswith(prefix):
            return _parse_rabbit(prefix, text[len(prefix) :])
    try:
        _, name, parameters, salt, digest = text.split("$")
        values = dict(item.split("=") for item in parameters.split(","))
        cost = Cost(int(values["ln"]), int(values["r"]), int(values["p"]))
        parsed = _Hash(cost, base64.b64decode(salt, validate=True), base64.b64decode(digest, validate=True))
    except (ValueError, KeyError, binascii.Error):
        raise OptionError("a hash of a password must be $scrypt$ln=14,r=8,p=1$SALT$HASH") from None
    if (
        name != "scrypt"
        or not 4 <= cost.ln <= 20
        or not 1 <= cost.r <= 32
        or not 1 <= cost.p <= 16
        or 128 * cost.r << cost.ln > _MAX_MEMORY
        or not 8 <= len(parsed.salt) <= 64
        or not 16 <= len(parsed.digest) <= _MOST_HASH_BYTES
    ):
        raise OptionError("a hash of a password has parameters that are not supported")
    return parsed


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
