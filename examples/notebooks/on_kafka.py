# Databricks notebook source
# MAGIC %md
# MAGIC # The same pipeline on Kafka
# MAGIC
# MAGIC The pipeline of the notebook `exactly_once`, with topics instead of queues. What changes is the url: `kafka://host:9092`.
# MAGIC Each micro-batch still is one transaction: what it consumes, what it publishes to Kafka and what it appends to Delta happen together or not at all.
# MAGIC
# MAGIC It needs a Kafka. Packages: the wheel of txmq with the extra `kafka` where the platform has Spark, `pip install '.[spark,kafka]'` in a checkout for a plain script;
# MAGIC matplotlib for the plot. The environment variable `KAFKA` has its address; a plain script takes it too: `KAFKA=localhost:9092 python on_kafka.py`.

# COMMAND ----------

import json
import os
import tempfile
import uuid
from importlib import util
from pathlib import Path

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic
from pyspark.sql import functions as F

import txmq
from txmq import recommended_conf, transactional

hosts = os.environ.get("KAFKA", "localhost:9092")
url = f"kafka://{hosts}"
run = uuid.uuid4().hex[:8]  # so that the notebook can run twice on one cluster
orders_topic, large_topic, app = f"orders-{run}", f"large-orders-{run}", f"shop-{run}"

# COMMAND ----------

# MAGIC %md
# MAGIC A platform gives a notebook its session and its parameters. A plain script makes its own session.

# COMMAND ----------

given = "spark" in globals()
if not given:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("on Kafka").config("spark.ui.enabled", "false")
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
# MAGIC ## Two topics, and a producer that knows nothing of txmq

# COMMAND ----------

admin = KafkaAdminClient(bootstrap_servers=hosts)
admin.create_topics([NewTopic(orders_topic, 3, -1), NewTopic(large_topic, 1, -1)])
admin.close()

producer = KafkaProducer(bootstrap_servers=hosts, acks="all")
for number in range(1_000):
    order = {"id": number, "amount": (number * 37) % 2_000, "country": ("AT", "DE", "PT")[number % 3]}
    producer.send(orders_topic, json.dumps(order).encode(), key=order["country"].encode())
producer.flush()
producer.close()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream: consume, append, publish, in one transaction per micro-batch
# MAGIC The decision is one Kafka transaction. A consumer with `isolation.level=read_committed` sees a micro-batch whole or not at all.

# COMMAND ----------

ORDER = "id bigint, amount bigint, country string"


def orders_and_alerts(batch, tx):
    orders = batch.select(F.from_json(F.col("body").cast("string"), ORDER).alias("order")).select("order.*")
    tx.append(orders, str(folder / "lake" / "orders"), partitionBy="country")
    tx.publish(orders.where("amount > 1500").select(F.to_json(F.struct("*")).alias("body")), queue=large_topic)


def start():
    stream = spark.readStream.format("txmq").option("url", url).option("queue", orders_topic).option("appId", app)
    each = transactional(orders_and_alerts, url=url, app_id=app, ledger=str(folder / "lake" / "ledger"), ledger_sync=True)
    return (
        stream.option("maxOffsetsPerTrigger", 400)
        .load()
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


start().awaitTermination()
while txmq.apps(url=url).set_index("app_id").at[app, "lag"]:  # on Spark 4.1, where a run is one batch
    start().awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Lag
# MAGIC The ledger in Delta has the offsets of every batch: how many messages were left after each.

# COMMAND ----------

written = spark.read.format("delta").load(str(folder / "lake" / "ledger"))
batches = written.groupBy("sequence").agg(F.sum(F.expr("end_offset - start_offset")).alias("messages")).orderBy("sequence")
if "display" in globals():
    display(batches)
else:
    batches.show()

if util.find_spec("matplotlib"):
    from matplotlib import pyplot

    left, lag = 1_000, []
    rows = batches.where("messages IS NOT NULL").collect()
    for row in rows:
        left -= row["messages"]
        lag.append(left)
    figure, axes = pyplot.subplots()
    axes.plot([row["sequence"] for row in rows], lag, marker="o")
    axes.set_xlabel("batch")
    axes.set_ylabel("lag in messages")
    figure.savefig(folder / "lag.png")

# COMMAND ----------

# MAGIC %md
# MAGIC ## What there is now
# MAGIC A batch read claims nothing and changes nothing.

# COMMAND ----------


def state():
    table = spark.read.format("delta").load(str(folder / "lake" / "orders"))
    alerts = spark.read.format("txmq").option("url", url).option("queue", large_topic).load()
    return {"in Delta": table.count(), "distinct": table.select("id").distinct().count(), "alerts": alerts.count()}


first = state()
print(first)
expected = sum((number * 37) % 2_000 > 1_500 for number in range(1_000))
assert first == {"in Delta": 1_000, "distinct": 1_000, "alerts": expected}

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
# MAGIC It has one row for each partition of each micro-batch. The ledger on Kafka is what decides; this is its copy for everybody who reads Delta.

# COMMAND ----------

ledger = spark.read.format("delta").load(str(folder / "lake" / "ledger"))
ledger.select("app_id", "batch_id", "log", "start_offset", "end_offset", "published").orderBy("batch_id", "log").show()
assert ledger.agg(F.sum(F.expr("end_offset - start_offset"))).head()[0] == 1_000

# COMMAND ----------

if not given:
    spark.stop()
