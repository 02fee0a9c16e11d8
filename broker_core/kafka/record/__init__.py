"""Record batches as columns: bytes of Kafka to Arrow and back, without a cluster."""
