import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.*;

/** Kafka's own client: {@code send BOOTSTRAP TOPIC COMPRESSION COUNT} in one transaction after an aborted one, {@code receive BOOTSTRAP TOPIC COUNT}. */
public class Client {
    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("send")) {
            send(arguments[1], arguments[2], arguments[3], Integer.parseInt(arguments[4]));
        } else {
            receive(arguments[1], arguments[2], Integer.parseInt(arguments[3]));
        }
    }

    static void send(String bootstrap, String topic, String compression, int count) throws Exception {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("compression.type", compression);
        settings.put("transactional.id", "java-" + topic);
        settings.put("linger.ms", "20");
        try (Producer<byte[], byte[]> producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            producer.initTransactions();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, bytes("aborted"), bytes("aborted"))).get();
            producer.abortTransaction();
            producer.beginTransaction();
            for (int number = 0; number < count; number++) {
                byte[] value = number % 10 == 9 ? null : bytes("java " + number);
                ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(topic, null, bytes("key " + number % 7), value);
                record.headers().add("origin", bytes("java"));
                record.headers().add("txmq.content_type", bytes("text/plain"));
                producer.send(record);
            }
            producer.commitTransaction();
        }
    }

    static void receive(String bootstrap, String topic, int count) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("isolation.level", "read_committed");
        try (Consumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            List<TopicPartition> logs = new ArrayList<>();
            consumer.partitionsFor(topic).forEach(found -> logs.add(new TopicPartition(topic, found.partition())));
            consumer.assign(logs);
            consumer.seekToBeginning(logs);
            int found = 0;
            while (found < count) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(1))) {
                    found++;
                    StringBuilder line = new StringBuilder(text(record.key()) + "\t" + text(record.value()));
                    for (Header header : record.headers()) {
                        line.append("\t").append(header.key()).append("=").append(text(header.value()));
                    }
                    System.out.println(line);
                }
            }
        }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] bytes) {
        return bytes == null ? "null" : new String(bytes, StandardCharsets.UTF_8);
    }
}
