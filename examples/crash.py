"""What a crash looks like: ``python examples/crash.py``.

A driver is killed with SIGKILL at the worst moments of a micro-batch, and the broker too. Then they are
started again. Every message is in the Delta table and in the target queue exactly once.

The moments are chosen with failpoints: names of places in the code. `TXMQ_FAILPOINTS=foreach.decided=kill`
kills the process right after the broker has decided a micro-batch, before Delta has its rows.

It needs `pip install '.[spark]'`. It starts drivers of its own, so it runs on one machine and not on a
platform.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pyarrow.parquet as pq

from txmq import BrokerClient

folder = Path(tempfile.mkdtemp(prefix="txmq-crash-"))


# -- the broker, a process of its own ------------------------------------------------------------------------
def start_broker(listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "txmq",
            "serve",
            "--data",
            str(folder / "data"),
            "--listen",
            listen,
            "--amqp",
            "none",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    url = process.stdout.readline().split()[1]  # "ready txmq://127.0.0.1:PORT"
    return process, url


broker, url = start_broker()
print("the broker listens at", url)

with BrokerClient(url) as client, client.channel() as channel:
    channel.queue_declare("numbers")
    channel.queue_declare("squares")
    channel.tx_select()
    for number in range(3_000):
        channel.publish(str(number).encode(), routing_key="numbers")
        if number % 500 == 499:
            channel.tx_commit()


# -- the pipeline, a driver that we can kill -----------------------------------------------------------------
PIPELINE = """
import sys
from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession
from txmq import recommended_conf, transactional

url, folder = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").appName("squares").config("spark.ui.enabled", "false")
builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
for key, value in recommended_conf().items():
    builder = builder.config(key, value)
spark = configure_spark_with_delta_pip(builder).getOrCreate()
spark.sparkContext.setLogLevel("OFF")

def squares(batch, tx):
    numbers = batch.selectExpr("CAST(CAST(body AS STRING) AS BIGINT) AS number")
    tx.append(numbers, folder + "/lake/numbers")
    tx.publish(numbers.selectExpr("CAST(number * number AS STRING) AS body"), queue="squares")

options = {"url": url, "queue": "numbers", "appId": "squares", "maxOffsetsPerTrigger": "1000"}
stream = spark.readStream.format("txmq").options(**options).load()
query = stream.writeStream.foreachBatch(transactional(squares, url=url, app_id="squares"))
query = query.option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
spark.stop()
"""


def run_driver(failpoints: str = "") -> bool:
    """Run the pipeline until it ends or is killed; True if it was killed."""
    driver = subprocess.Popen(
        [sys.executable, "-c", PIPELINE, url, str(folder)],
        env={**os.environ, "TXMQ_FAILPOINTS": failpoints},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    status = driver.wait()
    try:
        os.killpg(driver.pid, signal.SIGKILL)  # the JVM goes with its driver
    except ProcessLookupError:
        pass
    return status == -signal.SIGKILL


def state() -> dict[str, int]:
    with BrokerClient(url) as client:
        queues = {queue.name: queue for queue in client.queues()}
        apps = {app.app_id: app for app in client.apps()}
    app = apps.get("squares")
    return {
        "numbers left": queues["numbers"].messages,
        "squares": queues["squares"].messages,
        "batches decided": app.sequence if app else 0,
        "decided, not in Delta yet": app.unapplied if app else 0,
    }


print(state())


# -- killed before the decision ------------------------------------------------------------------------------
# The rows are staged at the broker, durable and invisible. Nobody names them, so nothing happened.
assert run_driver("foreach.staged=kill")
before = state()
print(before)
assert before["numbers left"] == 3_000
assert before["squares"] == 0
assert before["batches decided"] == 0


# -- killed after the decision -------------------------------------------------------------------------------
# One commit has consumed 1,000 numbers and published 1,000 squares. The rows for Delta are kept at the
# broker until they are there.
assert run_driver("foreach.decided=kill")
after = state()
print(after)
assert after["numbers left"] == 2_000
assert after["squares"] == 1_000
assert after["batches decided"] == 1
assert after["decided, not in Delta yet"] == 1


# -- the broker is killed while a producer commits -----------------------------------------------------------
# Each transaction has 100 messages. Confirmed ones survive; the one under way is there as a whole or not at
# all, because a commit is one transaction of SQLite.
confirmed = 0
with BrokerClient(url, reconnect_s=1) as client, client.channel() as channel:
    channel.queue_declare("orders")
    channel.tx_select()
    try:
        while True:
            for _ in range(100):
                channel.publish(b"of transaction %d" % confirmed, routing_key="orders")
            channel.tx_commit()
            confirmed += 1
            if confirmed == 20:
                threading.Thread(target=broker.kill).start()
    except Exception as error:
        print("the producer gets:", error)
assert broker.wait() == -signal.SIGKILL
broker.stdout.close()
broker, _ = start_broker(url.removeprefix("txmq://"))
with BrokerClient(url) as client:
    orders = next(queue.messages for queue in client.queues() if queue.name == "orders")
print(orders, "orders of", confirmed, "confirmed transactions")
assert orders in (confirmed * 100, (confirmed + 1) * 100)
assert state()["numbers left"] == 2_000


# -- started again -------------------------------------------------------------------------------------------
# The driver first finishes what was decided, then continues. Spark asks for batch 0 again: it is decided,
# so it runs without effect.
assert not run_driver()
while state()["numbers left"]:  # on Spark 4.1, where a run is one batch
    assert not run_driver()
end = state()
print(end)
assert end == {"numbers left": 0, "squares": 3_000, "batches decided": 3, "decided, not in Delta yet": 0}


# -- the count -----------------------------------------------------------------------------------------------
# The Delta table, read by its own log with pyarrow: no Spark, no txmq.
table = folder / "lake" / "numbers"
files = [
    json.loads(line)["add"]["path"]
    for version in sorted((table / "_delta_log").glob("*.json"))
    for line in version.read_text().splitlines()
    if '"add"' in line
]
numbers = sorted(
    number
    for path in files
    for number in pq.read_table(table / path, partitioning=None).column("number").to_pylist()
)
assert numbers == list(range(3_000))

with BrokerClient(url) as client, client.channel() as channel:
    squares = []
    while (delivery := channel.get("squares")) is not None:
        squares.append(int(delivery.body))
    assert sorted(squares) == [number * number for number in range(3_000)]
print("3,000 numbers in Delta, 3,000 squares in the queue, each once")
broker.terminate()
broker.wait()
broker.stdout.close()
