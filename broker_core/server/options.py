"""What a broker is opened with, as one value. Each part is described where it is used.

Not here: how the command line names it (``txmq/serve_options.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from broker_core.broker.history.history import HistoryLimits
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.broker.transaction.transaction import Limits
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.quotas import QuotaLimits


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``host`` and ``port``: of Flight. ``amqp``: HOST:PORT of each AMQP listener. ``handlers`` intercept the
    commands of AMQP clients. ``limits``: of one transaction. ``outcomes``: how many are kept, and for how
    long; ``history``: the same of commits. ``users``: NAME -> password or its hash, beside those of the
    directory. ``listeners``: TLS, and who is let in. ``quotas``: what users may take.
    ``strict``: arguments without effect are refused.
    """

    host: str = "127.0.0.1"
    port: int = 0
    amqp: Sequence[str] = ()
    amqp_options: AmqpOptions = field(default_factory=AmqpOptions)
    handlers: Sequence[Handler] = ()
    limits: Limits = field(default_factory=Limits)
    outcomes: OutcomeLimits = field(default_factory=OutcomeLimits)
    history: HistoryLimits = field(default_factory=HistoryLimits)
    users: Mapping[str, str] | None = None
    listeners: ListenerOptions = field(default_factory=ListenerOptions)
    quotas: QuotaLimits = field(default_factory=QuotaLimits)
    strict: bool = False
