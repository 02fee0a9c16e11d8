# Databricks notebook source
# MAGIC %md
# MAGIC # Upserts exactly once
# MAGIC
# MAGIC A queue has changes of customers. A streaming query merges them into a Delta table that holds one row for each customer. Every change adds
# MAGIC to a balance, so a change that is merged twice, or not at all, shows.
# MAGIC
# MAGIC The query is stopped in the middle: after the decision, before the MERGE. It continues where it was.
# MAGIC
# MAGIC **Compute:** a dedicated, single-node cluster with runtime 18 (Spark 4.1) or later. With a broker of yours (widget `broker_url`): any compute of this
# MAGIC runtime that reaches it, standard and serverless too. The volume and the catalog must exist. On your machine: `python examples/run_notebook.py examples/notebooks/upserts.py`.

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
from txmq import transactional

# COMMAND ----------

# MAGIC %md
# MAGIC ## A queue and a table
# MAGIC `tx.merge` changes a table that exists. A constraint says what a balance is.

# COMMAND ----------

queue, app = unique("changes"), unique("customers")
channel = broker.channel()
channel.queue_declare(queue)
channel.tx_select()

stored = table("customers")
spark.sql(f"CREATE TABLE {stored} (id INT, balance BIGINT, changes INT) USING delta")
spark.sql(f"ALTER TABLE {stored} ADD CONSTRAINT solvent CHECK (balance >= 0)")


def publish(*changes):
    for change in changes:
        channel.publish(json.dumps(change).encode(), routing_key=queue)
    channel.tx_commit()


def customers():
    rows = spark.table(stored).collect()
    return {row["id"]: (row["balance"], row["changes"]) for row in rows}


# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream
# MAGIC Several changes of one customer in a batch become one row first: two rows of a batch for one row of the table are an ambiguous merge. `keys`
# MAGIC are just the columns that `on` compares, so a mistake there would stop the batch before anything is consumed.
# MAGIC
# MAGIC A customer that is closed is deleted; the delete comes before the update.

# COMMAND ----------

CHANGE = "id INT NOT NULL, amount BIGINT NOT NULL, closed BOOLEAN"


def merge(batch, tx):
    changes = txmq.decode(batch, CHANGE).good
    rows = changes.groupBy("id").agg(F.sum("amount").alias("amount"), F.max("closed").alias("closed"), F.count("id").alias("changes"))
    tx.merge(
        rows,
        stored,
        on="t.id = s.id",
        update={"balance": "t.balance + s.amount", "changes": "t.changes + s.changes"},
        insert={"id": "s.id", "balance": "s.amount", "changes": "s.changes"},
        delete="s.closed",
        keys=["id"],
    )


def start(function=merge):
    stream = spark.readStream.format("txmq").options(**address).option("queue", queue).option("appId", app).load()
    each = transactional(function, **at, app_id=app)
    return stream.writeStream.foreachBatch(each).option("checkpointLocation", checkpoint("customers")).trigger(availableNow=True).start()


def run():
    """Runs the stream until nothing is left: once on Spark 4.2, once for each batch on 4.1."""
    start().awaitTermination()
    while waiting(queue):
        start().awaitTermination()


publish({"id": 1, "amount": 10}, {"id": 2, "amount": 20}, {"id": 1, "amount": 5})
run()
display(spark.table(stored).orderBy("id"))
assert customers() == {1: (15, 2), 2: (20, 1)}

# COMMAND ----------

# MAGIC %md
# MAGIC ## Stopped between the decision and the MERGE
# MAGIC Somebody alters the table just then, and it refuses the merge. The batch is decided: its messages are consumed, its rows are kept, and the
# MAGIC query stops with an error that says what to do.

# COMMAND ----------


def meanwhile(batch, tx):
    merge(batch, tx)
    batch.sparkSession.sql(f"ALTER TABLE {stored} ADD CONSTRAINT never CHECK (balance <> 19)")


publish({"id": 1, "amount": 4}, {"id": 3, "amount": 7})
try:
    start(meanwhile).awaitTermination()
except Exception as error:
    print(txmq.cause(error))
    assert isinstance(txmq.cause(error), txmq.TxmqError)
else:
    raise AssertionError("the table did not refuse the merge")
assert customers() == {1: (15, 2), 2: (20, 1)}

# COMMAND ----------

# MAGIC %md
# MAGIC ## Repaired, and done once
# MAGIC The next start does what is decided, and then reads on. If it is stopped again before that is noted, it starts again and changes nothing:
# MAGIC Delta knows the commit.

# COMMAND ----------

spark.sql(f"ALTER TABLE {stored} DROP CONSTRAINT never")
publish({"id": 2, "amount": 0, "closed": True})
run()
display(spark.table(stored).orderBy("id"))
assert customers() == {1: (19, 3), 3: (7, 1)}

# COMMAND ----------

# MAGIC %md
# MAGIC ## Every merge is one commit
# MAGIC Its `userMetadata` names the app, the batch and the offsets of the messages that it has consumed.

# COMMAND ----------

history = spark.sql(f"DESCRIBE HISTORY {stored}").where("operation = 'MERGE'").orderBy("version")
commits = [json.loads(row["userMetadata"]) for row in history.collect()]
display(history.select("version", "operation", "userMetadata"))
assert [each["sequence"] for each in commits] == [1, 2, 3]
assert [each["offsets"][queue] for each in commits] == [[0, 3], [3, 5], [5, 6]]

# COMMAND ----------

channel.close()
clean_up(stored)
