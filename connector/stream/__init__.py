"""The source and the sink of Spark on an engine: offsets, rows, and the tasks that stage."""
