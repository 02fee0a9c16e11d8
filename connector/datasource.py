"""``format("txmq")``: the class that Spark finds. Its docstring is the manual.

Not here: reading and writing.
Invariants: it is built in many processes and pickled, so it holds only options. A process imports what it
needs: one looks up the data sources for every job of Spark, and Arrow would be most of its time.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql import datasource as ds
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError


class TxmqDataSource(ds.DataSource):
    """
    A message queue for Structured Streaming: every micro-batch is one transaction.

    Spark finds it by itself. ``spark.dataSource.register(TxmqDataSource)`` registers it explicitly.

    Reading
    -------
    A stream *consumes*: the messages of a finished micro-batch are acknowledged and deleted. A batch read
    changes nothing.

    >>> reader = spark.readStream.format("txmq").options(url="txmq://localhost:5673")
    >>> orders = reader.options(queue="orders", appId="alerts").load()
    >>> orders.printSchema()
    root
     |-- queue: string (nullable = true)
     |-- partition: integer (nullable = true)
     |-- offset: long (nullable = true)
     |-- exchange: string (nullable = true)
     |-- routing_key: string (nullable = true)
     |-- body: binary (nullable = true)
     |-- timestamp: timestamp (nullable = true)
     |-- redelivered: boolean (nullable = true)

    >>> seen = spark.read.format("txmq").options(data="broker/", queue="orders").load()
    >>> seen.selectExpr("offset", "cast(body AS string)").show()
    +------+-----+
    |offset| body|
    +------+-----+
    |     0|first|
    +------+-----+

    ``includeTransaction`` adds the column ``transaction``, a long: the number of the commit that published
    the message, as ``txmq history show`` and the table ``transactions`` know it. On Kafka it is null.
    ``includeProperties`` adds the column ``properties``: a struct of content_type, content_encoding, headers,
    delivery_mode, priority, correlation_id, reply_to, expiration, message_id, timestamp, type, user_id and
    app_id. It is null for a message without properties.
    ``includeKey`` adds the column ``key``, ``includeHeaders`` the column ``headers``, an array of (key,
    value): those of Kafka's records as bytes, and of other messages the routing key and the headers.

    ``table`` reads the state of the broker in place of messages.

    >>> state = spark.read.format("txmq").options(url="txmq://localhost:5673", table="apps").load()
    >>> state.select("app_id", "lag", "lag_s")

    Writing
    -------
    Columns: ``body`` (binary or string, required), optionally ``exchange``, ``routing_key`` and
    ``properties`` (any of the fields above). A column overrides the option of the same meaning. Each
    micro-batch of a stream is published exactly once. A batch write is one transaction.

    >>> writer = alerts.writeStream.format("txmq").options(url=url, exchange="alerts")
    >>> writer.options(appId="alerts", checkpointLocation="cp").start()
    >>> frame.write.format("txmq").options(url=url, queue="orders").mode("append").save()

    Options
    -------
    ``print(connector.options.table())``, and docs/spark_reference.md.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        from connector.options import absolute_data
        from connector.stream import spark_version

        spark_version.require()
        super().__init__(absolute_data(options))

    @classmethod
    def name(cls) -> str:
        return "txmq"

    def schema(self) -> StructType:
        from connector.options import READ, ExtraColumns, check_known, table_options

        if "table" in self.options:
            from connector import state

            return state.SCHEMAS[table_options(self.options).table]
        from connector.stream.schema import read_schema

        check_known(self.options, READ)
        texts = (str(self.options.get(f"include{name.title()}", "")) for name in ExtraColumns._fields)
        return read_schema(ExtraColumns(*(text.strip().lower() == "true" for text in texts)))

    def streamReader(self, schema: StructType) -> ds.DataSourceStreamReader:
        from connector.options import read_options
        from connector.stream import spark_version
        from connector.stream.schema import check_read_schema, read_schema

        if "table" in self.options:
            raise OptionError(
                f"table {self.options['table']!r} is the state of the broker, which is no stream",
                "read it with spark.read, or a queue with .option('queue', ...)",
            )
        options = read_options(self.options, "stream read")
        check_read_schema(schema, read_schema(options.included))
        return spark_version.stream_reader(options)

    def reader(self, schema: StructType) -> ds.DataSourceReader:
        from connector.options import read_options, table_options
        from connector.stream.schema import check_read_schema, read_schema
        from connector.stream.source import TxmqBatchReader

        if "table" in self.options:
            from connector import state

            table = table_options(self.options)
            check_read_schema(schema, state.SCHEMAS[table.table], f"table {table.table!r}")
            return state.TableReader(table)
        options = read_options(self.options, "batch read")
        check_read_schema(schema, read_schema(options.included))
        return TxmqBatchReader(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> ds.DataSourceStreamWriter:
        """``overwrite`` means output mode complete: every micro-batch publishes the whole result."""
        from connector.options import write_options
        from connector.stream.schema import check_publish_columns
        from connector.stream.sink import TxmqStreamWriter

        options = write_options(self.options, "stream write")
        check_publish_columns(schema)
        return TxmqStreamWriter(options)

    def writer(self, schema: StructType, overwrite: bool) -> ds.DataSourceWriter:
        from connector.options import write_options
        from connector.stream.schema import check_publish_columns
        from connector.stream.sink import TxmqBatchWriter

        options = write_options(self.options, "batch write")
        if overwrite:
            raise OptionError(
                "mode 'overwrite' is not supported: messages can only be added to a queue",
                "use .mode('append')",
            )
        check_publish_columns(schema)
        return TxmqBatchWriter(options)
