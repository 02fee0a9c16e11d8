"""Delta: the port of ``connector/tables/table_format.py`` on Delta's log, writer and MERGE."""
