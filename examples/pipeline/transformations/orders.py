"""Orders of a queue into a streaming table, and the large ones from there into another queue."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
data = spark.conf.get("orders.data")

# a full refresh would empty the table, and the messages that made its rows are consumed
dp.create_streaming_table("orders", table_properties={"pipelines.reset.allowed": "false"})


@dp.append_flow(target="orders", name="orders_in")
def orders_in() -> DataFrame:
    queue = spark.readStream.format("txmq").options(data=data, queue="orders", appId="orders-in").load()
    return queue.selectExpr("CAST(body AS STRING) AS id", "length(body) AS size", "offset")


dp.create_sink("large_orders", format="txmq", options={"data": data, "queue": "large", "appId": "orders-out"})


@dp.append_flow(target="large_orders", name="orders_out")
def orders_out() -> DataFrame:
    return spark.readStream.table("orders").where("size > 3").selectExpr("id AS body")
