# Databricks notebook source
# MAGIC %md
# MAGIC # Set-up of the notebooks
# MAGIC
# MAGIC The other notebooks begin with `%run ./_setup`. It makes these names of their widgets. It declares none: a notebook that `%run` runs has the
# MAGIC defaults of its own widgets, whatever you have entered.
# MAGIC
# MAGIC | name | what it is |
# MAGIC |---|---|
# MAGIC | `address` | options of a stream: where the broker is, and the login |
# MAGIC | `at` | the same for `transactional` |
# MAGIC | `broker` | for queues and channels: a broker in this process, or a client of yours |
# MAGIC | `table(name)`, `checkpoint(name)`, `unique(name)` | names of this run, so that a notebook may run twice |

# COMMAND ----------

import shutil
import tempfile
import uuid

import txmq
from connector.datasource import TxmqDataSource

catalog, schema, volume, broker_url, amqp_url, user, secret, tls_ca = (
    dbutils.widgets.get(widget) for widget in ("catalog", "schema", "volume", "broker_url", "amqp_url", "user", "secret", "tls_ca")
)
run_id = uuid.uuid4().hex[:8]
spark.dataSource.register(TxmqDataSource)  # Spark looks for data sources in the Python of the cluster, not in that of a notebook
spark.sql(f"CREATE SCHEMA IF NOT EXISTS {catalog}.{schema}")


def table(name):
    return f"{catalog}.{schema}.{name}_{run_id}"


def checkpoint(name):
    return f"{volume}/txmq-{run_id}/{name}"


def unique(name):
    return f"{name}-{run_id}"

# COMMAND ----------

# MAGIC %md
# MAGIC ## The broker
# MAGIC Without `broker_url`, a broker runs in this process. Its directory is on the disk of the driver, never in a volume, and it is gone with the
# MAGIC driver: this is for a look on a dedicated, single-node cluster. `txmqs://host:5673` names a broker of yours, with `user` (it needs the tag
# MAGIC `operator`), `secret` (`SCOPE/KEY` of a secret scope) and `tls_ca` (a file in a volume); `amqp_url` is its address for AMQP, without the login.
# MAGIC `kafka://host:9092` names a cluster of Kafka.

# COMMAND ----------

broker, login = None, {}
if broker_url.startswith("kafka://"):
    address = at = {"url": broker_url}
elif broker_url:
    scope, _, key = secret.partition("/")
    login = {"user": user, "password": dbutils.secrets.get(scope, key)} if user else {}
    settings = {**login, **({"tlsCa": tls_ca} if tls_ca else {})}
    address, at = {"url": broker_url, **settings}, {"url": broker_url, "settings": settings}
    broker = txmq.connect(url=broker_url, credentials=txmq.Credentials(**login, tls_ca=tls_ca))
else:
    folder = tempfile.mkdtemp(prefix="txmq-broker-")
    address = at = {"data": folder}
    broker = txmq.Broker.open(folder, amqp=["127.0.0.1:0"])
    amqp_url = amqp_url or broker.amqp_urls[0].replace("://", "://guest:guest@") + "/%2F"


def waiting(queue):
    """Messages that are left in a queue."""
    return next(each.messages for each in broker.queues() if each.name == queue)


def clean_up(*tables):
    """Removes the tables, the checkpoints, and the queues and exchanges of this run."""
    for each in tables:
        spark.sql(f"DROP TABLE IF EXISTS {each}")
    dbutils.fs.rm(f"{volume}/txmq-{run_id}", True)
    if broker is None:
        return
    if broker_url:
        with broker.channel() as channel:
            for each in broker.queues():
                if each.name.endswith(run_id):
                    if each.owner:
                        broker.release(each.owner, each.name)
                    channel.queue_delete(each.name)
            for each in broker.exchanges():
                if each.name.endswith(run_id):
                    channel.exchange_delete(each.name)
    broker.close()
    if not broker_url:
        shutil.rmtree(folder)
