import com.rabbitmq.client.Channel;
import com.rabbitmq.client.ConfirmListener;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** Publisher confirms, seen by the Java client. */
final class Confirms {
    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        acks();
        nacks();
        Checks.finish();
    }

    private static void acks() throws Exception {
        Checks.check("waitForConfirms answers true when all messages are in the queue", channel -> {
            String queue = Checks.queue(channel);
            channel.confirmSelect();
            for (int i = 0; i < 500; i++) {
                Checks.publish(channel, queue, "message " + i);
            }
            Checks.equal("confirmed", true, channel.waitForConfirms(Checks.TIMEOUT_MS));
            Checks.equal("count", 500L, channel.messageCount(queue));
        });
        Checks.check("each sequence number is confirmed exactly once, single or multiple", channel -> {
            String queue = Checks.queue(channel);
            channel.confirmSelect();
            TreeSet<Long> open = new TreeSet<>();
            List<Long> unknown = Collections.synchronizedList(new ArrayList<>());
            channel.addConfirmListener((tag, multiple) -> {
                synchronized (open) {
                    if (!(multiple ? open.headSet(tag, true).removeIf(each -> true) : open.remove(tag))) {
                        unknown.add(tag);
                    }
                }
            }, (tag, multiple) -> unknown.add(-tag));
            for (int i = 1; i <= 500; i++) {
                Checks.equal("sequence number", (long) i, channel.getNextPublishSeqNo());
                synchronized (open) {
                    open.add((long) i);
                }
                Checks.publish(channel, queue, "message");
            }
            channel.waitForConfirmsOrDie(Checks.TIMEOUT_MS);
            Checks.equal("unexpected numbers", List.of(), unknown);
            Checks.equal("open numbers", 0, open.size());
        });
        Checks.check("numbers go on after confirm.select is repeated", channel -> {
            String queue = Checks.queue(channel);
            channel.confirmSelect();
            BlockingQueue<Long> acked = new LinkedBlockingQueue<>();
            channel.addConfirmListener((tag, multiple) -> acked.add(tag), (tag, multiple) -> acked.add(-tag));
            Checks.publish(channel, queue, "a");
            Checks.equal("first", 1L, acked.poll(Checks.TIMEOUT_MS, TimeUnit.MILLISECONDS));
            channel.confirmSelect();
            Checks.publish(channel, queue, "b");
            Checks.equal("second", 2L, acked.poll(Checks.TIMEOUT_MS, TimeUnit.MILLISECONDS));
        });
        Checks.check("a message that no queue takes is confirmed", channel -> {
            channel.confirmSelect();
            Checks.publish(channel, Checks.name(), "nowhere");
            Checks.equal("confirmed", true, channel.waitForConfirms(Checks.TIMEOUT_MS));
        });
        Checks.check("a mandatory message is returned before it is confirmed", channel -> {
            BlockingQueue<String> events = new LinkedBlockingQueue<>();
            channel.confirmSelect();
            channel.addReturnListener(back ->
                events.add("returned " + back.getReplyCode() + " " + back.getReplyText() + " " + back.getRoutingKey()));
            channel.addConfirmListener((tag, multiple) -> events.add("acked " + tag), (tag, multiple) -> events.add("nacked " + tag));
            channel.basicPublish("", "java-nowhere", true, null, Checks.bytes("lost"));
            Checks.equal("confirmed", true, channel.waitForConfirms(Checks.TIMEOUT_MS));
            Checks.equal("first", "returned 312 NO_ROUTE java-nowhere", events.poll(Checks.TIMEOUT_MS, TimeUnit.MILLISECONDS));
            Checks.equal("then", "acked 1", events.poll(Checks.TIMEOUT_MS, TimeUnit.MILLISECONDS));
        });
        Checks.check("a transient message with a waiting consumer is confirmed", channel -> {
            String queue = channel.queueDeclare().getQueue();
            Checks.Inbox inbox = Checks.consume(Checks.channel(), queue, true);
            channel.confirmSelect();
            channel.basicPublish("", queue, null, Checks.bytes("transient"));
            Checks.equal("confirmed", true, channel.waitForConfirms(Checks.TIMEOUT_MS));
            Checks.equal("delivered", "transient", Checks.text(inbox.next().getBody()));
            inbox.getChannel().close();
        });
    }

    private static void nacks() throws Exception {
        Checks.check("a full reject-publish queue nacks what it does not take", channel -> {
            String queue = Checks.queue(channel, Map.of("x-max-length", 2, "x-overflow", "reject-publish"));
            channel.confirmSelect();
            List<String> events = Collections.synchronizedList(new ArrayList<>());
            channel.addConfirmListener(confirms(events));
            for (String body : List.of("a", "b", "c", "d")) {
                Checks.publish(channel, queue, body);
                channel.waitForConfirms(Checks.TIMEOUT_MS);
            }
            Checks.equal("events", List.of("ack 1", "ack 2", "nack 3", "nack 4"), events);
            Checks.equal("bodies", List.of("a", "b"), Checks.drain(queue));
            Checks.publish(channel, queue, "e");
            Checks.equal("after room was made", true, channel.waitForConfirms(Checks.TIMEOUT_MS));
        });
        Checks.check("drop-head confirms and keeps the newest", channel -> {
            String queue = Checks.queue(channel, Map.of("x-max-length", 2));
            channel.confirmSelect();
            Checks.publish(channel, queue, "a", "b", "c");
            Checks.equal("confirmed", true, channel.waitForConfirms(Checks.TIMEOUT_MS));
            Checks.equal("bodies", List.of("b", "c"), Checks.drain(queue));
        });
        Checks.check("a publish to a missing exchange closes the channel with 404", done -> {
            Checks.refused(404, "NOT_FOUND - no exchange 'java-missing' in vhost '/'", (Channel channel) -> {
                channel.confirmSelect();
                channel.basicPublish("java-missing", "", null, Checks.bytes("a"));
            });
        });
    }

    private static ConfirmListener confirms(List<String> events) {
        return new ConfirmListener() {
            @Override
            public void handleAck(long tag, boolean multiple) {
                events.add("ack " + tag);
            }

            @Override
            public void handleNack(long tag, boolean multiple) {
                events.add("nack " + tag);
            }
        };
    }
}
