"""A process that claims one range after another and writes down each answer: URL APP QUEUE ROUNDS FILE."""

from __future__ import annotations

import json
import sys

from broker_core.engine import START, Limit, Origin, Vector
from broker_core.kafka.engine import KafkaEngine


def main(url: str, app_id: str, queue: str, rounds: int, path: str) -> None:
    settings = {"kafka.request.timeout.ms": "120000", "kafka.default.api.timeout.ms": "120000"}
    with KafkaEngine(url, settings) as engine, open(path, "a") as answers:
        start: Vector = {queue: START}
        done = 0
        while done < rounds:
            end = engine.claim(app_id, [queue], start, Limit(max_rows=3), Origin(), "resume")
            if end == start:
                engine.wait([queue], {log: int(at) for log, at in end.items() if at != START}, 10)
                continue
            if START not in start.values():  # a symbolic start has another end for each new checkpoint
                answers.write(
                    json.dumps([json.dumps(start, sort_keys=True), json.dumps(end, sort_keys=True)]) + "\n"
                )
                answers.flush()
            start, done = end, done + 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
