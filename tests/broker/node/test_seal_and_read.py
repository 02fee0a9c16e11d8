"""A block of the inbox while it goes to a segment, and after that."""

from broker_core.core import failpoint
from tests.broker.conftest import Node, declared, publish


def test_queues_that_share_a_growing_inbox_block_give_their_own_messages_in_order_after_it_is_sealed(
    node: Node,
):
    declared(node, "a", "b")
    with node.channel() as channel:
        # a commit each: the runs of both grow within one block, each with every other row
        for number in range(6):
            channel.publish(str(number).encode(), routing_key="ab"[number % 2])
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    for name, bodies in (("a", [b"0", b"2", b"4"]), ("b", [b"1", b"3", b"5"])):
        assert [row.body for row in node.broker.state.topology.queue(name).log.rows(0, 3)] == bodies


def test_a_block_that_nobody_needs_any_more_when_its_seal_is_committed_does_not_stop_the_upkeep(node: Node):
    declared(node, "a")
    publish(node, "a", b"0")
    node.broker.upkeep.close_open()

    def settle_all(_point: str) -> None:
        assert node.drain("a") == [b"0"]
        node.broker.committer.run(lambda state, change, _now: state.blocks.record(change))

    failpoint.arm("upkeep.seal.committed", settle_all)
    node.broker.upkeep.seal()
    failpoint.disarm()
    publish(node, "a", b"1")
    node.restart()
    assert node.drain("a") == [b"1"]


def test_a_block_that_another_caller_has_sealed_meanwhile_is_not_forgotten(node: Node):
    declared(node, "a")
    publish(node, "a", b"0")
    node.broker.upkeep.close_open()

    def seal_too(_point: str) -> None:
        failpoint.disarm()
        node.broker.upkeep.seal()

    failpoint.arm("upkeep.seal.written", seal_too)
    node.broker.upkeep.seal()
    assert node.drain("a") == [b"0"]
