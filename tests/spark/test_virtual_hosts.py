"""Streams in two virtual hosts with the same names: of queues, of the app, of what they are in Delta."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def test_streams_of_two_virtual_hosts_with_the_same_names_do_not_meet(rig: Any) -> None:
    vhosts = {"/": "", "north/west": f"/{quote('north/west', safe='')}"}
    rig.broker.vhosts.add_vhost("north/west")
    for vhost in vhosts:
        with rig.broker.channel(vhost=vhost) as channel:
            for queue in ("in", "out"):
                channel.queue_declare(queue)
            channel.publish(f"of {vhost}".encode(), routing_key="in")
    for number, path in enumerate(vhosts.values()):
        common = {"url": rig.broker.url + path, "appId": "app"}
        rows = rig.spark.readStream.format("txmq").options(**common, queue="in").load().select("body")
        writer = rows.writeStream.format("txmq").options(**common, queue="out")
        writer = writer.option("checkpointLocation", rig.checkpoint(str(number)))
        writer.trigger(availableNow=True).start().awaitTermination()
    for vhost in vhosts:
        engine = rig.broker.engines.of(vhost)
        (app,) = engine.apps()
        assert (app.app_id, app.sequence, app.lag) == ("app", 1, 0)
        with rig.broker.channel(vhost=vhost) as channel:
            found = [channel.get("out") for _ in range(2)]
        assert [each and each.body.decode() for each in found] == [f"of {vhost}", None]
