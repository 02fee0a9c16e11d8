# Databricks notebook source
# MAGIC %md
# MAGIC # The same stream on Kafka
# MAGIC
# MAGIC The stream of the notebook `exactly_once`, with topics instead of queues and the url `kafka://host:9092`. The code is the same;
# MAGIC the page `docs/kafka.md` says which guarantees differ.
# MAGIC Each micro-batch still is one transaction: what it consumes, what it publishes to Kafka and what it appends to Delta happen together or not at all.
# MAGIC
# MAGIC **Compute:** dedicated, standard or serverless, with runtime 18 (Spark 4.1) or later, that reaches all nodes of Kafka; its address is the widget
# MAGIC `broker_url`. The volume and the catalog must exist. On your machine: `python examples/run_notebook.py examples/notebooks/on_kafka.py broker_url=kafka://localhost:9092`.

# COMMAND ----------

widgets = {"wheel": "/Volumes/main/txmq/files/txmq-0.1.0-py3-none-any.whl", "catalog": "main", "schema": "txmq", "volume": "/Volumes/main/txmq/files"}
for name in (*widgets, "broker_url", "amqp_url", "user", "secret", "tls_ca"):
    dbutils.widgets.text(name, widgets.get(name, ""))
wheel = dbutils.widgets.get("wheel") + "[kafka]"

# COMMAND ----------

# MAGIC %pip install $wheel

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

# MAGIC %run ./_setup

# COMMAND ----------

import json

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic
from matplotlib import pyplot
from pyspark.sql import functions as F

import txmq
from txmq import transactional

hosts = broker_url.removeprefix("kafka://")
orders_topic, large_topic, app = unique("orders"), unique("large-orders"), unique("shop")

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
    tx.append(orders, table("orders"), partitionBy="country")
    tx.publish(orders.where("amount > 1500").select(F.to_json(F.struct("*")).alias("body")), queue=large_topic)


def start(function=orders_and_alerts):
    stream = spark.readStream.format("txmq").options(**address).option("queue", orders_topic).option("appId", app)
    each = transactional(function, **at, app_id=app, ledger=table("ledger"), ledger_sync=True)
    return (
        stream.option("maxOffsetsPerTrigger", 400)
        .load()
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", checkpoint("orders"))
        .trigger(availableNow=True)
        .start()
    )


def lag():
    return txmq.apps(url=broker_url).set_index("app_id").at[app, "lag"]


start().awaitTermination()
while lag():  # on Spark 4.1, where a run is one batch
    start().awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Lag
# MAGIC The ledger in Delta has the offsets of every batch: how many messages were left after each.

# COMMAND ----------

written = spark.table(table("ledger"))
batches = written.groupBy("sequence").agg(F.sum(F.expr("end_offset - start_offset")).alias("messages")).orderBy("sequence")
display(batches)

left, curve = 1_000, []
rows = batches.where("messages IS NOT NULL").collect()
for row in rows:
    left -= row["messages"]
    curve.append(left)
figure, axes = pyplot.subplots()
axes.plot([row["sequence"] for row in rows], curve, marker="o")
axes.set_xlabel("batch")
axes.set_ylabel("lag in messages")
display(figure)
pyplot.close(figure)  # or the notebook shows it once more

# COMMAND ----------

# MAGIC %md
# MAGIC ## What there is now
# MAGIC A batch read claims nothing and changes nothing.

# COMMAND ----------


def state():
    stored = spark.table(table("orders"))
    alerts = spark.read.format("txmq").options(**address).option("queue", large_topic).load()
    return {"in Delta": stored.count(), "distinct": stored.select("id").distinct().count(), "alerts": alerts.count()}


first = state()
print(first)
expected = sum((number * 37) % 2_000 > 1_500 for number in range(1_000))
assert first == {"in Delta": 1_000, "distinct": 1_000, "alerts": expected}

# COMMAND ----------

# MAGIC %md
# MAGIC ## A batch that fails half-way
# MAGIC The function raises after all its operations. Nothing of the batch has happened: its messages are in the topic and not consumed, and no row is in the table.
# MAGIC The next start of the query runs it again.

# COMMAND ----------



def fails(batch, tx):
    orders_and_alerts(batch, tx)
    raise RuntimeError("the driver is out of memory")


producer = KafkaProducer(bootstrap_servers=hosts, acks="all")
producer.send(orders_topic, json.dumps({"id": 1_000, "amount": 1_999, "country": "AT"}).encode())
producer.close()
try:
    start(fails).awaitTermination()
except Exception as error:
    print(type(error).__name__)
else:
    raise AssertionError("the function did not fail")
print(state())
assert state() == first

start().awaitTermination()
while lag():
    start().awaitTermination()
print(state())
assert state() == {"in Delta": 1_001, "distinct": 1_001, "alerts": expected + 1}

# COMMAND ----------

# MAGIC %md
# MAGIC ## The offsets stand in a Delta table
# MAGIC It has one row for each partition of each micro-batch. The ledger on Kafka is what decides; this is its copy for everybody who reads Delta.

# COMMAND ----------

ledger = spark.table(table("ledger"))
display(ledger.select("app_id", "batch_id", "log", "start_offset", "end_offset", "published").orderBy("batch_id", "log"))
assert ledger.agg(F.sum(F.expr("end_offset - start_offset"))).head()[0] == 1_001

# COMMAND ----------

admin = KafkaAdminClient(bootstrap_servers=hosts)
admin.delete_topics([orders_topic, large_topic])
admin.close()
clean_up(table("orders"), table("ledger"))
