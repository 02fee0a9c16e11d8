"""Every route of the HTTP listener with what it needs: written down a second time, by hand."""

from __future__ import annotations

from typing import NamedTuple

EVERYBODY = ("plain", "manager", "stranger", "watcher", "operator", "boss")
WHO: dict[str, tuple[str, ...]] = {
    "nobody": EVERYBODY,
    "management": ("manager", "stranger", "watcher", "operator", "boss"),
    "vhost": ("manager", "watcher", "operator", "boss"),  # of the virtual host /
    "names": ("manager", "operator", "boss"),  # the same, with permissions on names
    "monitoring": ("watcher", "operator", "boss"),
    "operator": ("operator", "boss"),
    "administrator": ("boss",),
}
# in paths: what is there is `there`, what is not is `gone`
PARAMS = {
    "{vhost}": "%2F",
    "{name}": "gone",
    "{node}": "gone",
    "{user}": "gone",
    "{component}": "shovel",
    "{source}": "gone",
    "{kind}": "q",
    "{destination}": "gone",
    "{key}": "gone",
    "{app}": "gone",
    "{xid}": "gone",
    "{sequence}": "999999999",
    "{offset}": "0",
    "{port}": "1",
    "{protocol}": "mqtt",
    "{within}": "1",
    "{unit}": "weeks",
}


class Row(NamedTuple):
    method: str
    path: str
    need: str

    def at(self, vhost: str = "%2F") -> str:
        path = self.path.replace("{vhost}", vhost)
        for name, value in PARAMS.items():
            path = path.replace(name, value)
        return path


_TABLE = """
nobody
    GET /api/auth
management
    GET /api/overview
    GET /api/cluster-name
    GET /api/whoami
    GET /api/txmq/openapi.json
    GET /api/txmq/transactions/{sequence}
    GET /api/extensions
    GET /api/parameters
    GET /api/parameters/{component}
    GET /api/deprecated-features
    GET /api/deprecated-features/used
    GET /api/shovels
    GET /api/global-parameters
    GET /api/feature-flags
    GET /api/federation-links
    GET /api/queues
    GET /api/exchanges
    GET /api/bindings
    GET /api/connections
    GET /api/connections/username/{user}
    GET /api/channels
    GET /api/consumers
    GET /api/vhosts
    GET /api/vhost-limits
    GET /api/healthchecks/node
    GET /api/health/checks/alarms
    GET /api/health/checks/local-alarms
    GET /api/health/checks/virtual-hosts
    GET /api/health/checks/node-is-mirror-sync-critical
    GET /api/health/checks/node-is-quorum-critical
    GET /api/health/checks/port-listener/{port}
    GET /api/health/checks/protocol-listener/{protocol}
    GET /api/health/checks/certificate-expiration/{within}/{unit}
own
    GET /api/connections/{name}
    DELETE /api/connections/{name}
    GET /api/connections/{name}/channels
    GET /api/channels/{name}
vhost
    GET /api/parameters/{component}/{vhost}
    GET /api/federation-links/{vhost}
    GET /api/shovels/{vhost}
    GET /api/queues/{vhost}
    GET /api/queues/{vhost}/{name}
    DELETE /api/queues/{vhost}/{name}
    DELETE /api/queues/{vhost}/{name}/contents
    POST /api/queues/{vhost}/{name}/actions
    POST /api/queues/{vhost}/{name}/get
    GET /api/txmq/messages/{vhost}/{name}/{offset}
    GET /api/txmq/history/{vhost}
    POST /api/txmq/prepared/{vhost}/{xid}/commit
    POST /api/txmq/prepared/{vhost}/{xid}/rollback
    POST /api/txmq/prepared/{vhost}/rollback
    GET /api/queues/{vhost}/{name}/bindings
    GET /api/exchanges/{vhost}
    GET /api/exchanges/{vhost}/{name}
    DELETE /api/exchanges/{vhost}/{name}
    POST /api/exchanges/{vhost}/{name}/publish
    GET /api/exchanges/{vhost}/{name}/bindings/source
    GET /api/exchanges/{vhost}/{name}/bindings/destination
    GET /api/bindings/{vhost}
    GET /api/bindings/{vhost}/e/{source}/{kind}/{destination}
    GET /api/bindings/{vhost}/e/{source}/{kind}/{destination}/{key}
    DELETE /api/bindings/{vhost}/e/{source}/{kind}/{destination}/{key}
    GET /api/vhosts/{vhost}
    GET /api/vhosts/{vhost}/connections
    GET /api/vhosts/{vhost}/channels
    GET /api/consumers/{vhost}
    GET /api/vhost-limits/{vhost}
names
    PUT /api/queues/{vhost}/{name}
    PUT /api/exchanges/{vhost}/{name}
    POST /api/bindings/{vhost}/e/{source}/{kind}/{destination}
    GET /api/aliveness-test/{vhost}
monitoring
    GET /api/policies
    GET /api/policies/{vhost}
    GET /api/policies/{vhost}/{name}
    GET /api/operator-policies
    GET /api/operator-policies/{vhost}
    GET /api/operator-policies/{vhost}/{name}
    GET /api/nodes
    GET /api/nodes/{node}
    GET /api/nodes/{node}/memory
    GET /metrics
    GET /metrics/rabbitmq
    GET /metrics/per-object
    GET /api/txmq/apps
    GET /api/txmq/ledger/{vhost}/{app}
    GET /api/txmq/prepared
    GET /api/txmq/staged
    GET /api/txmq/transactions
    GET /api/txmq/store
    GET /api/txmq/alarms
administrator
    PUT /api/policies/{vhost}/{name}
    DELETE /api/policies/{vhost}/{name}
    PUT /api/operator-policies/{vhost}/{name}
    DELETE /api/operator-policies/{vhost}/{name}
    POST /api/txmq/queues/{vhost}/{name}/skip-damaged
    PUT /api/vhosts/{vhost}
    DELETE /api/vhosts/{vhost}
    GET /api/vhosts/{vhost}/permissions
    GET /api/vhosts/{vhost}/topic-permissions
    PUT /api/vhost-limits/{vhost}/{name}
    DELETE /api/vhost-limits/{vhost}/{name}
    GET /api/definitions
    POST /api/definitions
    GET /api/definitions/{vhost}
    POST /api/definitions/{vhost}
    GET /api/users
    GET /api/users/{user}
    PUT /api/users/{user}
    DELETE /api/users/{user}
    GET /api/users/{user}/permissions
    GET /api/users/{user}/topic-permissions
    GET /api/user-limits
    GET /api/user-limits/{user}
    GET /api/users/without-permissions
    GET /api/permissions
    GET /api/permissions/{vhost}/{user}
    PUT /api/permissions/{vhost}/{user}
    DELETE /api/permissions/{vhost}/{user}
    GET /api/topic-permissions
    GET /api/topic-permissions/{vhost}/{user}
    PUT /api/topic-permissions/{vhost}/{user}
    DELETE /api/topic-permissions/{vhost}/{user}
"""


def rows() -> list[Row]:
    found, need = [], ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            need = line
            continue
        method, path = line.split()
        found.append(Row(method, path, need))
    return found
