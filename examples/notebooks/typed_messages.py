# Databricks notebook source
# MAGIC %md
# MAGIC # Typed messages and a dead-letter queue
# MAGIC
# MAGIC Producers send orders as JSON. Some are broken: no JSON, a wrong type, a missing field. A streaming query appends the good ones to a
# MAGIC Delta table and sends the broken ones to a dead-letter queue, with the reason. Both happen in the transaction of the micro-batch.
# MAGIC
# MAGIC Then the orders that can be repaired are repaired, and sent through the same queue again.
# MAGIC
# MAGIC **Compute:** a dedicated, single-node cluster with runtime 18 (Spark 4.1) or later. With a broker of yours (widget `broker_url`): any compute of this
# MAGIC runtime that reaches it, standard and serverless too. The volume and the catalog must exist. On your machine: `python examples/run_notebook.py examples/notebooks/typed_messages.py`.

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

from pyspark.sql import functions as F

import txmq
from txmq import Properties, transactional

# COMMAND ----------

# MAGIC %md
# MAGIC ## A queue with a dead-letter exchange
# MAGIC These are the arguments that RabbitMQ has. What is rejected in the queue of orders goes to the exchange, and from there to the queue of broken ones.

# COMMAND ----------

orders_queue, broken_queue, rejected, app = unique("orders"), unique("broken-orders"), unique("rejected"), unique("shop")
channel = broker.channel()
channel.exchange_declare(rejected, "fanout")
channel.queue_declare(broken_queue)
channel.queue_bind(broken_queue, rejected, "")
channel.queue_declare(orders_queue, arguments={"x-dead-letter-exchange": rejected})

# COMMAND ----------

# MAGIC %md
# MAGIC ## A producer that makes mistakes

# COMMAND ----------

from_shop = Properties(content_type="application/json", headers={"shop": 7, "attempt": 1}).encode()
good = [json.dumps({"id": number, "amount": number * 1.5, "country": "PT"}) for number in range(500)]
broken = ['{"id": 500, "amount": "a lot"}', '{"amount": 12}', '{"id": 501}, {"id": 502}', "<order id='503'/>", ""]

channel.tx_select()
for body in good + broken:
    channel.publish(body.encode(), routing_key=orders_queue, properties=from_shop)
channel.tx_commit()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream
# MAGIC `txmq.decode` splits a batch by Spark's own `from_json`, and checks what it does not: that nothing follows the object, that the body is UTF-8,
# MAGIC and the `not null` of the schema. `tx.reject` publishes the broken messages as they are: body and properties do not change, and the
# MAGIC header `x-death` is what RabbitMQ would write.

# COMMAND ----------

ORDER = "id bigint not null, amount double, country string"


def orders(batch, tx):
    decoded = txmq.decode(batch, ORDER, keep=["offset"])
    tx.append(decoded.good, table("orders"))
    tx.reject(decoded.rejected)


def start():
    stream = spark.readStream.format("txmq").options(**address).option("queue", orders_queue).option("appId", app).load()
    each = transactional(orders, **at, app_id=app)
    return stream.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint("orders")).trigger(availableNow=True).start()


def run():
    """Runs the stream until nothing is left: once on Spark 4.2, once for each batch on 4.1."""
    start().awaitTermination()
    while waiting(orders_queue):
        start().awaitTermination()


def stored():
    return spark.table(table("orders"))


run()
assert stored().count() == 500

# COMMAND ----------

# MAGIC %md
# MAGIC ## Why they were rejected
# MAGIC A batch read looks and does not consume.

# COMMAND ----------

dead = spark.read.format("txmq").options(**address).option("queue", broken_queue).option("includeProperties", "true").load()
dead = dead.select("offset", F.col("body").cast("string").alias("body"), F.col("properties.headers").alias("headers"))
display(dead.select("offset", "body", F.col("headers")["x-reject-reason"].alias("reason")))
(death,) = json.loads(dead.first()["headers"]["x-death"])
print(death)
assert dead.count() == len(broken)
assert (death["queue"], death["reason"], death["count"]) == (orders_queue, "rejected", 1)
assert {row["headers"]["shop"] for row in dead.collect()} == {"7"}, "the producer's headers are still there"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Repaired, and sent again
# MAGIC One of them has an amount that a person can read. `txmq.encode` is the way back: it makes the columns of a message of typed columns.

# COMMAND ----------

repaired = spark.createDataFrame([(500, 1_000_000.0, "PT")], ORDER.replace(" not null", ""))
txmq.encode(repaired).write.format("txmq").mode("append").options(**address, queue=orders_queue).save()

run()
assert stored().count() == 501
assert stored().where("id = 500").head()["amount"] == 1_000_000.0

# COMMAND ----------

# MAGIC %md
# MAGIC ## The strict way, and the lenient one
# MAGIC `mode="fail"` stops the query at the first broken message: nothing of the batch is decided. `mode="null"` continues with nulls.

# COMMAND ----------

looked = spark.read.format("txmq").options(**address).option("queue", broken_queue).load()
try:
    txmq.decode(looked, ORDER, mode="fail").collect()
except Exception as error:
    print(txmq.cause(error))
    assert isinstance(txmq.cause(error), txmq.DecodeError)
else:
    raise AssertionError("a broken message did not fail")

nulls = txmq.decode(looked, ORDER, mode="null", keep=["offset"])
display(nulls)
assert nulls.where("id is null").count() == len(broken)

# COMMAND ----------

channel.close()
clean_up(table("orders"))
