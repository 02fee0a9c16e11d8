import com.rabbitmq.client.AlreadyClosedException;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.DefaultConsumer;
import com.rabbitmq.client.Delivery;
import com.rabbitmq.client.Envelope;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.ShutdownSignalException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/**
 * Runs the checks of one program, each on a channel of its own, and prints one line for each: {@code ok NAME} or {@code FAILED NAME: why}.
 *
 * Lines of checks for another product begin with {@code skipped}. Not here: any rule of the broker.
 * Invariant: what a check declared with {@link #queue} or {@link #exchange} is deleted after it.
 */
final class Checks {
    interface Body {
        void run(Channel channel) throws Exception;
    }

    static final long TIMEOUT_MS = 120_000;
    /** Long enough for a delivery that must not come to arrive on loopback. */
    static final long QUIET_MS = 150;

    private static ConnectionFactory factory;
    private static Connection connection;
    private static final List<String> queues = new ArrayList<>();
    private static final List<String> exchanges = new ArrayList<>();
    private static boolean failed;

    static void open(String url) throws Exception {
        factory = new ConnectionFactory();
        factory.setUri(url);
        factory.setAutomaticRecoveryEnabled(false);
        connection = factory.newConnection("checks");
    }

    /** The broker was killed and is there again. */
    static void reopen() throws Exception {
        connection.abort();
        connection = factory.newConnection("checks");
    }

    /** Ends the program: 1 where a check failed. */
    static void finish() throws Exception {
        connection.close();
        System.exit(failed ? 1 : 0);
    }

    static void check(String name, Body body) throws Exception {
        Channel channel = connection.createChannel();
        try {
            body.run(channel);
            System.out.println("ok " + name);
        } catch (Throwable failure) {
            failed = true;
            Throwable cause = failure.getCause() == null ? failure : failure.getCause();
            System.out.println("FAILED " + name + ": " + String.valueOf(cause).replace('\n', ' '));
            failure.printStackTrace();
        }
        if (!connection.isOpen()) {
            connection = factory.newConnection("checks");
        }
        if (channel.isOpen()) {
            channel.close();
        }
        tidy();
    }

    /** A check of what only one product promises. */
    static void only(String product, String name, Body body) throws Exception {
        if (product.equals(String.valueOf(connection.getServerProperties().get("product")))) {
            check(name, body);
        } else {
            System.out.println("skipped " + name + ": only " + product + " promises it");
        }
    }

    private static void tidy() throws Exception {
        Channel channel = connection.createChannel();
        for (String queue : queues) {
            channel.queueDelete(queue);
        }
        for (String exchange : exchanges) {
            channel.exchangeDelete(exchange);
        }
        queues.clear();
        exchanges.clear();
        channel.close();
    }

    /** A connection beside the one that the checks share. */
    static Connection connect() throws Exception {
        return factory.newConnection("beside");
    }

    static ConnectionFactory factory() {
        return factory.clone();
    }

    /** Another channel on the connection that the checks share. */
    static Channel channel() throws Exception {
        return connection.createChannel();
    }

    // ----------------------------------------------------------------------------------------------- topology

    static String name() {
        return "java-" + UUID.randomUUID();
    }

    /** A new durable queue. */
    static String queue(Channel channel) throws IOException {
        return queue(channel, Map.of());
    }

    static String queue(Channel channel, Map<String, Object> arguments) throws IOException {
        String queue = name();
        queues.add(queue);
        channel.queueDeclare(queue, true, false, false, arguments);
        return queue;
    }

    static String exchange(Channel channel, String type) throws IOException {
        return exchange(channel, type, Map.of());
    }

    static String exchange(Channel channel, String type, Map<String, Object> arguments) throws IOException {
        String exchange = name();
        exchanges.add(exchange);
        channel.exchangeDeclare(exchange, type, true, false, arguments);
        return exchange;
    }

    // ----------------------------------------------------------------------------------------------- messages

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] body) {
        return new String(body, StandardCharsets.UTF_8);
    }

    static final AMQP.BasicProperties PERSISTENT = new AMQP.BasicProperties.Builder().deliveryMode(2).build();
    static final AMQP.BasicProperties TRANSIENT = new AMQP.BasicProperties.Builder().deliveryMode(1).build();

    static void publish(Channel channel, String queue, String... bodies) throws IOException {
        for (String body : bodies) {
            channel.basicPublish("", queue, PERSISTENT, bytes(body));
        }
    }

    /** Waits until {@code queue} has this many ready messages, as another channel sees it. */
    static void awaitReady(String queue, long count) throws Exception {
        Channel channel = channel();
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(TIMEOUT_MS);
        long found = channel.messageCount(queue);
        while (found != count) {
            if (System.nanoTime() > deadline) {
                throw new AssertionError("expected " + count + " ready messages in the queue, found " + found);
            }
            Thread.sleep(5);
            found = channel.messageCount(queue);
        }
        channel.close();
    }

    /** The bodies of everything that is ready, taken out of the queue. */
    static List<String> drain(String queue) throws Exception {
        List<String> bodies = new ArrayList<>();
        Channel channel = channel();
        GetResponse got;
        while ((got = channel.basicGet(queue, true)) != null) {
            bodies.add(text(got.getBody()));
        }
        channel.close();
        return bodies;
    }

    /** A consumer that keeps what comes. */
    static final class Inbox extends DefaultConsumer {
        final BlockingQueue<Delivery> deliveries = new LinkedBlockingQueue<>();
        final CompletableFuture<String> cancelled = new CompletableFuture<>();

        Inbox(Channel channel) {
            super(channel);
        }

        @Override
        public void handleDelivery(String tag, Envelope envelope, AMQP.BasicProperties properties, byte[] body) {
            deliveries.add(new Delivery(envelope, properties, body));
        }

        @Override
        public void handleCancel(String tag) {
            cancelled.complete(tag);
        }

        Delivery next() throws InterruptedException {
            Delivery delivery = deliveries.poll(TIMEOUT_MS, TimeUnit.MILLISECONDS);
            if (delivery == null) {
                throw new AssertionError("no delivery in " + TIMEOUT_MS + " ms");
            }
            return delivery;
        }

        List<String> next(int count) throws InterruptedException {
            List<String> bodies = new ArrayList<>();
            for (int i = 0; i < count; i++) {
                bodies.add(text(next().getBody()));
            }
            return bodies;
        }

        /** Nothing more arrives for a while. */
        void quiet() throws InterruptedException {
            Delivery delivery = deliveries.poll(QUIET_MS, TimeUnit.MILLISECONDS);
            if (delivery != null) {
                throw new AssertionError("unexpected delivery of '" + text(delivery.getBody()) + "'");
            }
        }
    }

    static Inbox consume(Channel channel, String queue, boolean autoAck) throws IOException {
        Inbox inbox = new Inbox(channel);
        channel.basicConsume(queue, autoAck, inbox);
        return inbox;
    }

    // ----------------------------------------------------------------------------------------------- expectations

    static void equal(String what, Object expected, Object found) {
        if (!Objects.deepEquals(expected, found)) {
            throw new AssertionError(what + ": expected " + show(expected) + ", found " + show(found));
        }
    }

    private static String show(Object value) {
        return value instanceof byte[] bytes ? Arrays.toString(bytes) : String.valueOf(value);
    }

    /** {@code action} closes its channel with this code and text; another channel of the connection goes on. */
    static void refused(int code, String text, Body action) throws Exception {
        Channel bystander = channel();
        String queue = bystander.queueDeclare().getQueue();
        ShutdownSignalException signal = signalOf(channel(), action);
        equal("a connection-level error", false, signal.isHardError());
        AMQP.Channel.Close close = (AMQP.Channel.Close) signal.getReason();
        equal("reply", code + " " + text, close.getReplyCode() + " " + close.getReplyText());
        bystander.basicPublish("", queue, null, bytes("still here"));
        equal("another channel", "still here", text(bystander.basicGet(queue, true).getBody()));
        bystander.close();
    }

    /** {@code action} closes its whole connection with this code and text; the other connections go on. */
    static void ended(int code, String text, Body action) throws Exception {
        Connection victim = connect();
        ShutdownSignalException signal = signalOf(victim.createChannel(), action);
        equal("a connection-level error", true, signal.isHardError());
        AMQP.Connection.Close close = (AMQP.Connection.Close) signal.getReason();
        equal("reply", code + " " + text, close.getReplyCode() + " " + close.getReplyText());
        equal("the connection is open", false, victim.isOpen());
        equal("another connection is open", true, connection.isOpen());
        channel().close();
    }

    /** Why {@code action} closed the channel that it was given. */
    static ShutdownSignalException signalOf(Channel channel, Body action) throws Exception {
        CompletableFuture<ShutdownSignalException> shutdown = new CompletableFuture<>();
        channel.addShutdownListener(shutdown::complete);
        try {
            action.run(channel);
        } catch (AlreadyClosedException closed) {
            shutdown.complete(closed);
        } catch (IOException closed) {
            if (!(closed.getCause() instanceof ShutdownSignalException)) {
                throw closed;
            }
        }
        return shutdown.get(TIMEOUT_MS, TimeUnit.MILLISECONDS);
    }
}
