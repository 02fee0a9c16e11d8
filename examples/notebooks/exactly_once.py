# Databricks notebook source
# MAGIC %md
# MAGIC # Exactly once, in five minutes
# MAGIC
# MAGIC Orders go into a queue. A streaming query writes them to a Delta table and publishes the large ones to an exchange.
# MAGIC Each micro-batch is one transaction: what it consumes, what it publishes and what it appends happen together or not at all.
# MAGIC
# MAGIC **Compute:** a dedicated, single-node cluster with runtime 18 (Spark 4.1) or later. With a broker of yours (widget `broker_url`): any compute of this
# MAGIC runtime that reaches it, standard and serverless too. The volume and the catalog must exist. On your machine: `python examples/run_notebook.py examples/notebooks/exactly_once.py`.

# COMMAND ----------

widgets = {"wheel": "/Volumes/main/txmq/files/txmq-0.1.0-py3-none-any.whl", "catalog": "main", "schema": "txmq", "volume": "/Volumes/main/txmq/files"}
for name in (*widgets, "broker_url", "amqp_url", "user", "secret", "tls_ca"):
    dbutils.widgets.text(name, widgets.get(name, ""))
wheel = dbutils.widgets.get("wheel")

# COMMAND ----------

# MAGIC %pip install $wheel

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

# MAGIC %run ./_setup

# COMMAND ----------

import json

from matplotlib import pyplot
from pyspark.sql import functions as F

import txmq
from txmq import transactional

# COMMAND ----------

# MAGIC %md
# MAGIC ## An exchange and two queues

# COMMAND ----------

orders_queue, large_queue, alerts, app = unique("orders"), unique("large-orders"), unique("alerts"), unique("shop")
channel = broker.channel()
channel.exchange_declare(alerts, "topic")
channel.queue_declare(orders_queue)
channel.queue_declare(large_queue)
channel.queue_bind(large_queue, alerts, "large.#")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A producer: one transaction of 1,000 orders
# MAGIC Until `tx_commit` nothing is visible; after it everything is, and on the disk.

# COMMAND ----------

channel.tx_select()
for number in range(1_000):
    order = {"id": number, "amount": (number * 37) % 2_000, "country": ("AT", "DE", "PT")[number % 3]}
    channel.publish(json.dumps(order).encode(), routing_key=orders_queue)

print("before the commit:", waiting(orders_queue))
channel.tx_commit()
print("after the commit: ", waiting(orders_queue))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream: consume, append, publish, in one transaction per micro-batch
# MAGIC `txmq.observe` shows how far the query is, until it ends.

# COMMAND ----------

ORDER = "id bigint, amount bigint, country string"


def orders_and_alerts(batch, tx):
    orders = batch.select(F.from_json(F.col("body").cast("string"), ORDER).alias("order")).select("order.*")
    tx.append(orders, table("orders"), partitionBy="country")
    large = orders.where("amount > 1500")
    tx.publish(large.select(F.to_json(F.struct("*")).alias("body"), F.concat(F.lit("large."), "country").alias("routing_key")), exchange=alerts)


def start(function=orders_and_alerts):
    stream = spark.readStream.format("txmq").options(**address).option("queue", orders_queue).option("appId", app)
    each = transactional(function, **at, app_id=app, ledger=table("ledger"), ledger_sync=True)
    return (
        stream.option("maxOffsetsPerTrigger", 400)
        .load()
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", checkpoint("orders"))
        .trigger(availableNow=True)
        .start()
    )


queries = []
while waiting(orders_queue):  # once; on Spark 4.1 for each batch
    queries.append(start())
    txmq.observe(queries[-1]).wait()
    queries[-1].awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Batches and lag
# MAGIC A progress of the query says where its batch ended, and where the queue ended then; on Spark Connect as a text. Spark 4.1 says where the
# MAGIC batch ended twice.

# COMMAND ----------

def offsets(value):
    return json.loads(value) if isinstance(value, str) else value


progress = []
for each in [each for query in queries for each in query.recentProgress]:
    source = json.loads(each.json)["sources"][0]
    lag = sum(offsets(source["latestOffset"]).values()) - sum(offsets(source["endOffset"]).values())
    progress.append((each["batchId"], source["numInputRows"], lag, each["durationMs"]["triggerExecution"] / 1000))

display(spark.createDataFrame(progress, "batch BIGINT, rows BIGINT, lag BIGINT, seconds DOUBLE"))

figure, (above, below) = pyplot.subplots(2, sharex=True)
numbers = [str(batch) for batch, _, _, _ in progress]
above.bar(numbers, [lag for _, _, lag, _ in progress])
above.set_ylabel("lag in messages")
below.bar(numbers, [seconds for _, _, _, seconds in progress])
below.set_ylabel("seconds")
below.set_xlabel("batch")
display(figure)
pyplot.close(figure)  # or the notebook shows it once more

# COMMAND ----------

# MAGIC %md
# MAGIC ## What there is now

# COMMAND ----------


def state():
    stored = spark.table(table("orders"))
    return {
        "in Delta": stored.count(),
        "distinct": stored.select("id").distinct().count(),
        "alerts": waiting(large_queue),
        "left in the queue": waiting(orders_queue),
    }


first = state()
print(first)
expected = sum((number * 37) % 2_000 > 1_500 for number in range(1_000))
assert first == {"in Delta": 1_000, "distinct": 1_000, "alerts": expected, "left in the queue": 0}

# COMMAND ----------

# MAGIC %md
# MAGIC ## A batch that fails half-way
# MAGIC The function raises after all its operations. Nothing of the batch has happened: its messages are in the queue, and no row is in the table.
# MAGIC The next start of the query runs it again.

# COMMAND ----------



def fails(batch, tx):
    orders_and_alerts(batch, tx)
    raise RuntimeError("the driver is out of memory")


channel.publish(json.dumps({"id": 1_000, "amount": 1_999, "country": "AT"}).encode(), routing_key=orders_queue)
channel.tx_commit()
try:
    start(fails).awaitTermination()
except Exception as error:
    print(type(error).__name__)
else:
    raise AssertionError("the function did not fail")
print(state())
assert state() == {**first, "left in the queue": 1}

while waiting(orders_queue):
    start().awaitTermination()
again = state()
print(again)
assert again == {"in Delta": 1_001, "distinct": 1_001, "alerts": expected + 1, "left in the queue": 0}

# COMMAND ----------

# MAGIC %md
# MAGIC ## A Delta table has the offsets
# MAGIC It has one row for each queue of each micro-batch. The broker's ledger is what decides; this is its copy for everybody who reads Delta.

# COMMAND ----------

ledger = spark.table(table("ledger"))
display(ledger.select("app_id", "batch_id", "log", "start_offset", "end_offset", "messages", "published").orderBy("batch_id"))
assert ledger.agg(F.sum("published")).head()[0] == expected + 1

# COMMAND ----------

# MAGIC %md
# MAGIC ## What the broker says
# MAGIC The ledger of the broker as a DataFrame, with the commit of each batch and the versions of the tables that have its rows.

# COMMAND ----------

batches = spark.read.format("txmq").options(**address).option("table", "ledger").load().where(F.col("app_id") == app)
display(batches.select("batch_id", "transaction", "messages", "published", F.explode("tables").alias("to")).select("*", "to.version").drop("to"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Looking without consuming
# MAGIC A batch read is a browser: it claims nothing and changes nothing.

# COMMAND ----------

published = spark.read.format("txmq").options(**address).option("queue", large_queue).load()
display(published.selectExpr("offset", "routing_key", "CAST(body AS STRING) AS body").limit(5))
assert published.count() == expected + 1
assert state() == again

# COMMAND ----------

channel.close()
clean_up(table("orders"), table("ledger"))
