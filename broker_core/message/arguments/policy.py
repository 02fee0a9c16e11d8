"""Settings of policies: which there are, which argument each is, and what a queue with arguments and policies
of its own obeys.

Not here: which policy a queue or an exchange has (``topology/policies.py``).
Invariant: a setting means what the argument of its name means; one without effect is shown as such.
Source: RabbitMQ's policies. Of two limits the lower one holds, of other settings that of the queue before
that of the policy. An operator policy may only set limits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from broker_core.core.errors import OptionError, PreconditionFailed
from broker_core.message.arguments.table import EXCHANGE, NEEDS, QUEUE, ArgumentRule, without_effect


class Setting(NamedTuple):
    """``argument``: what it is of a queue or an exchange. ``lowest``: the lower of two values holds."""

    table: Mapping[str, ArgumentRule]
    argument: str
    lowest: bool = False


_LIMITS = ("message-ttl", "expires", "max-length", "max-length-bytes", "delivery-limit", "consumer-timeout")
_OTHERS = ("dead-letter-exchange", "dead-letter-routing-key", "dead-letter-strategy", "overflow")
_VOID = ("queue-mode", "queue-version", "queue-master-locator", "queue-leader-locator", "ha-policy")
_DEDUPLICATION = (
    "x-message-deduplication", "x-deduplication-header", "x-cache-size", "x-cache-ttl", "x-cache-persistence",
)  # fmt: skip
SETTINGS: Mapping[str, Setting] = {
    **{name: Setting(QUEUE, f"x-{name}", name in _LIMITS) for name in (*_LIMITS, *_OTHERS)},
    **{name: Setting(QUEUE, f"x-{name}", True) for name in ("max-in-memory-length", "max-in-memory-bytes")},
    **{name: Setting(QUEUE, f"x-{name}") for name in _VOID},
    **{
        f"ha-{name}": Setting(QUEUE, "x-ha-policy")
        for name in (
            "mode", "params", "sync-mode", "sync-batch-size", "promote-on-shutdown", "promote-on-failure",
        )
    },
    **{name: Setting(QUEUE, name) for name in _DEDUPLICATION},  # as the plugin has them
    "alternate-exchange": Setting(EXCHANGE, "alternate-exchange"),
}  # fmt: skip
_NAMES = {setting.argument: name for name, setting in SETTINGS.items()}


class Policy(NamedTuple):
    """What a name has: what its policies set together, and their names."""

    settings: Mapping[str, object] = {}
    name: str | None = None
    operator: str | None = None


NO_POLICY = Policy()
OF_OPERATOR = frozenset(_LIMITS) | {"max-in-memory-length", "max-in-memory-bytes"}


def check_definition(of: str, definition: Mapping[str, object], *, operator: bool) -> None:
    """Raises OptionError for a setting that is not taken, or its value. ``of``: "policy 'name'"."""
    if not definition:
        raise OptionError(f"{of} sets nothing", f"give at least one of {', '.join(SETTINGS)}")
    for name, value in definition.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise OptionError(f"{of} sets {name!r}, which is no setting here", f"use {', '.join(SETTINGS)}")
        if operator and name not in OF_OPERATOR:
            raise OptionError(
                f"{of} sets {name!r}, which is no limit", f"an operator policy sets {', '.join(OF_OPERATOR)}"
            )
        try:
            setting.table[setting.argument].value(of, name, value)
        except PreconditionFailed as error:
            raise OptionError(error.message) from None
    for argument, (other, _) in NEEDS.items():
        name, needed = _NAMES[argument], _NAMES[other]
        if name in definition and needed not in definition:
            raise OptionError(f"{of} sets {name} alone", f"it needs {needed} too")


def settings_without_effect(definition: Mapping[str, object]) -> dict[str, str]:
    """Returns which settings have no effect here -> why."""
    as_arguments = {name: SETTINGS[name] for name in definition if name in SETTINGS}
    return {
        name: without_effect(setting.table, {setting.argument: None}).get(setting.argument, "")
        for name, setting in as_arguments.items()
        if setting.table[setting.argument].void
    }


def combine(policy: Mapping[str, object], operator: Mapping[str, object]) -> dict[str, object]:
    """Returns what a policy and an operator policy set together."""
    return _together(policy, operator, {name for name in operator if SETTINGS[name].lowest})


def effective(
    declared: Mapping[str, object], policy: Policy, table: Mapping[str, ArgumentRule]
) -> dict[str, object]:
    """Returns the arguments that hold for a queue or an exchange (``table``) with a policy."""
    own = {name: value for name, value in policy.settings.items() if SETTINGS[name].table is table}
    if "x-dead-letter-exchange" in declared:  # the key belongs to the exchange that the queue names
        own.pop("dead-letter-routing-key", None)
    lowest = {SETTINGS[name].argument for name in own if SETTINGS[name].lowest}
    return _together(declared, {SETTINGS[name].argument: value for name, value in own.items()}, lowest)


def _together(
    first: Mapping[str, object], second: Mapping[str, object], lowest: Container[str]
) -> dict[str, object]:
    both = {**second, **first}
    for name in second.keys() & first.keys():
        if name in lowest:  # a delivery limit below 0 is none
            limits = [value for value in (first[name], second[name]) if _number(value) >= 0]
            both[name] = min(limits, key=_number, default=first[name])
    return both


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
