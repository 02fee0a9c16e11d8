import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.DefaultConsumer;
import com.rabbitmq.client.Envelope;
import com.rabbitmq.client.MessageProperties;
import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Arrays;
import java.util.Map;
import java.util.Scanner;
import java.util.UUID;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/**
 * The loads that RabbitMQ's PerfTest does not have: a transactional relay, and the time of every commit.
 *
 *   relay URI CHANNELS BATCH ACKS WARM_S MEASURED_S     prints "processor CORES rate MESSAGES_PER_S"; ACKS is "each" or "multiple"
 *   commits URI CHANNELS WARM_S MEASURED_S              prints "processor CORES commits COUNT p50 US p99 US"
 *   open URI MESSAGES                                   prints "processor CORES rate MESSAGES_PER_S" of one transaction, commit-ok included
 *   turns URI URI ACKNOWLEDGED MESSAGES                 for each line of its input, 0 or 1, sends MESSAGES on that connection, then prints
 *                                                       "done"; ACKNOWLEDGED is "tx", in hundreds, or "confirms", and then it consumes them too, or
 *                                                       "ids": confirms of messages with an id each, on connection 0 to a queue that drops duplicates
 *   delete URI QUEUE...                                 prints nothing
 *
 * "processor" is what this program itself used, so that a figure that it holds back shows.
 * One connection, one thread per channel, persistent messages of 100 bytes, durable queues. It ends with status 1 and the first failure.
 * The relay goes from one queue to another and, in half of the channels, back: it never runs dry, and the number of messages stays the same.
 */
public final class AmqpLoad {
    static final byte[] BODY = new byte[100];
    static final String[] ENDS = {"relay.a", "relay.b"};
    static final int RELAYED = 20_000;
    static final int COMMITS_KEPT = 4_000_000;

    interface Work {
        void run(int number) throws Exception;
    }

    static volatile boolean measuring, stopped;
    static final OperatingSystemMXBean processor = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    static final AtomicReference<Exception> failure = new AtomicReference<>();

    public static void main(String[] arguments) throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(arguments[1]);
        factory.setAutomaticRecoveryEnabled(false);
        try (Connection connection = factory.newConnection()) {
            switch (arguments[0]) {
                case "relay" -> relay(connection, number(arguments[2]), number(arguments[3]), arguments[4].equals("multiple"),
                        number(arguments[5]), number(arguments[6]));
                case "commits" -> commits(connection, number(arguments[2]), number(arguments[3]), number(arguments[4]));
                case "open" -> open(connection, number(arguments[2]));
                case "turns" -> turns(factory, connection, arguments[2], arguments[3], number(arguments[4]));
                case "delete" -> delete(connection, Arrays.copyOfRange(arguments, 2, arguments.length));
                default -> throw new IllegalArgumentException("no load '" + arguments[0] + "': relay, commits, open, turns or delete");
            }
        }
    }

    static int number(String text) {
        return Integer.parseInt(text);
    }

    static void delete(Connection connection, String... queues) throws Exception {
        try (Channel channel = connection.createChannel()) {
            for (String queue : queues) {
                channel.queueDelete(queue);
            }
        }
    }

    static void turns(ConnectionFactory factory, Connection first, String other, String acknowledged, int messages) throws Exception {
        factory.setUri(other);
        try (Connection second = factory.newConnection(); Scanner turns = new Scanner(System.in)) {
            Turns[] sides = {new Turns(first, acknowledged, acknowledged.equals("ids")), new Turns(second, acknowledged, false)};
            while (turns.hasNextInt()) {
                sides[turns.nextInt()].send(messages);
                System.out.println("done");
            }
        }
    }

    /** One user of the load "turns": a channel, and without transactions another one that consumes. */
    static final class Turns {
        static final int WINDOW = 1000;
        static final String EXCHANGE = "direct";
        final Channel channel, consuming;
        final String queue;
        final boolean tx, ids;
        final Semaphore left = new Semaphore(0);

        Turns(Connection connection, String acknowledged, boolean once) throws Exception {
            tx = acknowledged.equals("tx");
            ids = acknowledged.equals("ids");
            queue = once ? "once" : "bench";
            channel = connection.createChannel();
            consuming = connection.createChannel();
            consuming.basicQos(WINDOW);
            channel.exchangeDeclare(EXCHANGE, "direct", true);
            channel.queueDeclare(queue, true, false, false, once ? Map.of("x-message-deduplication", true, "x-cache-size", 10_000) : null);
            channel.queueBind(queue, EXCHANGE, queue);
            if (tx) {
                channel.txSelect();
            } else {
                channel.confirmSelect();
            }
        }

        void send(int messages) throws Exception {
            String tag = tx ? null : consuming.basicConsume(queue, false, new DefaultConsumer(consuming) {
                @Override
                public void handleDelivery(String tag, Envelope envelope, AMQP.BasicProperties properties, byte[] body)
                        throws java.io.IOException {
                    consuming.basicAck(envelope.getDeliveryTag(), false);
                    left.release();
                }
            });
            for (int sent = 1; sent <= messages; sent++) {
                AMQP.BasicProperties properties = MessageProperties.PERSISTENT_BASIC;
                channel.basicPublish(EXCHANGE, queue, ids ? properties.builder().messageId(UUID.randomUUID().toString()).build() : properties, BODY);
                if (tx && sent % 100 == 0) {
                    channel.txCommit();
                } else if (!tx && sent % WINDOW == 0) {
                    channel.waitForConfirmsOrDie();
                }
            }
            if (tx) {
                channel.queuePurge(queue);
            } else {
                left.acquire(messages);
                consuming.basicCancel(tag);
            }
        }
    }

    static void fill(Connection connection, String queue, int count) throws Exception {
        try (Channel channel = connection.createChannel()) {
            channel.queueDeclare(queue, true, false, false, null);
            channel.txSelect();
            for (int sent = 0; sent < count; sent++) {
                channel.basicPublish("", queue, MessageProperties.PERSISTENT_BASIC, BODY);
            }
            channel.txCommit();
        }
    }

    /** Runs a thread per channel; returns the seconds of the measured part, of which the flag {@code measuring} tells them. */
    static double timed(int channels, int warm, int measured, Work work) throws Exception {
        Thread[] threads = new Thread[channels];
        for (int each = 0; each < channels; each++) {
            int number = each;
            threads[each] = new Thread(() -> {
                try {
                    work.run(number);
                } catch (Exception error) {
                    failure.compareAndSet(null, error);
                }
            });
            threads[each].start();
        }
        Thread.sleep(warm * 1000L);
        long started = System.nanoTime();
        long used = processor.getProcessCpuTime();
        measuring = true;
        Thread.sleep(measured * 1000L);
        measuring = false;
        double seconds = (System.nanoTime() - started) / 1e9;
        System.out.println("processor " + (processor.getProcessCpuTime() - used) / 1e9 / seconds);
        stopped = true;
        for (Thread thread : threads) {
            thread.join();
        }
        if (failure.get() != null) {
            throw failure.get();
        }
        return seconds;
    }

    static void relay(Connection connection, int channels, int batch, boolean multiple, int warm, int measured) throws Exception {
        for (String queue : ENDS) {
            fill(connection, queue, RELAYED / ENDS.length);
        }
        long[] counts = new long[channels];
        double seconds = timed(channels, warm, measured, number -> {
            String from = ENDS[number % 2];
            String to = ENDS[(number + 1) % 2];
            try (Channel channel = connection.createChannel()) {
                BlockingQueue<Delivered> arrived = new ArrayBlockingQueue<>(4 * batch);
                channel.basicQos(3 * batch);
                channel.txSelect();
                channel.basicConsume(from, false, new Arrivals(channel, arrived));
                while (true) {
                    long last = 0;
                    for (int each = 0; each < batch; each++) {
                        Delivered delivered = null;
                        while (delivered == null && !stopped) {
                            delivered = arrived.poll(50, TimeUnit.MILLISECONDS);
                        }
                        if (delivered == null) {
                            return;
                        }
                        channel.basicPublish("", to, MessageProperties.PERSISTENT_BASIC, delivered.body);
                        last = delivered.tag;
                        if (!multiple) {
                            channel.basicAck(last, false);
                        }
                    }
                    if (multiple) {
                        channel.basicAck(last, true);
                    }
                    channel.txCommit();
                    if (measuring) {
                        counts[number] += batch;
                    }
                }
            }
        });
        delete(connection, ENDS);
        System.out.println("rate " + Arrays.stream(counts).sum() / seconds);
    }

    record Delivered(long tag, byte[] body) {}

    static final class Arrivals extends DefaultConsumer {
        private final BlockingQueue<Delivered> arrived;

        Arrivals(Channel channel, BlockingQueue<Delivered> arrived) {
            super(channel);
            this.arrived = arrived;
        }

        @Override
        public void handleDelivery(String tag, Envelope envelope, AMQP.BasicProperties properties, byte[] body) {
            arrived.add(new Delivered(envelope.getDeliveryTag(), body)); // the prefetch is the bound: more than that is an error
        }
    }

    /** The queue has a maximum length and the first message is transient: a broker may treat such a transaction in a way of its own. */
    static void open(Connection connection, int messages) throws Exception {
        String queue = "open";
        try (Channel channel = connection.createChannel()) {
            channel.queueDeclare(queue, true, false, false, Map.of("x-max-length", 10 * messages));
            channel.txSelect();
            for (int size : new int[] {messages / 10, messages / 10, messages}) {
                long started = System.nanoTime();
                long used = processor.getProcessCpuTime();
                channel.basicPublish("", queue, MessageProperties.BASIC, BODY);
                for (int sent = 1; sent < size; sent++) {
                    channel.basicPublish("", queue, MessageProperties.PERSISTENT_BASIC, BODY);
                }
                channel.txCommit();
                double seconds = (System.nanoTime() - started) / 1e9;
                if (size == messages) {
                    System.out.println("processor " + (processor.getProcessCpuTime() - used) / 1e9 / seconds);
                    System.out.println("rate " + messages / seconds);
                }
                channel.queuePurge(queue);
            }
        }
        delete(connection, queue);
    }

    static void commits(Connection connection, int channels, int warm, int measured) throws Exception {
        String queue = "commits";
        fill(connection, queue, 0);
        int[][] times = new int[channels][COMMITS_KEPT / channels];
        int[] counts = new int[channels];
        timed(channels, warm, measured, number -> {
            try (Channel channel = connection.createChannel()) {
                channel.txSelect();
                while (!stopped) {
                    channel.basicPublish("", queue, MessageProperties.PERSISTENT_BASIC, BODY);
                    long started = System.nanoTime();
                    channel.txCommit();
                    if (measuring) {
                        times[number][counts[number]++] = (int) Math.min(Integer.MAX_VALUE, System.nanoTime() - started);
                    }
                }
            }
        });
        delete(connection, queue);
        int[] all = new int[Arrays.stream(counts).sum()];
        int filled = 0;
        for (int each = 0; each < channels; each++) {
            System.arraycopy(times[each], 0, all, filled, counts[each]);
            filled += counts[each];
        }
        Arrays.sort(all);
        System.out.println("commits " + all.length + " p50 " + all[all.length / 2] / 1000.0 + " p99 " + all[all.length * 99 / 100] / 1000.0);
    }
}
