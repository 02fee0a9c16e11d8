"""Who a caller is, and what it may do: shared by all listeners."""
