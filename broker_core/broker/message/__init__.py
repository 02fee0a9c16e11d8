"""Messages in queues: how they enter, are delivered, are settled, and leave."""
