"""Delta: the port of ``connector/table_format.py`` on Delta's log, writer and MERGE."""
