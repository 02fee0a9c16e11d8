"""A driver whose Spark session is stopped and made anew, with one object of ``transactional`` for both.

``python -m tests.spark.stopped_session URL SCRATCH``. The last line of stdout says what ``flush`` raises between
the sessions.
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame

from broker_core.client.broker import BrokerClient
from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction, Transactional, transactional
from tests.spark.jobs import session


def main(url: str, scratch: str) -> None:
    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")
        tx.append(batch.selectExpr("CAST(body AS STRING) AS body"), f"{scratch}/lake")

    each: Transactional | None = None
    refused = ""
    for body in (b"a", b"b"):
        with BrokerClient(url) as client, client.channel() as channel:
            channel.publish(body, routing_key="in")
        spark = session({}, scratch)
        each = each or transactional(fn, url=url, app_id="app", ledger=f"{scratch}/ledger")
        stream = spark.readStream.format("txmq").options(url=url, queue="in", appId="app").load()
        writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", f"{scratch}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()
        each.flush(60)
        spark.stop()
        try:
            each.flush(60)
        except OptionError as error:
            refused = error.summary
    print(refused, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
