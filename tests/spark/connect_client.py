"""A client of Spark Connect as a platform gives it to a notebook: no JVM, no py4j, nothing in its environment.

``python -m tests.spark.connect_client REMOTE URL FOLDER`` runs a stream with every operation of a batch on a table and
prints, as JSON, what the server then reads. Its session takes no settings once it is there.

Not here: the server (``test_connect_client.py``).
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def refuse(_conf: Any, key: str, *_value: Any) -> Any:
    raise RuntimeError(f"[CONFIG_NOT_AVAILABLE] Configuration {key} is not available")


def operations(folder: str) -> Any:
    def each(batch: Any, tx: Any) -> None:
        rows = batch.selectExpr("CAST(body AS STRING) AS body", "1 AS n")
        tx.publish(rows.select("body"), queue="out")
        tx.append(rows, f"{folder}/added")
        tx.merge(
            rows, f"{folder}/merged", "t.body = s.body", update={"n": "t.n + s.n"}, insert=True, keys=["body"]
        )
        tx.overwrite(rows.where("body = 'd'"), f"{folder}/merged", "body = 'd'")
        tx.delete(rows.where("body = 'c'"), f"{folder}/merged", "t.body = s.body")

    return each


def main(remote: str, url: str, folder: str) -> None:
    for name in ("py4j", "pyspark.core"):  # what pyspark-client does not have
        sys.modules[name] = None  # type: ignore[assignment]
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.conf import RuntimeConf

    import txmq

    spark = SparkSession.builder.remote(remote).getOrCreate()
    for table in ("added", "merged"):
        spark.createDataFrame([], "body string, n int").write.format("delta").save(f"{folder}/{table}")
    for method in ("set", "unset"):
        setattr(RuntimeConf, method, refuse)
    stream = (
        spark.readStream.format("txmq")
        .options(url=url, queue="in", appId="app", maxOffsetsPerTrigger="2")
        .load()
    )
    each = txmq.transactional(operations(folder), url=url, app_id="app", ledger=f"{folder}/ledger")
    query = stream.writeStream.foreachBatch(each).option("checkpointLocation", f"{folder}/checkpoint")
    query = query.trigger(availableNow=True).start()
    with contextlib.redirect_stdout(sys.stderr):
        seen = txmq.observe(query, url, app_id="app", interval_s=0.05)
        query.awaitTermination()
        seen.wait()
    native = spark.readStream.format("txmq").options(url=url, queue="out", appId="copy").load().select("body")
    sink = native.writeStream.format("txmq").options(url=url, appId="copy", queue="copied")
    sink.option("checkpointLocation", f"{folder}/copies").trigger(
        availableNow=True
    ).start().awaitTermination()
    rows = {
        table: sorted(
            [row["body"], row["n"]] for row in spark.read.format("delta").load(f"{folder}/{table}").collect()
        )
        for table in ("added", "merged")
    }
    copied = (
        spark.read.format("txmq")
        .options(url=url, queue="copied", includeKey="true", includeHeaders="true")
        .load()
        .selectExpr("CAST(body AS STRING) AS b", "CAST(key AS STRING) AS key", "headers")
    )
    rows["copied"] = sorted(map(list, copied.collect()))
    rows["batches"] = spark.read.format("delta").load(f"{folder}/ledger").count()
    state = spark.read.format("txmq").option("url", url)
    entries = state.option("table", "ledger").load().where("app_id = 'app'").collect()
    rows["versions"] = sorted(
        [name.rpartition("/")[2], operation, version]
        for entry in entries
        for name, operation, count, _, _, version in entry["tables"]
        if count
    )
    history = {row["sequence"] for row in state.option("table", "transactions").load().collect()}
    rows["in the history"] = all(entry["transaction"] in history for entry in entries)
    sources = [source for progress in query.recentProgress for source in progress["sources"]]
    rows["read"] = sum(source["numInputRows"] for source in sources)
    rows["queues"] = sorted(row["name"] for row in state.option("table", "queues").load().collect())
    typed = spark.sql("SELECT 1 AS id, 'a' AS name")
    encoded = [txmq.encode(typed, format=format) for format in ("json", "csv")]
    rows["encoded"] = [row["body"] for each in encoded for row in each.collect()]
    rows["observed"] = [seen.samples[-1].lag, seen.samples[-1].running, str(seen.error or "")]
    print(json.dumps(rows))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
