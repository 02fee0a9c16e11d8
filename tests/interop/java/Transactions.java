import static java.nio.charset.StandardCharsets.UTF_8;

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.ShutdownSignalException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/** What tx.select, tx.commit and tx.rollback promise, seen by the Java client. */
final class Transactions {
    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        publishes();
        acks();
        overflow();
        closing();
        refusals();
        Checks.finish();
    }

    private static void publishes() throws Exception {
        Checks.check("others see the publishes of a transaction only after its commit", channel -> {
            String first = Checks.queue(channel);
            String second = Checks.queue(channel);
            channel.txSelect();
            Checks.publish(channel, first, "a", "b");
            Checks.publish(channel, second, "c");
            try (Connection other = Checks.connect()) {
                Channel reader = other.createChannel();
                Checks.equal("before commit", null, reader.basicGet(first, true));
                Checks.equal("before commit", null, reader.basicGet(second, true));
                channel.txCommit();
                Checks.equal("first queue", 2L, reader.messageCount(first));
                Checks.equal("second queue", 1L, reader.messageCount(second));
            }
            Checks.equal("order", List.of("a", "b"), Checks.drain(first));
        });
        Checks.check("a rollback drops the publishes and the channel goes on", channel -> {
            String queue = Checks.queue(channel);
            channel.txSelect();
            Checks.publish(channel, queue, "dropped");
            channel.txRollback();
            Checks.publish(channel, queue, "kept");
            channel.txCommit();
            Checks.equal("bodies", List.of("kept"), Checks.drain(queue));
        });
        Checks.check("select may be repeated and an empty commit is fine", channel -> {
            String queue = Checks.queue(channel);
            channel.txSelect();
            Checks.publish(channel, queue, "a");
            channel.txSelect();
            channel.txCommit();
            channel.txCommit();
            channel.txRollback();
            Checks.equal("bodies", List.of("a"), Checks.drain(queue));
        });
        Checks.check("a mandatory message without a queue comes back before commit-ok", channel -> {
            List<String> returned = new ArrayList<>();
            channel.addReturnListener(back ->
                returned.add(back.getReplyCode() + " " + back.getReplyText() + " " + Checks.text(back.getBody())));
            channel.txSelect();
            channel.basicPublish("", Checks.name(), true, null, "lost".getBytes(UTF_8));
            channel.txCommit();
            Checks.equal("returned", List.of("312 NO_ROUTE lost"), returned);
        });
        Checks.check("a commit of 5000 messages is whole", channel -> {
            String queue = Checks.queue(channel);
            channel.txSelect();
            for (int i = 0; i < 5000; i++) {
                Checks.publish(channel, queue, "message " + i);
            }
            channel.txCommit();
            Checks.equal("count", 5000L, channel.messageCount(queue));
        });
    }

    private static void acks() throws Exception {
        Checks.check("consume, publish, ack and commit move a message", channel -> {
            String source = Checks.queue(channel);
            String sink = Checks.queue(channel);
            Checks.publish(channel, source, "in");
            channel.txSelect();
            GetResponse got = channel.basicGet(source, false);
            Checks.publish(channel, sink, "out of " + Checks.text(got.getBody()));
            channel.basicAck(got.getEnvelope().getDeliveryTag(), false);
            channel.txCommit();
            channel.close();
            Checks.equal("source", List.of(), Checks.drain(source));
            Checks.equal("sink", List.of("out of in"), Checks.drain(sink));
        });
        Checks.check("acked tags are unacked again after a rollback and may be acked again", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b");
            channel.txSelect();
            long first = channel.basicGet(queue, false).getEnvelope().getDeliveryTag();
            long second = channel.basicGet(queue, false).getEnvelope().getDeliveryTag();
            channel.basicAck(second, true);
            channel.txRollback();
            Checks.equal("no redelivery", null, channel.basicGet(queue, false));
            channel.basicAck(first, false);
            channel.basicAck(second, false);
            channel.txCommit();
            channel.close();
            Checks.equal("bodies", List.of(), Checks.drain(queue));
        });
        Checks.check("a nack in a transaction requeues at commit", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a");
            channel.txSelect();
            channel.basicNack(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false, true);
            Checks.equal("before commit", null, channel.basicGet(queue, false));
            channel.txCommit();
            Checks.awaitReady(queue, 1);
            Checks.equal("redelivered", true, channel.basicGet(queue, false).getEnvelope().isRedeliver());
        });
        Checks.check("a rejected message is dead-lettered at commit", channel -> {
            String dead = Checks.queue(channel);
            String queue = Checks.queue(channel, Map.of("x-dead-letter-exchange", "", "x-dead-letter-routing-key", dead));
            Checks.publish(channel, queue, "a");
            channel.txSelect();
            channel.basicReject(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            Checks.equal("before commit", null, Checks.channel().basicGet(dead, false));
            channel.txCommit();
            Checks.awaitReady(dead, 1);
            Checks.equal("dead", List.of("a"), Checks.drain(dead));
        });
        Checks.check("prefetch credit comes back at commit", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b");
            channel.txSelect();
            channel.basicQos(1);
            Checks.Inbox inbox = Checks.consume(channel, queue, false);
            channel.basicAck(inbox.next().getEnvelope().getDeliveryTag(), false);
            inbox.quiet();
            channel.txCommit();
            Checks.equal("second", "b", Checks.text(inbox.next().getBody()));
        });
        Checks.check("recover leaves out what the open transaction acked", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "acked", "open");
            channel.txSelect();
            channel.basicAck(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            channel.basicGet(queue, false);
            channel.basicRecover(true);
            GetResponse again = channel.basicGet(queue, false);
            Checks.equal("body", "open", Checks.text(again.getBody()));
            Checks.equal("redelivered", true, again.getEnvelope().isRedeliver());
            Checks.equal("more", null, channel.basicGet(queue, false));
        });
    }

    private static void overflow() throws Exception {
        Checks.only("txmq", "a commit that a full reject-publish queue cannot take fails whole with 406", done -> {
            String full = Checks.queue(Checks.channel(), Map.of("x-max-length", 1, "x-overflow", "reject-publish"));
            String other = Checks.queue(Checks.channel());
            ShutdownSignalException signal = Checks.signalOf(Checks.channel(), channel -> {
                channel.txSelect();
                Checks.publish(channel, other, "a");
                Checks.publish(channel, full, "b", "c");
                channel.txCommit();
            });
            Checks.equal("code", 406, ((AMQP.Channel.Close) signal.getReason()).getReplyCode());
            Checks.equal("full queue", List.of(), Checks.drain(full));
            Checks.equal("other queue", List.of(), Checks.drain(other));
        });
    }

    private static void closing() throws Exception {
        Checks.check("closing the channel rolls back and requeues acked and unacked", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b");
            channel.txSelect();
            channel.basicAck(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            channel.basicGet(queue, false);
            Checks.publish(channel, queue, "never");
            channel.close();
            Checks.awaitReady(queue, 2);
            Channel reader = Checks.channel();
            for (String body : List.of("a", "b")) {
                GetResponse got = reader.basicGet(queue, true);
                Checks.equal("body", body, Checks.text(got.getBody()));
                Checks.equal("redelivered", true, got.getEnvelope().isRedeliver());
            }
            Checks.equal("more", null, reader.basicGet(queue, true));
        });
        Checks.check("an aborted connection rolls back", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a");
            Connection victim = Checks.connect();
            Channel doomed = victim.createChannel();
            doomed.txSelect();
            doomed.basicAck(doomed.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            Checks.publish(doomed, queue, "never");
            victim.abort();
            Checks.awaitReady(queue, 1);
            Checks.equal("bodies", List.of("a"), Checks.drain(queue));
        });
    }

    private static void refusals() throws Exception {
        String mode = "PRECONDITION_FAILED - ";
        Checks.check("commit without select is 406", done -> Checks.refused(406, mode + "channel is not transactional", Channel::txCommit));
        Checks.check("rollback without select is 406", done ->
            Checks.refused(406, mode + "channel is not transactional", Channel::txRollback));
        Checks.check("confirm.select on a transactional channel is 406", done -> {
            Checks.refused(406, mode + "cannot switch from tx to confirm mode", channel -> {
                channel.txSelect();
                channel.confirmSelect();
            });
        });
        Checks.check("tx.select on a confirming channel is 406", done -> {
            Checks.refused(406, mode + "cannot switch from confirm to tx mode", channel -> {
                channel.confirmSelect();
                channel.txSelect();
            });
        });
        Checks.check("an unknown delivery tag in a transaction is 406 at once", done -> {
            Checks.refused(406, mode + "unknown delivery tag 42", channel -> {
                channel.txSelect();
                channel.basicAck(42, false);
            });
        });
        Checks.check("acking a tag twice in a transaction is 406", done -> {
            Checks.refused(406, mode + "unknown delivery tag 1", channel -> {
                String queue = Checks.queue(channel);
                Checks.publish(channel, queue, "a");
                channel.txSelect();
                long tag = channel.basicGet(queue, false).getEnvelope().getDeliveryTag();
                channel.basicAck(tag, false);
                channel.basicAck(tag, false);
            });
        });
        Checks.check("a publish to a missing exchange in a transaction is 404", done -> {
            Checks.refused(404, "NOT_FOUND - no exchange 'java-missing' in vhost '/'", channel -> {
                channel.txSelect();
                channel.basicPublish("java-missing", "", null, Checks.bytes("a"));
                channel.txCommit();
            });
        });
    }
}
