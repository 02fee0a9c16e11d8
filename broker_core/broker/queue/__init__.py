"""One queue: a log of entries, which of them are settled, and which entry is next.

Not here: routing and access checks (``broker/topology/topology.py``).
"""

from broker_core.broker.queue.log import Run as Run
from broker_core.broker.queue.queue import REPLIES as REPLIES
from broker_core.broker.queue.queue import Queue as Queue

Queues = tuple[Queue, ...]
