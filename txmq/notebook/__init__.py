"""What a notebook sees of apps and queues: a running query, and lists as pandas frames."""
