"""The same door for an engine elsewhere: a cluster of Kafka, which is only looked at (``txmq http``)."""
