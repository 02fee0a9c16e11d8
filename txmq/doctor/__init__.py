"""``txmq doctor``: the command (``command.py``) and its checks."""
