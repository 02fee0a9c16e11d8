"""The topics of txmq: made, checked, and the exchanges and bindings that one of them has."""
