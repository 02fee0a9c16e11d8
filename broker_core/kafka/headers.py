"""The headers of a record on Kafka: what AMQP knows of a message, as any client of Kafka can read it.

The table of names, for both ways. A property is the header ``txmq.<property>``, its value as text. A header
of the user keeps its own name. The exchange is a header too, absent for the default one; the routing key is
the record's key.

Invariant: a header of the user never begins with PREFIX.
"""

from __future__ import annotations

from broker_core.properties import NAMES

PREFIX = "txmq."
EXCHANGE = f"{PREFIX}exchange"
# JSON object: header of the user -> its AMQP type, where it is not text. A letter of field_table.py; for an
# array the list of its members' types; for a table an object of the types of its members that are not text
TYPES = f"{PREFIX}types"
PROPERTIES = {f"{PREFIX}{name}": name for name in NAMES if name != "headers"}  # header -> property
