"""``txmq http``: the door of an engine elsewhere, in a process of its own, until it is told to end.

Not here: the door of a broker (``launcher.py``), the options on the command line (``txmq/admin/http.py``).
Invariant: the door changes nothing of the engine, and starts also while that does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from broker_core import __version__
from broker_core.admin import Admin
from broker_core.engine import Engine
from broker_core.errors import TxmqError
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server import log_file
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.audit import Audit
from broker_core.server.access.logins import Logins
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.http.elsewhere.answers import ANSWERS
from broker_core.server.http.elsewhere.routes import ELSEWHERE
from broker_core.server.http.elsewhere.sampling import EngineSampler
from broker_core.server.http.elsewhere.served import EngineServed
from broker_core.server.http.options import HttpOptions
from broker_core.server.http.server import HttpServer
from broker_core.server.quotas import Quotas
from broker_core.server.threads import asked_to_end
from broker_core.server.tls import Renewal, TlsFiles, TlsOptions
from broker_core.store.memory import MemoryStore

log = logging.getLogger("txmq.http")


@dataclass(frozen=True, slots=True)
class EngineDoor:
    """``listeners``: HOST:PORT of each. ``users``: NAME -> password or its hash; {}: ``guest``, from this
    host. ``audit``: a directory for the audit log; "": none. ``cluster``: how pages name the engine.
    """

    listeners: Sequence[str]
    users: Mapping[str, str]
    tls: TlsOptions | None = None
    open_metrics: bool = False
    audit: str = ""
    cluster: str = ""


@contextlib.contextmanager
def opened(engine: Engine, admin: Admin, door: EngineDoor) -> Iterator[HttpServer]:
    """The door, listening. Raises OptionError."""
    with contextlib.ExitStack() as steps:
        broker = LocalBroker(MemoryStore(), upkeep=False)
        steps.callback(broker.close)
        audit = Audit(door.audit)
        steps.callback(audit.close)
        logins = Logins(broker.state.users, audit, given=door.users)
        steps.callback(logins.close)
        engines = VhostEngines(broker)
        files = TlsFiles(door.tls) if door.tls is not None else None
        served = EngineServed(
            *(broker, engines, Accounts(broker), Vhosts(broker, engines), logins, Quotas()),
            cluster=door.cluster,
            urls=lambda: server.urls,
            certificate=files,
            answers=ANSWERS,
            engine=engine,
            admin=admin,
        )
        server = HttpServer(
            served,
            door.listeners,
            options=HttpOptions(open_metrics=door.open_metrics),
            tls=files,
            routes=ELSEWHERE,
            sampler=lambda _served, beside: EngineSampler(served, beside),
        )
        server.start()
        steps.callback(server.stop)
        if files is not None:
            steps.callback(Renewal(files, lambda: None).stop)
        yield server


def serve(engine: Engine, admin: Admin, door: EngineDoor, log_format: str = "text") -> int:
    """Runs the door until SIGTERM or SIGINT. Prints ``ready http://HOST:PORT`` when it listens."""
    log_file.set_up("", log_format)
    logging.getLogger("txmq.broker").setLevel(logging.WARNING)  # it has no messages to speak of
    ending = asked_to_end()
    with opened(engine, admin, door) as server:
        addresses = " ".join(server.urls)
        log.info("txmq %s shows %s at %s, process %d", __version__, door.cluster, addresses, os.getpid())
        print("ready", addresses, flush=True)
        try:
            engine.identity()
        except TxmqError as error:
            log.warning("%s does not answer: %s", door.cluster, error.message)
        ending.wait()
        log.info("the door ends: it was asked to")
    return 0
