"""One queue: a log of entries, what is settled of it, and which entry is next.

Not here: routing, and who may do what (``broker/topology.py``).
"""

from broker_core.broker.queue.queue import REPLIES as REPLIES
from broker_core.broker.queue.queue import Queue as Queue
from broker_core.broker.queue.run import Run as Run
