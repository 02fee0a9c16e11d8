# Databricks notebook source
# MAGIC %md
# MAGIC # Typed messages and a dead-letter queue
# MAGIC
# MAGIC Producers send orders as JSON. Some are broken: no JSON, a wrong type, a missing field. A streaming query appends the good ones to a
# MAGIC Delta table and sends the broken ones to a dead-letter queue, with the reason. Both happen in the transaction of the micro-batch.
# MAGIC
# MAGIC Then somebody mends what can be mended, and it takes the same way again.
# MAGIC
# MAGIC Packages: the wheel of txmq where the platform has Spark, `pip install '.[spark]'` in a checkout for a plain script.

# COMMAND ----------

import json
import tempfile
from pathlib import Path

from pyspark.sql import functions as F

import txmq
from txmq import Broker, Properties, recommended_conf, transactional

# COMMAND ----------

# MAGIC %md
# MAGIC A platform gives a notebook its session and its parameters. A plain script makes its own session.

# COMMAND ----------

given = "spark" in globals()
if not given:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("typed messages").config("spark.ui.enabled", "false")
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
# MAGIC ## A queue with a dead-letter exchange
# MAGIC These are the arguments that RabbitMQ has. What is rejected in `orders` goes to the exchange `rejected`, and from there to the queue `broken-orders`.

# COMMAND ----------

broker = Broker.open(folder / "data")
channel = broker.channel()
channel.exchange_declare("rejected", "fanout")
channel.queue_declare("broken-orders")
channel.queue_bind("broken-orders", "rejected", "")
channel.queue_declare("orders", arguments={"x-dead-letter-exchange": "rejected"})

# COMMAND ----------

# MAGIC %md
# MAGIC ## A producer that makes mistakes

# COMMAND ----------

from_shop = Properties(content_type="application/json", headers={"shop": 7, "attempt": 1}).encode()
good = [json.dumps({"id": number, "amount": number * 1.5, "country": "PT"}) for number in range(500)]
broken = ['{"id": 500, "amount": "a lot"}', '{"amount": 12}', '{"id": 501}, {"id": 502}', "<order id='503'/>", ""]

channel.tx_select()
for body in good + broken:
    channel.publish(body.encode(), routing_key="orders", properties=from_shop)
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
    tx.append(decoded.good, str(folder / "lake" / "orders"))
    tx.reject(decoded.rejected)


def start():
    stream = spark.readStream.format("txmq").option("data", str(folder / "data")).option("queue", "orders").option("appId", "shop").load()
    each = transactional(orders, data=str(folder / "data"), app_id="shop")
    return stream.writeStream.foreachBatch(each).option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()


def run():
    """Runs the stream until nothing is left: once on Spark 4.2, once for each batch on 4.1."""
    start().awaitTermination()
    while next(queue.messages for queue in broker.queues() if queue.name == "orders"):
        start().awaitTermination()


def stored():
    return spark.read.format("delta").load(str(folder / "lake" / "orders"))


run()
assert stored().count() == 500

# COMMAND ----------

# MAGIC %md
# MAGIC ## Why they were rejected
# MAGIC A batch read looks and does not consume.

# COMMAND ----------

dead = spark.read.format("txmq").option("data", str(folder / "data")).option("queue", "broken-orders").option("includeProperties", "true").load()
dead = dead.select("offset", F.col("body").cast("string").alias("body"), F.col("properties.headers").alias("headers"))
dead.select("offset", "body", F.col("headers")["x-reject-reason"].alias("reason")).show(truncate=False)
(death,) = json.loads(dead.first()["headers"]["x-death"])
print(death)
assert dead.count() == len(broken)
assert (death["queue"], death["reason"], death["count"]) == ("orders", "rejected", 1)
assert {row["headers"]["shop"] for row in dead.collect()} == {"7"}, "the producer's headers are still there"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Mended, and sent again
# MAGIC One of them has an amount that a person can read. `txmq.encode` is the way back: it makes the columns of a message of typed columns.

# COMMAND ----------

mended = spark.createDataFrame([(500, 1_000_000.0, "PT")], ORDER.replace(" not null", ""))
txmq.encode(mended).write.format("txmq").mode("append").options(data=str(folder / "data"), queue="orders").save()

run()
assert stored().count() == 501
assert stored().where("id = 500").head()["amount"] == 1_000_000.0

# COMMAND ----------

# MAGIC %md
# MAGIC ## The strict way, and the lenient one
# MAGIC `mode="fail"` stops the query at the first broken message: nothing of the batch is decided. `mode="null"` goes on with nulls.

# COMMAND ----------

looked = spark.read.format("txmq").option("data", str(folder / "data")).option("queue", "broken-orders").load()
try:
    txmq.decode(looked, ORDER, mode="fail").collect()
except Exception as error:
    print(txmq.cause(error))
    assert isinstance(txmq.cause(error), txmq.DecodeError)
else:
    raise AssertionError("a broken message did not fail")

nulls = txmq.decode(looked, ORDER, mode="null", keep=["offset"])
nulls.show()
assert nulls.where("id is null").count() == len(broken)

# COMMAND ----------

if not given:
    spark.stop()
channel.close()
broker.close()
