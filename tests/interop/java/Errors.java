import com.rabbitmq.client.AuthenticationFailureException;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.ShutdownSignalException;
import com.rabbitmq.client.AMQP;
import java.io.IOException;
import java.util.Map;

/** Reply codes and texts of refusals, and what stays open after them, seen by the Java client. */
final class Errors {
    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        missing();
        forbidden();
        locked();
        preconditions();
        connections();
        Checks.finish();
    }

    private static void missing() throws Exception {
        String queue = "NOT_FOUND - no queue 'java-missing' in vhost '/'";
        String exchange = "NOT_FOUND - no exchange 'java-missing' in vhost '/'";
        Checks.check("a passive declare of a missing queue is 404", done ->
            Checks.refused(404, queue, channel -> channel.queueDeclarePassive("java-missing")));
        Checks.check("a passive declare of a missing exchange is 404", done ->
            Checks.refused(404, exchange, channel -> channel.exchangeDeclarePassive("java-missing")));
        Checks.check("consuming from a missing queue is 404", done ->
            Checks.refused(404, queue, channel -> Checks.consume(channel, "java-missing", true)));
        Checks.check("getting from a missing queue is 404", done ->
            Checks.refused(404, queue, channel -> channel.basicGet("java-missing", true)));
        Checks.check("purging a missing queue is 404", done -> Checks.refused(404, queue, channel -> channel.queuePurge("java-missing")));
        Checks.check("binding a missing queue is 404", done ->
            Checks.refused(404, queue, channel -> channel.queueBind("java-missing", "amq.direct", "k")));
        Checks.check("binding to a missing exchange is 404", done -> {
            Checks.refused(404, exchange, channel -> channel.queueBind(Checks.queue(channel), "java-missing", "k"));
        });
        Checks.check("publishing to a missing exchange is 404", done -> {
            Checks.refused(404, exchange, channel -> channel.basicPublish("java-missing", "k", null, Checks.bytes("a")));
        });
        Checks.check("deleting what is missing is no error", channel -> {
            Checks.equal("messages", 0, channel.queueDelete("java-missing").getMessageCount());
            channel.exchangeDelete("java-missing");
            channel.queueUnbind(Checks.queue(channel), "amq.direct", "never bound");
        });
    }

    private static void forbidden() throws Exception {
        Checks.check("declaring a reserved exchange name is 403", done -> {
            String text = "ACCESS_REFUSED - exchange name 'amq.java' contains reserved prefix 'amq.*'";
            Checks.refused(403, text, channel -> channel.exchangeDeclare("amq.java", "direct"));
        });
        Checks.check("declaring a reserved queue name is 403", done -> {
            String text = "ACCESS_REFUSED - queue name 'amq.java' contains reserved prefix 'amq.*'";
            Checks.refused(403, text, channel -> channel.queueDeclare("amq.java", false, false, false, Map.of()));
        });
        String operation = "ACCESS_REFUSED - operation not permitted on the default exchange";
        Checks.check("binding to the default exchange is 403", done -> {
            Checks.refused(403, operation, channel -> channel.queueBind(Checks.queue(channel), "", "k"));
        });
        Checks.check("deleting the default exchange is 403", done -> Checks.refused(403, operation, channel -> channel.exchangeDelete("")));
        Checks.check("deleting a predeclared exchange is 403", done -> {
            Checks.refused(403, "ACCESS_REFUSED - deletion of system exchange 'amq.direct' in vhost '/' not allowed",
                channel -> channel.exchangeDelete("amq.direct"));
        });
        Checks.check("publishing to an internal exchange is 403", done -> {
            String exchange = Checks.name();
            Checks.refused(403, "ACCESS_REFUSED - cannot publish to internal exchange '" + exchange + "' in vhost '/'", channel -> {
                channel.exchangeDeclare(exchange, "fanout", false, true, true, Map.of());
                channel.basicPublish(exchange, "", null, Checks.bytes("a"));
            });
            Checks.channel().exchangeDelete(exchange);
        });
    }

    private static void locked() throws Exception {
        Checks.check("another connection's exclusive queue is 405", done -> {
            try (Connection owner = Checks.connect()) {
                String queue = owner.createChannel().queueDeclare().getQueue();
                String text = "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '" + queue + "' in vhost '/'. It could be "
                    + "originally declared on another connection or the exclusive property value does not match that of the original declaration.";
                Checks.refused(405, text, channel -> channel.queueDeclarePassive(queue));
                Checks.refused(405, text, channel -> Checks.consume(channel, queue, true));
                Checks.refused(405, text, channel -> channel.basicGet(queue, true));
                Checks.refused(405, text, channel -> channel.queueDelete(queue));
                Checks.refused(405, text, channel -> channel.queuePurge(queue));
                Checks.refused(405, text, channel -> channel.queueBind(queue, "amq.direct", "k"));
            }
        });
    }

    private static void preconditions() throws Exception {
        Checks.check("declaring a queue again with another attribute is 406", done -> {
            String queue = Checks.queue(Checks.channel());
            String text =
                "PRECONDITION_FAILED - inequivalent arg 'durable' for queue '" + queue + "' in vhost '/': "
                + "received 'false' but current is 'true'";
            Checks.refused(406, text, channel -> channel.queueDeclare(queue, false, false, false, Map.of()));
        });
        Checks.check("declaring a queue again with another argument is 406", done -> {
            String queue = Checks.queue(Checks.channel(), Map.of("x-max-length", 5));
            String text = "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue '" + queue + "' in vhost '/': ";
            Checks.refused(406, text + "received '6' but current is '5'",
                channel -> channel.queueDeclare(queue, true, false, false, Map.of("x-max-length", 6)));
            Checks.refused(406, text + "received none but current is the value '5' of type 'signedint'", channel -> {
                channel.queueDeclare(queue, true, false, false, Map.of());
            });
        });
        Checks.check("declaring an exchange again with another type is 406", done -> {
            String exchange = Checks.exchange(Checks.channel(), "fanout");
            String text =
                "PRECONDITION_FAILED - inequivalent arg 'type' for exchange '" + exchange + "' in vhost '/': "
                + "received 'topic' but current is 'fanout'";
            Checks.refused(406, text, channel -> channel.exchangeDeclare(exchange, "topic", true));
        });
        Checks.check("deleting a queue with messages if-empty is 406", done -> {
            String queue = Checks.queue(Checks.channel());
            Checks.publish(Checks.channel(), queue, "a");
            Checks.awaitReady(queue, 1);
            Checks.refused(406, "PRECONDITION_FAILED - queue '" + queue + "' in vhost '/' not empty",
                channel -> channel.queueDelete(queue, false, true));
        });
        Checks.check("deleting a queue with consumers if-unused is 406", consuming -> {
            String queue = Checks.queue(consuming);
            Checks.consume(consuming, queue, true);
            Checks.refused(406, "PRECONDITION_FAILED - queue '" + queue + "' in vhost '/' in use",
                channel -> channel.queueDelete(queue, true, false));
        });
        Checks.check("deleting an exchange with bindings if-unused is 406", done -> {
            Channel channel = Checks.channel();
            String exchange = Checks.exchange(channel, "fanout");
            channel.queueBind(Checks.queue(channel), exchange, "");
            Checks.refused(406, "PRECONDITION_FAILED - exchange '" + exchange + "' in vhost '/' in use",
                other -> other.exchangeDelete(exchange, true));
        });
        Checks.check("an unknown delivery tag is 406", done -> {
            Checks.refused(406, "PRECONDITION_FAILED - unknown delivery tag 7", channel -> channel.basicAck(7, false));
            Checks.refused(406, "PRECONDITION_FAILED - unknown delivery tag 7", channel -> channel.basicNack(7, true, true));
            Checks.refused(406, "PRECONDITION_FAILED - unknown delivery tag 7", channel -> channel.basicReject(7, true));
        });
        Checks.check("another user's name in user-id is 406", done -> {
            String text = "PRECONDITION_FAILED - user_id property set to 'somebody' but authenticated user was 'guest'";
            AMQP.BasicProperties properties = new AMQP.BasicProperties.Builder().userId("somebody").build();
            Checks.refused(406, text, channel -> channel.basicPublish("", Checks.queue(channel), properties, Checks.bytes("a")));
        });
        Checks.check("an expiration that is no number is 406", done -> {
            AMQP.BasicProperties properties = new AMQP.BasicProperties.Builder().expiration("soon").build();
            Checks.refused(406, "PRECONDITION_FAILED - invalid expiration 'soon': no_integer", channel -> {
                channel.basicPublish("", Checks.queue(channel), properties, Checks.bytes("a"));
            });
        });
        Checks.check("a channel number is usable again after its channel was closed", done -> {
            Channel closed = Checks.connect().createChannel(5);
            try {
                closed.queueDeclarePassive("java-missing");
            } catch (IOException expected) {
                Checks.equal("open", false, closed.isOpen());
            }
            Channel again = closed.getConnection().createChannel(5);
            again.queueDeclare();
            again.getConnection().close();
        });
    }

    private static void connections() throws Exception {
        Checks.check("an unknown exchange type ends the connection with 503", done -> {
            Checks.ended(503, "COMMAND_INVALID - unknown exchange type 'x-nonsense'",
                channel -> channel.exchangeDeclare(Checks.name(), "x-nonsense"));
        });
        Checks.check("a consumer tag used twice ends the connection with 530", done -> {
            Checks.ended(530, "NOT_ALLOWED - attempt to reuse consumer tag 'twice'", channel -> {
                String queue = channel.queueDeclare().getQueue();
                channel.basicConsume(queue, true, "twice", new Checks.Inbox(channel));
                channel.basicConsume(queue, true, "twice", new Checks.Inbox(channel));
            });
        });
        Checks.check("immediate ends the connection with 540", done -> {
            Checks.ended(540, "NOT_IMPLEMENTED - immediate=true",
                channel -> channel.basicPublish("", "q", false, true, null, Checks.bytes("a")));
        });
        Checks.check("recover without requeue ends the connection with 540", done -> {
            Checks.ended(540, "NOT_IMPLEMENTED - requeue=false", channel -> channel.basicRecover(false));
        });
        Checks.check("prefetch size ends the connection with 540", done -> {
            Checks.ended(540, "NOT_IMPLEMENTED - prefetch_size!=0 (10)", channel -> channel.basicQos(10, 1, false));
        });
        Checks.check("a wrong password is refused", done -> {
            ConnectionFactory factory = Checks.factory();
            factory.setPassword("wrong");
            try {
                factory.newConnection().abort();
                throw new AssertionError("a wrong password was accepted");
            } catch (AuthenticationFailureException refused) {
                String text =
                    "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the broker logfile.";
                Checks.equal("text", text, refused.getMessage());
            }
        });
        Checks.check("an unknown virtual host is 530", done -> {
            ConnectionFactory factory = Checks.factory();
            factory.setVirtualHost("nowhere");
            try {
                factory.newConnection().abort();
                throw new AssertionError("an unknown virtual host was opened");
            } catch (IOException refused) {
                AMQP.Connection.Close close = (AMQP.Connection.Close) ((ShutdownSignalException) refused.getCause()).getReason();
                Checks.equal("reply", "530 NOT_ALLOWED - vhost nowhere not found", close.getReplyCode() + " " + close.getReplyText());
            }
        });
    }
}
