"""``format("txmq")``: the class that Spark finds. Its docstring is the manual.

Not here: reading and writing.
Invariants: it is built in many processes and pickled, so it holds only options. A process imports what it
needs: one looks up the data sources for every job of Spark, and Arrow would be most of its time.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError


class TxmqDataSource(DataSource):
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
    ``includeKey`` adds the column ``key``, ``includeHeaders`` the column ``headers``, an array of (key, value):
    those of Kafka's records as bytes, and of other messages the routing key and the headers.

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
    | option | default | for | meaning |
    |---|---|---|---|
    | `url` |  | all | a running broker: `txmq://host:5673`, or Kafka: `kafka://host:9092,host:9092` |
    | `data` |  | all | the broker of this data directory, started if needed; one of `url`, `data` is required |
    | `vhost` |  | all | the virtual host at `data`, default `/`; a `url` has it as its path: `txmq://host:5673/sales` |
    | `queue` | required (reads) | reads, writes | read: one queue, or several separated by commas; write: default exchange and this routing key |
    | `table` |  | table reads | the state of the broker in place of messages: `transactions`, `ledger`, `queues`, `apps` or `consumers` |
    | `appId` | required (streams) | streams | the stable name of the pipeline: owner of the claim and of the ledger entry |
    | `startingOffsets` | `earliest` | reads | `earliest`, `latest` or JSON `{"queue": offset}`; for a new query; skipped messages stay. On Kafka also `{"ledger": PATH, "batch": N}`: where an app was before it decided batch N |
    | `startingTimestamp` |  | reads | first message committed at or after it (ms since the epoch, or ISO 8601) |
    | `endingOffsets` | `latest` | batch reads | `latest` or JSON `{"queue": offset}`, exclusive |
    | `maxOffsetsPerTrigger` |  | stream reads | maximum messages per micro-batch; a transaction is not split |
    | `maxBytesPerTrigger` |  | stream reads | maximum bytes per micro-batch (`10m`); a transaction is not split |
    | `minOffsetsPerTrigger` |  | stream reads | wait for this many messages in all queues together |
    | `maxTriggerDelay` | `15m` | stream reads | maximum wait after the commit of the oldest message (`30s`) |
    | `minPartitions` |  | reads | minimum tasks per micro-batch; default: one per 1,000 rows, up to the cores of the host or the partitions |
    | `maxRecordsPerPartition` |  | reads | maximum messages per task |
    | `includeProperties` | `false` | reads | adds the column `properties` |
    | `includeTransaction` | `false` | reads | adds the column `transaction`: the number of the commit that published the message |
    | `includeKey` | `false` | reads | adds the column `key`: the bytes of Kafka's, null without one; elsewhere the routing key |
    | `includeHeaders` | `false` | reads | adds the column `headers`, as Spark's Kafka source has it |
    | `failOnDataLoss` | `true` | stream reads | fail if messages of a claimed range no longer exist |
    | `exchange` | `""` | writes | the exchange, unless a column gives it; empty: the default exchange |
    | `routingKey` | `""` | writes | the routing key, unless a column gives it |
    | `onUnroutable` | `fail` | writes | a message that reaches no queue: `fail` the transaction, or `drop` it |
    | `onNewCheckpoint` | `fail` | streams | another checkpoint owns this `appId`: `fail`, or `resume` where its last decided batch ended |
    | `user` |  | all | the user of the broker at `url`; its password is one of the next two, or `TXMQ_PASSWORD` |
    | `password` |  | all | never shown; see docs/tls.md for secret stores |
    | `passwordFile` |  | all | a file of the driver with the password |
    | `token` |  | all | a token in place of a user |
    | `tlsCa` |  | all | `txmqs://`: the authority of the broker's certificate, a PEM file on every host; default: those of the machine |
    | `tlsCert` |  | all | a certificate of this client, a PEM file on every host |
    | `tlsKey` |  | all | its key |
    """  # noqa: E501

    def __init__(self, options: MutableMapping[str, str]) -> None:
        from connector.options import absolute_data
        from connector.stream import spark_version

        spark_version.require()
        super().__init__(absolute_data(options))

    @classmethod
    def name(cls) -> str:
        return "txmq"

    def schema(self) -> StructType:
        from connector.options import READ, Included, check_known, table_options

        if "table" in self.options:
            from connector import state

            return state.schema(table_options(self.options).table)
        from connector.stream.schema import read_schema

        check_known(self.options, READ)
        return read_schema(Included(*(self._is_on(f"include{name.title()}") for name in Included._fields)))

    def _is_on(self, option: str) -> bool:
        return str(self.options.get(option, "false")).strip().lower() == "true"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from connector.options import read_options
        from connector.stream import spark_version
        from connector.stream.schema import check_read_schema

        if "table" in self.options:
            raise OptionError(
                f"table {self.options['table']!r} is the state of the broker, which is no stream",
                "read it with spark.read, or a queue with .option('queue', ...)",
            )
        options = read_options(self.options, "stream read")
        check_read_schema(schema, options.included)
        return spark_version.stream_reader(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from connector.options import read_options, table_options
        from connector.stream.schema import check_read_schema
        from connector.stream.source import TxmqBatchReader

        if "table" in self.options:
            from connector import state

            table = table_options(self.options)
            state.check_schema(table.table, schema)
            return state.TableReader(table)
        options = read_options(self.options, "batch read")
        check_read_schema(schema, options.included)
        return TxmqBatchReader(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """``overwrite`` means output mode complete: every micro-batch publishes the whole result."""
        from connector.options import write_options
        from connector.stream.schema import check_publish_columns
        from connector.stream.sink import TxmqStreamWriter

        options = write_options(self.options, "stream write")
        check_publish_columns(schema)
        return TxmqStreamWriter(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
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
