import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Delivery;
import com.rabbitmq.client.LongString;
import com.rabbitmq.client.impl.LongStringHelper;
import java.math.BigDecimal;
import java.util.Arrays;
import java.util.Date;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Exchanges of all kinds, field tables of all types and bodies of all sizes, seen by the Java client. */
final class Routing {
    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        exchanges();
        headers();
        deadHeaders();
        content();
        Checks.finish();
    }

    private static void exchanges() throws Exception {
        Checks.check("direct, fanout and topic exchanges route as they should", channel -> {
            String direct = Checks.exchange(channel, "direct");
            String fanout = Checks.exchange(channel, "fanout");
            String topic = Checks.exchange(channel, "topic");
            String queue = Checks.queue(channel);
            channel.queueBind(queue, direct, "k");
            channel.queueBind(queue, fanout, "ignored");
            channel.queueBind(queue, topic, "*.b.#");
            for (String exchange : List.of(direct, fanout, topic)) {
                for (String key : List.of("k", "a.b", "a.b.c.d", "b")) {
                    channel.basicPublish(exchange, key, null, Checks.bytes(key));
                }
            }
            Checks.awaitReady(queue, 7);
            Checks.equal("bodies", List.of("k", "k", "a.b", "a.b.c.d", "b", "a.b", "a.b.c.d"), Checks.drain(queue));
        });
        Checks.check("a message passes from exchange to exchange and reaches each queue once", channel -> {
            String first = Checks.exchange(channel, "topic");
            String second = Checks.exchange(channel, "fanout");
            String queue = Checks.queue(channel);
            channel.exchangeBind(second, first, "a.*");
            channel.exchangeBind(first, second, "#");
            channel.queueBind(queue, first, "#");
            channel.queueBind(queue, second, "");
            channel.basicPublish(first, "a.b", null, Checks.bytes("once"));
            Checks.awaitReady(queue, 1);
            Checks.equal("bodies", List.of("once"), Checks.drain(queue));
            channel.exchangeUnbind(second, first, "a.*");
            channel.queueUnbind(queue, first, "#");
            channel.basicPublish(first, "a.b", null, Checks.bytes("nowhere"));
            Checks.equal("after unbind", List.of(), Checks.drain(queue));
        });
        Checks.check("an alternate exchange takes what its exchange cannot route", channel -> {
            String alternate = Checks.exchange(channel, "fanout");
            String exchange = Checks.exchange(channel, "direct", Map.of("alternate-exchange", alternate));
            String queue = Checks.queue(channel);
            channel.queueBind(queue, alternate, "");
            channel.basicPublish(exchange, "unknown", true, null, Checks.bytes("a"));
            Checks.awaitReady(queue, 1);
        });
        Checks.check("an auto-delete exchange goes with its last binding", channel -> {
            String exchange = Checks.name();
            channel.exchangeDeclare(exchange, "fanout", false, true, Map.of());
            String queue = Checks.queue(channel);
            channel.queueBind(queue, exchange, "");
            channel.queueUnbind(queue, exchange, "");
            Checks.refused(404, "NOT_FOUND - no exchange '" + exchange + "' in vhost '/'", other -> other.exchangeDeclarePassive(exchange));
        });
    }

    private static void headers() throws Exception {
        Checks.check("a headers exchange compares typed values, all or any", channel -> {
            String exchange = Checks.exchange(channel, "headers");
            String all = Checks.queue(channel);
            String any = Checks.queue(channel);
            Map<String, Object> values = Map.of("number", 7, "text", "t", "flag", true, "big", 1L << 40);
            channel.queueBind(all, exchange, "", with(values, "x-match", "all"));
            channel.queueBind(any, exchange, "", with(values, "x-match", "any"));
            headersOnly(channel, exchange, "complete", values);
            headersOnly(channel, exchange, "more", with(values, "other", 1));
            headersOnly(channel, exchange, "one", Map.of("flag", true));
            headersOnly(channel, exchange, "other value", with(values, "number", 8));
            headersOnly(channel, exchange, "no match", Map.of("number", "7", "flag", false));
            headersOnly(channel, exchange, "none", Map.of());
            Checks.awaitReady(any, 4);
            Checks.equal("all", List.of("complete", "more"), Checks.drain(all));
            Checks.equal("any", List.of("complete", "more", "one", "other value"), Checks.drain(any));
        });
        Checks.check("a headers binding without a value asks only for the header", channel -> {
            String exchange = Checks.exchange(channel, "headers");
            String queue = Checks.queue(channel);
            Map<String, Object> values = new HashMap<>();
            values.put("present", null);
            channel.queueBind(queue, exchange, "", values);
            headersOnly(channel, exchange, "yes", Map.of("present", 5));
            headersOnly(channel, exchange, "no", Map.of("absent", 5));
            Checks.awaitReady(queue, 1);
            Checks.equal("bodies", List.of("yes"), Checks.drain(queue));
        });
        Checks.check("field tables of all types come back as they were", channel -> {
            Map<String, Object> sent = everyType();
            sent.put("nested", everyType());
            sent.put("array", Arrays.asList(1, LongStringHelper.asLongString("two"), 3.0, null, everyType(), List.of()));
            String queue = Checks.queue(channel);
            channel.basicPublish("", queue, new AMQP.BasicProperties.Builder().headers(sent).build(), Checks.bytes("a"));
            Map<String, Object> found = Checks.consume(channel, queue, true).next().getProperties().getHeaders();
            Checks.equal("names", sent.keySet(), found.keySet());
            sent.forEach((name, value) -> same(name, value, found.get(name)));
        });
    }

    private static void deadHeaders() throws Exception {
        Checks.check("field tables of all types are dead-lettered as they were", channel -> {
            Map<String, Object> sent = everyType();
            sent.put("nested", everyType());
            String dead = Checks.queue(channel);
            String queue = Checks.queue(channel, Map.of("x-dead-letter-exchange", "", "x-dead-letter-routing-key", dead));
            channel.basicPublish("", queue, new AMQP.BasicProperties.Builder().headers(sent).build(), Checks.bytes("a"));
            channel.basicReject(channel.basicGet(queue, false).getEnvelope().getDeliveryTag(), false);
            Map<String, Object> found = Checks.consume(channel, dead, true).next().getProperties().getHeaders();
            sent.forEach((name, value) -> same(name, value, found.get(name)));
        });
    }

    private static Map<String, Object> with(Map<String, Object> values, String name, Object value) {
        Map<String, Object> more = new HashMap<>(values);
        more.put(name, value);
        return more;
    }

    private static void headersOnly(Channel channel, String exchange, String body, Map<String, Object> headers) throws Exception {
        channel.basicPublish(exchange, "", new AMQP.BasicProperties.Builder().headers(headers).build(), Checks.bytes(body));
    }

    private static Map<String, Object> everyType() {
        Map<String, Object> table = new LinkedHashMap<>();
        table.put("bool", true);
        table.put("byte", (byte) -128);
        table.put("short", Short.MIN_VALUE);
        table.put("int", Integer.MIN_VALUE);
        table.put("long", Long.MIN_VALUE);
        table.put("float", 1.5f);
        table.put("double", -0.1);
        table.put("decimal", new BigDecimal("123456.789"));
        table.put("string", LongStringHelper.asLongString("übergroß ✓"));
        table.put("bytes", new byte[] {0, (byte) 0xff, (byte) 0x80});
        table.put("timestamp", new Date(1_700_000_000_000L));
        table.put("void", null);
        table.put("", LongStringHelper.asLongString(""));
        return table;
    }

    /** Equal, and of the same field type. */
    private static void same(String name, Object sent, Object found) {
        if (sent instanceof Map<?, ?> table) {
            Map<?, ?> other = (Map<?, ?>) found;
            Checks.equal(name, table.keySet(), other.keySet());
            table.forEach((inner, value) -> same(name + "." + inner, value, other.get(inner)));
        } else if (sent instanceof List<?> list) {
            Checks.equal(name, list.size(), ((List<?>) found).size());
            for (int i = 0; i < list.size(); i++) {
                same(name + "[" + i + "]", list.get(i), ((List<?>) found).get(i));
            }
        } else {
            Checks.equal(name, sent instanceof LongString ? sent.toString() : sent, found instanceof LongString ? found.toString() : found);
            Checks.equal(name + " is a string", sent instanceof LongString, found instanceof LongString);
        }
    }

    private static void content() throws Exception {
        Checks.check("all properties come back as they were", channel -> {
            AMQP.BasicProperties sent = new AMQP.BasicProperties.Builder()
                .contentType("text/plain").contentEncoding("identity").headers(Map.of("h", 1)).deliveryMode(2).priority(3)
                .correlationId("c")
                .replyTo("r").expiration("60000").messageId("m").timestamp(new Date(1_700_000_000_000L)).type("t")
                .userId("guest").appId("a")
                .clusterId("cl").build();
            String queue = Checks.queue(channel);
            Checks.Inbox inbox = Checks.consume(channel, queue, true);
            channel.basicPublish("", queue, sent, Checks.bytes("a"));
            Delivery delivery = inbox.next();
            Checks.equal("properties", sent, delivery.getProperties());
            Checks.equal("routing key", queue, delivery.getEnvelope().getRoutingKey());
            Checks.equal("exchange", "", delivery.getEnvelope().getExchange());
            channel.basicPublish("", queue, new AMQP.BasicProperties(), new byte[0]);
            Checks.equal("no properties", new AMQP.BasicProperties(), inbox.next().getProperties());
        });
        Checks.check("bodies from nothing to 20 MB come back as they were", channel -> {
            int frame = channel.getConnection().getFrameMax();
            String queue = Checks.queue(channel);
            Checks.Inbox inbox = Checks.consume(channel, queue, true);
            for (int size : List.of(0, 1, 255, frame - 9, frame - 8, frame - 7, frame, 3 * (frame - 8), 20_000_000)) {
                byte[] body = new byte[size];
                new Random(size).nextBytes(body);
                channel.basicPublish("", queue, Checks.PERSISTENT, body);
                byte[] found = inbox.next().getBody();
                Checks.equal("size", size, found.length);
                Checks.equal("body of " + size + " bytes is the same", true, Arrays.equals(body, found));
            }
        });
        Checks.check("small frames are kept to where the client asks for them", done -> {
            var factory = Checks.factory();
            factory.setRequestedFrameMax(4096);
            try (var connection = factory.newConnection()) {
                Checks.equal("frame max", 4096, connection.getFrameMax());
                Channel channel = connection.createChannel();
                String queue = channel.queueDeclare().getQueue();
                byte[] body = new byte[100_000];
                new Random(1).nextBytes(body);
                channel.basicPublish("", queue, null, body);
                Checks.equal("body", true, Arrays.equals(body, Checks.consume(channel, queue, true).next().getBody()));
            }
        });
    }
}
