# Databricks notebook source
# MAGIC %md
# MAGIC # From an AMQP producer to Delta, without duplicates
# MAGIC
# MAGIC A producer that speaks AMQP, as to RabbitMQ, sends orders and waits for confirms. When a confirm is lost, it must send again, and the message
# MAGIC is there twice. A driver that dies in the middle of a batch runs it again, and a plain append is there twice.
# MAGIC
# MAGIC The first kind is found by the message id, in the state of the query. The second kind does not happen: a micro-batch is one transaction.
# MAGIC On Kafka only the url differs (see the notebook *on_kafka*).
# MAGIC
# MAGIC Packages: the wheel of txmq where the platform has Spark, `pip install '.[spark]'` in a checkout for a plain script; and pika, which is the producer.

# COMMAND ----------

import json
import tempfile
from pathlib import Path

import pika
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

    builder = SparkSession.builder.master("local[2]").appName("without duplicates").config("spark.ui.enabled", "false")
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
# MAGIC ## A broker with a port for AMQP
# MAGIC `Broker.open` runs it in this process, so that the notebook needs nothing else. In production it is `txmq serve --data data`.

# COMMAND ----------

broker = Broker.open(folder / "data", amqp=["127.0.0.1:0"])
(amqp,) = broker.amqp_urls

# COMMAND ----------

# MAGIC %md
# MAGIC ## A producer, as for RabbitMQ
# MAGIC It sends 300 orders with confirms. Every tenth confirm is lost on the way: the producer cannot know whether the message is there, and sends it
# MAGIC again, with the same message id.

# COMMAND ----------

address = pika.URLParameters(amqp.replace("amqp://", "amqp://guest:guest@") + "/%2F")
with pika.BlockingConnection(address) as connection:
    channel = connection.channel()
    channel.queue_declare("orders", durable=True)
    channel.confirm_delivery()
    for number in range(300):
        body = json.dumps({"id": number, "amount": number * 1.5, "at": f"2026-03-01T12:{number // 60:02d}:{number % 60:02d}Z"})
        properties = pika.BasicProperties(content_type="application/json", message_id=f"order-{number}", delivery_mode=2)
        for _ in range(2 if number % 10 == 0 else 1):
            channel.basic_publish("", "orders", body.encode(), properties)

print({queue.name: queue.messages for queue in broker.queues()})

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream
# MAGIC `dropDuplicatesWithinWatermark` keeps the message ids of the last ten minutes in the state of the query. The state belongs to the micro-batch like
# MAGIC the rows do: after a crash both continue at the same place.

# COMMAND ----------

table = str(folder / "lake" / "orders")


def orders(batch, tx):
    decoded = txmq.decode(batch, "id bigint not null, amount double, at timestamp", mode="fail", keep=["message_id"])
    tx.append(decoded, table)


def start():
    options = {"data": str(folder / "data"), "queue": "orders", "appId": "orders", "includeProperties": "true", "maxOffsetsPerTrigger": "200"}
    rows = spark.readStream.format("txmq").options(**options).load()
    once = (
        rows.select("body", F.col("properties.message_id").alias("message_id"), "timestamp")
        .withWatermark("timestamp", "10 minutes")
        .dropDuplicatesWithinWatermark(["message_id"])
    )
    each = transactional(orders, data=str(folder / "data"), app_id="orders")
    return once.writeStream.foreachBatch(each).option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()


def run():
    """Runs the stream until nothing is left: once on Spark 4.2, once for each batch on 4.1."""
    start().awaitTermination()
    while next(queue.messages for queue in broker.queues() if queue.name == "orders"):
        start().awaitTermination()


run()


def state():
    stored = spark.read.format("delta").load(table)
    return {"rows": stored.count(), "orders": stored.select("id").distinct().count(), "left": sum(queue.messages for queue in broker.queues())}


print(state())
assert state() == {"rows": 300, "orders": 300, "left": 0}

# COMMAND ----------

# MAGIC %md
# MAGIC ## The driver dies after the append, and the producer sends an old order again
# MAGIC Spark notes the end of a batch last. We take its last note away, which looks like a driver that died just before. Spark runs the batch again: its
# MAGIC answer is that it is decided. The id of the old order is still in the state.

# COMMAND ----------

notes = sorted((folder / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
print("Spark forgets batch", notes[-1].name)
notes[-1].unlink()
(notes[-1].parent / f".{notes[-1].name}.crc").unlink(missing_ok=True)

with pika.BlockingConnection(address) as connection:
    for number in (7, 300):
        order = {"id": number, "amount": 1.0, "at": "2026-03-01T12:59:00Z"}
        connection.channel().basic_publish("", "orders", json.dumps(order).encode(), pika.BasicProperties(message_id=f"order-{number}"))

run()
print(state())
assert state() == {"rows": 301, "orders": 301, "left": 0}, "nothing may be there twice"

# COMMAND ----------

if not given:
    spark.stop()
broker.close()
