"""What a notebook sees of pipelines and queues: a running query, and lists as pandas frames."""
