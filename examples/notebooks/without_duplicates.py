# Databricks notebook source
# MAGIC %md
# MAGIC # From an AMQP producer to Delta, without duplicates
# MAGIC
# MAGIC A producer that speaks AMQP, as to RabbitMQ, sends orders and waits for confirms. When a confirm is lost, it must send again, and the message
# MAGIC is there twice. A driver that dies in the middle of a batch runs it again, and a plain append is there twice.
# MAGIC
# MAGIC The first kind is found by the message id, in the state of the query. The second kind does not happen: a micro-batch is one transaction.
# MAGIC Kafka has no AMQP clients; for the stream, see the notebook *on_kafka*.
# MAGIC
# MAGIC **Compute:** a dedicated, single-node cluster with runtime 18 (Spark 4.1) or later. With a broker of yours (widget `broker_url`, and `amqp_url`): any compute of this
# MAGIC runtime that reaches it, standard and serverless too. The volume and the catalog must exist. On your machine: `python examples/run_notebook.py examples/notebooks/without_duplicates.py`.

# COMMAND ----------

widgets = {"wheel": "/Volumes/main/txmq/files/txmq-0.1.0-py3-none-any.whl", "catalog": "main", "schema": "txmq", "volume": "/Volumes/main/txmq/files"}
for name in (*widgets, "broker_url", "amqp_url", "user", "secret", "tls_ca"):
    dbutils.widgets.text(name, widgets.get(name, ""))
wheel = dbutils.widgets.get("wheel")

# COMMAND ----------

# MAGIC %pip install $wheel pika

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

# MAGIC %run ./_setup

# COMMAND ----------

import json
import ssl

import pika
from pyspark.sql import functions as F

import txmq
from txmq import transactional

# COMMAND ----------

# MAGIC %md
# MAGIC ## A producer, as for RabbitMQ
# MAGIC It sends 300 orders with confirms. Every tenth confirm is lost: the producer cannot know whether the message is there, and sends it
# MAGIC again, with the same message id.

# COMMAND ----------

if not amqp_url:
    raise ValueError("the widget amqp_url is empty: give the address of your broker for AMQP, such as amqps://broker.example:5671/%2F")
parameters = pika.URLParameters(amqp_url)
if user:
    parameters.credentials = pika.PlainCredentials(user, login["password"])
if tls_ca:
    parameters.ssl_options = pika.SSLOptions(ssl.create_default_context(cafile=tls_ca), parameters.host)

queue, app = unique("orders"), unique("orders")
with pika.BlockingConnection(parameters) as connection:
    channel = connection.channel()
    channel.queue_declare(queue, durable=True)
    channel.confirm_delivery()
    for number in range(300):
        body = json.dumps({"id": number, "amount": number * 1.5, "at": f"2026-03-01T12:{number // 60:02d}:{number % 60:02d}Z"})
        properties = pika.BasicProperties(content_type="application/json", message_id=f"order-{number}", delivery_mode=2)
        for _ in range(2 if number % 10 == 0 else 1):
            channel.basic_publish("", queue, body.encode(), properties)

print(waiting(queue))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream
# MAGIC `dropDuplicatesWithinWatermark` keeps the message ids of the last ten minutes in the state of the query. The state belongs to the micro-batch like
# MAGIC the rows do: after a crash both continue at the same place.

# COMMAND ----------

stored = table("orders")


def orders(batch, tx):
    decoded = txmq.decode(batch, "id bigint not null, amount double, at timestamp", mode="fail", keep=["message_id"])
    tx.append(decoded, stored)


def start(function=orders):
    options = {**address, "queue": queue, "appId": app, "includeProperties": "true", "maxOffsetsPerTrigger": "200"}
    rows = spark.readStream.format("txmq").options(**options).load()
    once = (
        rows.select("body", F.col("properties.message_id").alias("message_id"), "timestamp")
        .withWatermark("timestamp", "10 minutes")
        .dropDuplicatesWithinWatermark(["message_id"])
    )
    each = transactional(function, **at, app_id=app)
    return once.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint("orders")).trigger(availableNow=True).start()


def run():
    """Runs the stream until nothing is left: once on Spark 4.2, once for each batch on 4.1."""
    start().awaitTermination()
    while waiting(queue):
        start().awaitTermination()


run()


def state():
    rows = spark.table(stored)
    return {"rows": rows.count(), "orders": rows.select("id").distinct().count(), "left": waiting(queue)}


print(state())
assert state() == {"rows": 300, "orders": 300, "left": 0}

# COMMAND ----------

# MAGIC %md
# MAGIC ## A batch that fails half-way, and an old order that is sent again
# MAGIC The producer sends order 7 again, and a new one. The first batch with them raises after its append: nothing of it has happened, and the next start runs
# MAGIC it again. The id of the old order is still in the state.

# COMMAND ----------


def fails(batch, tx):
    orders(batch, tx)
    raise RuntimeError("the driver is out of memory")


with pika.BlockingConnection(parameters) as connection:
    for number in (7, 300):
        order = {"id": number, "amount": 1.0, "at": "2026-03-01T12:59:00Z"}
        connection.channel().basic_publish("", queue, json.dumps(order).encode(), pika.BasicProperties(message_id=f"order-{number}"))

try:
    start(fails).awaitTermination()
except Exception as error:
    print(type(error).__name__)
else:
    raise AssertionError("the function did not fail")
assert state() == {"rows": 300, "orders": 300, "left": 2}

run()
display(spark.table(stored).orderBy(F.desc("id")).limit(5))
assert state() == {"rows": 301, "orders": 301, "left": 0}, "nothing may be there twice"

# COMMAND ----------

clean_up(stored)
