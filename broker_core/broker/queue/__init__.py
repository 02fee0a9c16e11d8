"""One queue: a log of entries, which of them are settled, and which entry is next.

Not here: routing and access checks (``broker/topology/topology.py``).
"""

from broker_core.broker.queue.queue import REPLIES as REPLIES
from broker_core.broker.queue.queue import Queue as Queue
from broker_core.broker.queue.run import Run as Run

Queues = tuple[Queue, ...]
