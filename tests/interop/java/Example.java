import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.MessageProperties;

/** Consumes ten orders, publishes an invoice for each, and commits both in one transaction. */
public final class Example {
    public static void main(String[] arguments) throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(arguments.length > 0 ? arguments[0] : "amqp://guest:guest@127.0.0.1:5672");
        try (Connection connection = factory.newConnection(); Channel channel = connection.createChannel()) {
            channel.queueDeclare("orders", true, false, false, null);
            channel.queueDeclare("invoices", true, false, false, null);
            channel.txSelect();

            for (int number = 1; number <= 10; number++) {
                channel.basicPublish("", "orders", MessageProperties.PERSISTENT_BASIC, ("order " + number).getBytes());
            }
            channel.txCommit(); // ten orders become visible at once

            GetResponse order;
            while ((order = channel.basicGet("orders", false)) != null) {
                String invoice = "invoice for " + new String(order.getBody());
                channel.basicPublish("", "invoices", MessageProperties.PERSISTENT_BASIC, invoice.getBytes());
                channel.basicAck(order.getEnvelope().getDeliveryTag(), false);
            }
            channel.txCommit(); // the orders are consumed and the invoices published: both or neither
            System.out.println(channel.messageCount("orders") + " orders, " + channel.messageCount("invoices") + " invoices");
        }
    }
}
