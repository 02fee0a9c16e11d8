"""txmq on Apache Kafka: what a Kafka client needs, without one of ours running beside Kafka."""
