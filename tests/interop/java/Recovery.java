import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.Delivery;
import com.rabbitmq.client.Recoverable;
import com.rabbitmq.client.RecoveryListener;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/**
 * The Java client's automatic recovery, and what is in the queues after the broker was killed and started again.
 *
 * It asks for that with a line {@code kill the broker}. Not here: who kills it.
 */
final class Recovery {
    private static final int BATCH = 1000;

    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        var factory = Checks.factory();
        factory.setAutomaticRecoveryEnabled(true);
        factory.setTopologyRecoveryEnabled(true);
        factory.setNetworkRecoveryInterval(100);
        try (Connection connection = factory.newConnection("recovering")) {
            CountDownLatch recovered = recovered(connection);
            Topology topology = new Topology(connection.createChannel());
            Contents contents = new Contents(connection);
            System.out.println("kill the broker");
            if (!recovered.await(3 * Checks.TIMEOUT_MS, TimeUnit.MILLISECONDS)) {
                throw new AssertionError("the connection did not recover");
            }
            Checks.reopen();
            topology.check();
            contents.check();
        }
        Checks.finish();
    }

    private static CountDownLatch recovered(Connection connection) {
        CountDownLatch recovered = new CountDownLatch(1);
        ((Recoverable) connection).addRecoveryListener(new RecoveryListener() {
            @Override
            public void handleRecovery(Recoverable recoverable) {
                recovered.countDown();
            }

            @Override
            public void handleRecoveryStarted(Recoverable recoverable) {}
        });
        return recovered;
    }

    /** A queue that stays for the checks after the restart; the broker is ours and goes with it. */
    private static String durable(Channel channel) throws IOException {
        return channel.queueDeclare(Checks.name(), true, false, false, Map.of()).getQueue();
    }

    /** What the client declares again. */
    private static final class Topology {
        private final Channel channel;
        private final String exchange;
        private final String upstream = Checks.name();
        private final Checks.Inbox durable;
        private final Checks.Inbox serverNamed;
        private final String queue;

        Topology(Channel channel) throws Exception {
            this.channel = channel;
            exchange = Checks.name();
            channel.exchangeDeclare(exchange, "topic", true);
            channel.exchangeDeclare(upstream, "fanout", false, true, Map.of());
            channel.exchangeBind(exchange, upstream, "");
            queue = durable(channel);
            channel.queueBind(queue, exchange, "#");
            durable = Checks.consume(channel, queue, true);
            String name = channel.queueDeclare().getQueue();
            channel.queueBind(name, exchange, "to.*");
            serverNamed = Checks.consume(channel, name, true);
            channel.basicPublish(exchange, "to.both", null, Checks.bytes("before"));
            durable.next();
            serverNamed.next();
        }

        void check() throws Exception {
            Checks.check("a consumer of a durable queue goes on after the broker was killed", other -> {
                channel.basicPublish("", queue, null, Checks.bytes("after"));
                Checks.equal("body", "after", Checks.text(durable.next().getBody()));
            });
            Checks.check("a server-named queue, its binding and its consumer are there again after the broker was killed", other -> {
                channel.basicPublish(exchange, "to.both", null, Checks.bytes("again"));
                Checks.equal("body", "again", Checks.text(serverNamed.next().getBody()));
                Checks.equal("body", "again", Checks.text(durable.next().getBody()));
            });
            Checks.check("a transient exchange and its binding to an exchange are there again after the broker was killed", other -> {
                channel.basicPublish(upstream, "to.both", null, Checks.bytes("through"));
                Checks.equal("body", "through", Checks.text(serverNamed.next().getBody()));
            });
        }
    }

    /** What the broker keeps or forgets. */
    private static final class Contents {
        private final Channel transactional;
        private final String confirmed;
        private final String transients;
        private final String taken;
        private final String unacked;
        private final List<String> committed = new ArrayList<>();

        Contents(Connection connection) throws Exception {
            Channel confirming = connection.createChannel();
            confirmed = durable(confirming);
            transients = durable(confirming);
            unacked = durable(confirming);
            taken = durable(confirming);
            confirming.confirmSelect();
            Checks.publish(confirming, confirmed, "persistent");
            Checks.publish(confirming, unacked, "unacked");
            Checks.publish(confirming, taken, "taken");
            confirming.basicPublish("", transients, Checks.TRANSIENT, Checks.bytes("transient"));
            confirming.waitForConfirmsOrDie(Checks.TIMEOUT_MS);
            confirming.basicGet(unacked, false);
            transactional = connection.createChannel();
            transactional.txSelect();
            committed.add(durable(transactional));
            committed.add(durable(transactional));
            for (int i = 0; i < BATCH; i++) {
                Checks.publish(transactional, committed.get(i % 2), "message " + i);
            }
            transactional.txCommit();
            Checks.publish(transactional, committed.get(0), "never");
            transactional.basicAck(transactional.basicGet(taken, false).getEnvelope().getDeliveryTag(), false);
        }

        void check() throws Exception {
            Checks.check("a confirmed persistent message is there after the broker was killed", channel -> {
                Checks.equal("bodies", List.of("persistent"), Checks.drain(confirmed));
            });
            Checks.check("a transient message is gone after the broker was killed", channel -> {
                Checks.equal("bodies", List.of(), Checks.drain(transients));
            });
            Checks.check("an unacked message comes again as redelivered after the broker was killed", channel -> {
                Delivery again = Checks.consume(channel, unacked, true).next();
                Checks.equal("body", "unacked", Checks.text(again.getBody()));
                Checks.equal("redelivered", true, again.getEnvelope().isRedeliver());
            });
            Checks.check("a committed transaction is whole in every queue after the broker was killed", channel -> {
                Checks.equal("first", BATCH / 2, Checks.drain(committed.get(0)).size());
                Checks.equal("second", BATCH / 2, Checks.drain(committed.get(1)).size());
            });
            Checks.check("an open transaction is rolled back by the broker being killed", channel -> {
                Delivery again = Checks.consume(channel, taken, true).next();
                Checks.equal("body", "taken", Checks.text(again.getBody()));
                Checks.equal("redelivered", true, again.getEnvelope().isRedeliver());
            });
            Checks.check("a transactional channel is transactional again after the broker was killed", channel -> {
                Checks.publish(transactional, confirmed, "new");
                Checks.equal("before commit", null, channel.basicGet(confirmed, true));
                transactional.txCommit();
                Checks.equal("bodies", List.of("new"), Checks.drain(confirmed));
            });
        }
    }
}
