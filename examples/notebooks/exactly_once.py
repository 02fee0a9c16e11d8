# Databricks notebook source
# MAGIC %md
# MAGIC # Exactly once, in five minutes
# MAGIC
# MAGIC Orders go into a queue. A streaming query writes them to a Delta table and publishes the large ones to an exchange.
# MAGIC Each micro-batch is one transaction: what it consumes, what it publishes and what it appends happen together or not at all.
# MAGIC
# MAGIC This notebook also runs as a plain script. The broker lives in this process.
# MAGIC
# MAGIC Packages: the wheel of txmq where the platform has Spark, `pip install '.[spark]'` in a checkout for a plain script; matplotlib for the plot.

# COMMAND ----------

import json
import tempfile
from importlib import util
from pathlib import Path

from pyspark.sql import functions as F

import txmq
from txmq import Broker, recommended_conf, transactional

# COMMAND ----------

# MAGIC %md
# MAGIC A platform gives a notebook its session and its parameters. A plain script makes its own session.

# COMMAND ----------

given = "spark" in globals()
if not given:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("exactly once").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    for key, value in recommended_conf().items():
        builder = builder.config(key, value)
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

folder = ""  # for tables, checkpoints and the broker: where driver and executors reach it
if "dbutils" in globals():
    dbutils.widgets.text("folder", "")
    folder = dbutils.widgets.get("folder")
folder = Path(folder or tempfile.mkdtemp(prefix="txmq-notebook-"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## A broker, an exchange, two queues
# MAGIC `Broker.open` opens a data directory. Other processes (here: Spark's workers) find it by the same directory.

# COMMAND ----------

broker = Broker.open(folder / "data")
channel = broker.channel()
channel.exchange_declare("alerts", "topic")
channel.queue_declare("orders")
channel.queue_declare("large-orders")
channel.queue_bind("large-orders", "alerts", "large.#")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A producer: one transaction of 1,000 orders
# MAGIC Until `tx_commit` nothing is visible; after it everything is, and on the disk.

# COMMAND ----------

channel.tx_select()
for number in range(1_000):
    order = {"id": number, "amount": (number * 37) % 2_000, "country": ("AT", "DE", "PT")[number % 3]}
    channel.publish(json.dumps(order).encode(), routing_key="orders")

print("before the commit:", {queue.name: queue.messages for queue in broker.queues()})
channel.tx_commit()
print("after the commit: ", {queue.name: queue.messages for queue in broker.queues()})

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream: consume, append, publish, in one transaction per micro-batch
# MAGIC `txmq.observe` shows how far the query is, until it ends.

# COMMAND ----------

ORDER = "id bigint, amount bigint, country string"


def orders_and_alerts(batch, tx):
    orders = batch.select(F.from_json(F.col("body").cast("string"), ORDER).alias("order")).select("order.*")
    tx.append(orders, str(folder / "lake" / "orders"), partitionBy="country")
    large = orders.where("amount > 1500")
    tx.publish(large.select(F.to_json(F.struct("*")).alias("body"), F.concat(F.lit("large."), "country").alias("routing_key")), exchange="alerts")


def start():
    stream = spark.readStream.format("txmq").option("data", str(folder / "data")).option("queue", "orders").option("appId", "shop")
    each = transactional(orders_and_alerts, data=str(folder / "data"), app_id="shop", ledger=str(folder / "lake" / "ledger"), ledger_sync=True)
    return (
        stream.option("maxOffsetsPerTrigger", 400)
        .load()
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


queries = []
while next(queue.messages for queue in broker.queues() if queue.name == "orders"):  # once; on Spark 4.1 for each batch
    queries.append(start())
    txmq.observe(queries[-1], data=folder / "data", app_id="shop").wait()
    queries[-1].awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Batches and lag
# MAGIC A progress of the query says where its batch ended, and where the queue ended then; on Spark Connect as a text. Spark 4.1 says where the
# MAGIC batch ended twice.

# COMMAND ----------

def offsets(told):
    return json.loads(told) if isinstance(told, str) else told


progress = []
for each in [said for query in queries for said in query.recentProgress]:
    source = json.loads(each.json)["sources"][0]
    lag = sum(offsets(source["latestOffset"]).values()) - sum(offsets(source["endOffset"]).values())
    progress.append((each["batchId"], source["numInputRows"], lag, each["durationMs"]["triggerExecution"] / 1000))

table = spark.createDataFrame(progress, "batch BIGINT, rows BIGINT, lag BIGINT, seconds DOUBLE")
if "display" in globals():
    display(table)
else:
    table.show()

if util.find_spec("matplotlib"):
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True)
    numbers = [str(batch) for batch, _, _, _ in progress]
    above.bar(numbers, [lag for _, _, lag, _ in progress])
    above.set_ylabel("lag in messages")
    below.bar(numbers, [seconds for _, _, _, seconds in progress])
    below.set_ylabel("seconds")
    below.set_xlabel("batch")
    figure.savefig(folder / "batches.png")

# COMMAND ----------

# MAGIC %md
# MAGIC ## What there is now

# COMMAND ----------


def state():
    table = spark.read.format("delta").load(str(folder / "lake" / "orders"))
    return {
        "in Delta": table.count(),
        "distinct": table.select("id").distinct().count(),
        "alerts": next(queue.messages for queue in broker.queues() if queue.name == "large-orders"),
        "left in the queue": next(queue.messages for queue in broker.queues() if queue.name == "orders"),
    }


first = state()
print(first)
expected = sum((number * 37) % 2_000 > 1_500 for number in range(1_000))
assert first == {"in Delta": 1_000, "distinct": 1_000, "alerts": expected, "left in the queue": 0}

# COMMAND ----------

# MAGIC %md
# MAGIC ## Spark runs the last batch again
# MAGIC A driver that dies before Spark notes the end of a batch runs that batch again. We take Spark's note away, which looks the same.

# COMMAND ----------

notes = sorted((folder / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
print("Spark forgets batch", notes[-1].name)
notes[-1].unlink()
(notes[-1].parent / f".{notes[-1].name}.crc").unlink(missing_ok=True)

start().awaitTermination()
print(state())
assert state() == first, "nothing may be there twice"

# COMMAND ----------

# MAGIC %md
# MAGIC ## The offsets stand in a Delta table
# MAGIC It has one row for each queue of each micro-batch. The broker's ledger is what decides; this is its copy for everybody who reads Delta.

# COMMAND ----------

ledger = spark.read.format("delta").load(str(folder / "lake" / "ledger"))
ledger.select("app_id", "batch_id", "log", "start_offset", "end_offset", "messages", "published").orderBy("batch_id").show()
assert ledger.agg(F.sum("published")).head()[0] == expected

# COMMAND ----------

# MAGIC %md
# MAGIC ## What the broker says
# MAGIC Pipelines and queues as frames of pandas; and the ledger of the broker as a DataFrame, with the commit of each batch and the versions of
# MAGIC the tables that have its rows.

# COMMAND ----------

print(txmq.apps(data=folder / "data")[["app_id", "batch_id", "lag", "lag_s"]])
print(txmq.queues(data=folder / "data")[["name", "messages", "owner", "oldest_s"]])
batches = spark.read.format("txmq").option("data", str(folder / "data")).option("table", "ledger").load()
batches.select("batch_id", "transaction", "messages", "published", F.explode("tables").alias("to")).select("*", "to.version").drop("to").show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Looking without consuming
# MAGIC A batch read is a browser: it claims nothing and changes nothing.

# COMMAND ----------

alerts = spark.read.format("txmq").option("data", str(folder / "data")).option("queue", "large-orders").load()
alerts.selectExpr("offset", "routing_key", "CAST(body AS STRING) AS body").show(5, truncate=False)
assert alerts.count() == expected
assert state() == first

# COMMAND ----------

if not given:
    spark.stop()
channel.close()
broker.close()
