"""``txmq policy``: limits and dead letters of many queues, by patterns for their names.

Not here: the rules (``broker_core/broker/topology/policies.py``).
"""

from __future__ import annotations

import dataclasses
import json

from broker_core.broker.topology.policies import APPLY_TO
from broker_core.client.accounts import RemoteVhosts
from broker_core.core.errors import OptionError
from broker_core.core.pieces import GivenTwice, once
from txmq.address import BROKER, client_at
from txmq.command.declare import YES, Options, argument, command, option
from txmq.output import confirm, done, show

NAME = argument("NAME")
KIND = option("--operator", text="an operator policy: limits that hold beside all others")


@command("policy list", "list the policies", *BROKER)
def _list(options: Options) -> int:
    client = client_at(options)
    rows = map(dataclasses.asdict, RemoteVhosts(client).policies(client.address.vhost))
    return show(options, [{**row, "definition": json.dumps(row["definition"])} for row in rows])


@command(
    "policy set",
    "set a policy for the queues and exchanges whose name a pattern matches",
    *BROKER,
    NAME,
    argument("PATTERN", "a regular expression; a name has one policy, of the highest priority"),
    argument("DEFINITION", 'JSON: {"max-length": 1000, "dead-letter-exchange": "dead"}'),
    option("--priority", "N", "default 0", type=int, default=0),
    option("--apply-to", "WHAT", f"{', '.join(APPLY_TO)}; default all", default="all"),
    KIND,
)
def _set(options: Options) -> int:
    client = client_at(options)
    try:
        definition = json.loads(options.definition, object_pairs_hook=once)
    except GivenTwice as error:
        raise OptionError(f"in the definition {error}", "give it once") from None
    except ValueError:
        definition = None
    if not isinstance(definition, dict):
        raise OptionError(f"{options.definition!r} is not a JSON object", 'give {"max-length": 1000}')
    RemoteVhosts(client).set_policy(
        options.name,
        options.pattern,
        definition,
        priority=options.priority,
        apply_to=options.apply_to,
        vhost=client.address.vhost,
        operator=options.operator,
    )
    return done(options, f"set policy {options.name}", policy=options.name)


@command("policy delete", "delete a policy", *BROKER, NAME, KIND, YES)
def _delete(options: Options) -> int:
    confirm(options, f"delete takes policy {options.name} from its queues and exchanges")
    client = client_at(options)
    RemoteVhosts(client).delete_policy(options.name, vhost=client.address.vhost, operator=options.operator)
    return done(options, f"deleted policy {options.name}", policy=options.name)
