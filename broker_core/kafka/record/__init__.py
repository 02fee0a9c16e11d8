"""Record batches as columns: bytes of Kafka to Arrow and back. It knows no cluster."""
