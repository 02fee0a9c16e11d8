"""Arguments of queues, exchanges, consumers and bindings."""

from broker_core.message.arguments.checks import ARGUMENT_BYTES as ARGUMENT_BYTES
from broker_core.message.arguments.checks import QueueArguments as QueueArguments
from broker_core.message.arguments.checks import check_arguments as check_arguments
from broker_core.message.arguments.checks import check_binding as check_binding
from broker_core.message.arguments.checks import check_consumer_arguments as check_consumer_arguments
from broker_core.message.arguments.checks import check_exchange_arguments as check_exchange_arguments
from broker_core.message.arguments.checks import check_properties as check_properties
from broker_core.message.arguments.checks import check_reserved as check_reserved
from broker_core.message.arguments.checks import inequivalent as inequivalent
from broker_core.message.arguments.checks import inequivalent_arguments as inequivalent_arguments
from broker_core.message.arguments.checks import same as same
from broker_core.message.arguments.values import MAX_TEXT_BYTES as MAX_TEXT_BYTES
from broker_core.message.arguments.values import MAX_TIME_MS as MAX_TIME_MS
from broker_core.message.arguments.values import check_text as check_text
from broker_core.message.arguments.values import type_name as type_name
