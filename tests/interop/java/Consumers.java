import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.Delivery;
import com.rabbitmq.client.GetResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** Deliveries and what settles them, seen by the Java client. */
final class Consumers {
    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        deliveries();
        cancelling();
        settling();
        sharing();
        Checks.finish();
    }

    private static void deliveries() throws Exception {
        Checks.check("1000 messages arrive once each and in order", channel -> {
            String queue = Checks.queue(channel);
            Checks.Inbox inbox = Checks.consume(channel, queue, true);
            List<String> sent = new ArrayList<>();
            for (int i = 0; i < 1000; i++) {
                sent.add("message " + i);
                Checks.publish(channel, queue, "message " + i);
            }
            Checks.equal("bodies", sent, inbox.next(1000));
            inbox.quiet();
        });
        Checks.check("prefetch limits one consumer until it acks", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b", "c");
            channel.basicQos(2);
            Checks.Inbox inbox = Checks.consume(channel, queue, false);
            Delivery first = inbox.next();
            inbox.next();
            inbox.quiet();
            channel.basicAck(first.getEnvelope().getDeliveryTag(), false);
            Checks.equal("third", "c", Checks.text(inbox.next().getBody()));
        });
        Checks.check("a prefetch for the channel is shared by its consumers", channel -> {
            String first = Checks.queue(channel);
            String second = Checks.queue(channel);
            Checks.publish(channel, first, "a", "b");
            Checks.publish(channel, second, "c", "d");
            channel.basicQos(3, true);
            Checks.Inbox left = Checks.consume(channel, first, false);
            Checks.Inbox right = Checks.consume(channel, second, false);
            left.next(2);
            long tag = right.next().getEnvelope().getDeliveryTag();
            right.quiet();
            channel.basicAck(tag, false);
            Checks.equal("fourth", "d", Checks.text(right.next().getBody()));
        });
        Checks.check("get tells how many messages are left and that a queue is empty", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b", "c");
            Checks.equal("left", 2, channel.basicGet(queue, true).getMessageCount());
            Checks.equal("left", 1, channel.basicGet(queue, true).getMessageCount());
            Checks.equal("purged", 1, channel.queuePurge(queue).getMessageCount());
            Checks.equal("empty", null, channel.basicGet(queue, true));
        });
        Checks.check("the counts of declare-ok are those of the queue", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b");
            Checks.awaitReady(queue, 2);
            Checks.equal("consumers", 0, channel.queueDeclarePassive(queue).getConsumerCount());
            Checks.consume(channel, queue, false).next(2);
            Checks.equal("consumers", 1, channel.queueDeclarePassive(queue).getConsumerCount());
            Checks.equal("ready", 0, channel.queueDeclarePassive(queue).getMessageCount());
        });
    }

    private static void cancelling() throws Exception {
        Checks.check("a cancelled consumer gets nothing more and may still ack", channel -> {
            String queue = Checks.queue(channel);
            Checks.Inbox inbox = new Checks.Inbox(channel);
            String tag = channel.basicConsume(queue, false, "mine", inbox);
            Checks.equal("tag", "mine", tag);
            Checks.publish(channel, queue, "a");
            Delivery delivery = inbox.next();
            channel.basicCancel(tag);
            Checks.publish(channel, queue, "b");
            inbox.quiet();
            channel.basicAck(delivery.getEnvelope().getDeliveryTag(), false);
            channel.close();
            Checks.equal("left", List.of("b"), Checks.drain(queue));
        });
        Checks.check("deleting the queue notifies its consumer", channel -> {
            String queue = Checks.queue(channel);
            Checks.Inbox inbox = new Checks.Inbox(channel);
            String tag = channel.basicConsume(queue, inbox);
            Checks.channel().queueDelete(queue);
            Checks.equal("cancelled", tag, inbox.cancelled.get(Checks.TIMEOUT_MS, TimeUnit.MILLISECONDS));
            Checks.equal("the channel is open", true, channel.isOpen());
        });
        Checks.check("an auto-delete queue goes with its last consumer", channel -> {
            String queue = channel.queueDeclare(Checks.name(), false, false, true, Map.of()).getQueue();
            String first = channel.basicConsume(queue, new Checks.Inbox(channel));
            String second = channel.basicConsume(queue, new Checks.Inbox(channel));
            channel.basicCancel(first);
            channel.queueDeclarePassive(queue);
            channel.basicCancel(second);
            Checks.refused(404, "NOT_FOUND - no queue '" + queue + "' in vhost '/'", other -> other.queueDeclarePassive(queue));
        });
        Checks.check("an exclusive queue goes with its connection", channel -> {
            String queue;
            try (Connection owner = Checks.connect()) {
                queue = owner.createChannel().queueDeclare().getQueue();
            }
            Checks.refused(404, "NOT_FOUND - no queue '" + queue + "' in vhost '/'", other -> other.queueDeclarePassive(queue));
        });
    }

    private static void settling() throws Exception {
        Checks.check("what a closed channel held comes again in order as redelivered", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b", "c");
            Checks.Inbox inbox = Checks.consume(channel, queue, false);
            channel.basicAck(inbox.next().getEnvelope().getDeliveryTag(), false);
            inbox.next(2);
            channel.close();
            Checks.awaitReady(queue, 2);
            Channel again = Checks.channel();
            GetResponse got = again.basicGet(queue, true);
            Checks.equal("body", "b", Checks.text(got.getBody()));
            Checks.equal("redelivered", true, got.getEnvelope().isRedeliver());
            Checks.equal("rest", List.of("c"), Checks.drain(queue));
        });
        Checks.check("recover gives everything unacked again", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b");
            Checks.Inbox inbox = Checks.consume(channel, queue, false);
            Checks.equal("redelivered", false, inbox.next().getEnvelope().isRedeliver());
            inbox.next();
            channel.basicRecover(true);
            Delivery again = inbox.next();
            Checks.equal("body", "a", Checks.text(again.getBody()));
            Checks.equal("redelivered", true, again.getEnvelope().isRedeliver());
            Checks.equal("tag", 3L, again.getEnvelope().getDeliveryTag());
            Checks.equal("rest", List.of("b"), inbox.next(1));
        });
        Checks.check("reject drops or requeues", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "dropped", "requeued");
            channel.basicReject(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            channel.basicReject(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), true);
            Checks.awaitReady(queue, 1);
            GetResponse got = channel.basicGet(queue, true);
            Checks.equal("body", "requeued", Checks.text(got.getBody()));
            Checks.equal("redelivered", true, got.getEnvelope().isRedeliver());
        });
        Checks.check("nack with multiple settles everything up to its tag", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b", "c");
            channel.basicGet(queue, false);
            long second = channel.basicGet(queue, false).getEnvelope().getDeliveryTag();
            long third = channel.basicGet(queue, false).getEnvelope().getDeliveryTag();
            channel.basicNack(second, true, false);
            channel.basicAck(third, false);
            channel.close();
            Checks.equal("left", List.of(), Checks.drain(queue));
        });
        Checks.check("ack 0 with multiple settles everything", channel -> {
            String queue = Checks.queue(channel);
            Checks.publish(channel, queue, "a", "b");
            Checks.consume(channel, queue, false).next(2);
            channel.basicAck(0, true);
            channel.basicAck(0, true);
            channel.close();
            Checks.equal("left", List.of(), Checks.drain(queue));
        });
        Checks.check("a rejected message carries x-death", channel -> {
            String exchange = Checks.exchange(channel, "fanout");
            String dead = Checks.queue(channel);
            channel.queueBind(dead, exchange, "");
            String queue = Checks.queue(channel, Map.of("x-dead-letter-exchange", exchange));
            Checks.publish(channel, queue, "a");
            channel.basicReject(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            Map<?, ?> headers = Checks.consume(channel, dead, true).next().getProperties().getHeaders();
            Map<?, ?> death = (Map<?, ?>) ((List<?>) headers.get("x-death")).get(0);
            Checks.equal("reason", "rejected", death.get("reason").toString());
            Checks.equal("queue", queue, death.get("queue").toString());
            Checks.equal("count", 1L, death.get("count"));
            Checks.equal("keys", queue, ((List<?>) death.get("routing-keys")).get(0).toString());
            Checks.equal("first", queue, headers.get("x-first-death-queue").toString());
        });
        Checks.check("an expired message is dead-lettered", channel -> {
            String dead = Checks.queue(channel);
            Map<String, Object> dying = Map.of("x-dead-letter-exchange", "", "x-dead-letter-routing-key", dead, "x-message-ttl", 20);
            String queue = Checks.queue(channel, dying);
            Checks.publish(channel, queue, "late");
            Map<?, ?> headers = Checks.consume(channel, dead, true).next().getProperties().getHeaders();
            Checks.equal("reason", "expired", headers.get("x-first-death-reason").toString());
            Checks.equal("left", List.of(), Checks.drain(queue));
        });
    }

    private static void sharing() throws Exception {
        Checks.check("an exclusive consumer keeps others out", channel -> {
            String queue = Checks.queue(channel);
            channel.basicConsume(queue, false, "only", false, true, Map.of(), new Checks.Inbox(channel));
            Checks.refused(403, "ACCESS_REFUSED - queue '" + queue + "' in vhost '/' in exclusive use",
                other -> Checks.consume(other, queue, false));
        });
        Checks.check("an exclusive consumer is refused where another one is", channel -> {
            String queue = Checks.queue(channel);
            Checks.consume(channel, queue, false);
            Checks.refused(403, "ACCESS_REFUSED - queue '" + queue + "' in vhost '/' in exclusive use", other -> {
                other.basicConsume(queue, false, "", false, true, Map.of(), new Checks.Inbox(other));
            });
        });
        Checks.check("two consumers take turns", channel -> {
            String queue = Checks.queue(channel);
            Checks.Inbox left = Checks.consume(channel, queue, true);
            Checks.Inbox right = Checks.consume(channel, queue, true);
            Checks.publish(channel, queue, "a", "b", "c", "d");
            List<String> both = left.next(2);
            both.addAll(right.next(2));
            Checks.equal("all", List.of("a", "b", "c", "d"), both.stream().sorted().toList());
        });
        Checks.check("a consumer of higher priority comes first until its credit is gone", channel -> {
            String queue = Checks.queue(channel);
            channel.basicQos(2);
            Checks.Inbox low = Checks.consume(channel, queue, false);
            Checks.Inbox high = new Checks.Inbox(channel);
            channel.basicConsume(queue, false, Map.of("x-priority", 10), high);
            Checks.publish(channel, queue, "a", "b", "c");
            Checks.equal("high", List.of("a", "b"), high.next(2));
            Checks.equal("low", List.of("c"), low.next(1));
        });
        Checks.check("a single active consumer is followed by the next", channel -> {
            String queue = Checks.queue(channel, Map.of("x-single-active-consumer", true));
            Checks.Inbox active = new Checks.Inbox(channel);
            String tag = channel.basicConsume(queue, true, active);
            Checks.Inbox waiting = Checks.consume(channel, queue, true);
            Checks.publish(channel, queue, "a", "b");
            Checks.equal("active", List.of("a", "b"), active.next(2));
            channel.basicCancel(tag);
            Checks.publish(channel, queue, "c");
            Checks.equal("next", List.of("c"), waiting.next(1));
        });
        Checks.check("a message of higher priority overtakes", channel -> {
            String queue = Checks.queue(channel, Map.of("x-max-priority", 5));
            for (int priority : List.of(1, 5, 3, 9)) {
                AMQP.BasicProperties properties = Checks.PERSISTENT.builder().priority(priority).build();
                channel.basicPublish("", queue, properties, Checks.bytes("priority " + priority));
            }
            Checks.equal("order", List.of("priority 5", "priority 9", "priority 3", "priority 1"), Checks.drain(queue));
        });
    }
}
