"""A cluster id is 16 bytes that a command line takes for a value."""

from __future__ import annotations

import base64

from bench.kafka_server import cluster_id


def test_cluster_ids_are_random_and_none_reads_as_an_option() -> None:
    made = [cluster_id() for _ in range(5_000)]
    assert len(set(made)) == len(made)
    assert all(len(base64.urlsafe_b64decode(f"{each}==")) == 16 for each in made)
    assert not [each for each in made if each.startswith("-")]
