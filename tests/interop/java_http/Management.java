import com.rabbitmq.http.client.Client;
import com.rabbitmq.http.client.ClientParameters;
import com.rabbitmq.http.client.GetAckMode;
import com.rabbitmq.http.client.GetEncoding;
import com.rabbitmq.http.client.HttpClientException;
import com.rabbitmq.http.client.domain.BindingInfo;
import com.rabbitmq.http.client.domain.ChannelInfo;
import com.rabbitmq.http.client.domain.ConnectionInfo;
import com.rabbitmq.http.client.domain.ConsumerDetails;
import com.rabbitmq.http.client.domain.Definitions;
import com.rabbitmq.http.client.domain.DeleteQueueParameters;
import com.rabbitmq.http.client.domain.DestinationType;
import com.rabbitmq.http.client.domain.DetailsParameters;
import com.rabbitmq.http.client.domain.ExchangeInfo;
import com.rabbitmq.http.client.domain.InboundMessage;
import com.rabbitmq.http.client.domain.NodeInfo;
import com.rabbitmq.http.client.domain.OutboundMessage;
import com.rabbitmq.http.client.domain.OverviewResponse;
import com.rabbitmq.http.client.domain.Page;
import com.rabbitmq.http.client.domain.QueryParameters;
import com.rabbitmq.http.client.domain.QueueInfo;
import com.rabbitmq.http.client.domain.TopicPermissions;
import com.rabbitmq.http.client.domain.UserInfo;
import com.rabbitmq.http.client.domain.UserPermissions;
import com.rabbitmq.http.client.domain.VhostInfo;
import com.rabbitmq.http.client.domain.VhostLimits;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Objects;

/**
 * The Java client of RabbitMQ's management API, against the HTTP listener: one line for each check, {@code ok NAME} or
 * {@code FAILED NAME: why}.
 *
 * Arguments: the url with a path of {@code /api/}, an administrator and a password. The test keeps an AMQP connection
 * of the name {@code watched} open, with a transactional channel and a consumer of the queue {@code consumed}.
 */
public final class Management {
    interface Body {
        void run() throws Exception;
    }

    private static final String HERE = "/";
    private static boolean failed;

    static void check(String name, Body body) {
        try {
            body.run();
            System.out.println("ok " + name);
        } catch (Throwable error) {
            failed = true;
            System.out.println("FAILED " + name + ": " + String.valueOf(error).replace('\n', ' '));
            error.printStackTrace();
        }
    }

    static void equal(Object expected, Object found) {
        if (!Objects.equals(expected, found)) {
            throw new AssertionError("expected " + expected + ", found " + found);
        }
    }

    static void status(int expected, Body body) throws Exception {
        try {
            body.run();
        } catch (HttpClientException refused) {
            equal(expected, refused.status());
            return;
        }
        throw new AssertionError("nothing was refused, expected " + expected);
    }

    public static void main(String[] arguments) throws Exception {
        Client client = new Client(new ClientParameters().url(arguments[0]).username(arguments[1]).password(arguments[2]));

        check("the overview names the product, the listeners and the totals", () -> {
            OverviewResponse overview = client.getOverview();
            equal("3.10", overview.getRabbitMQVersion().substring(0, 4));
            equal(false, overview.getListeners().isEmpty());
            equal(true, overview.getObjectTotals().getQueues() >= 1);
            equal(true, overview.getExchangeTypes().size() >= 4);
            equal(overview.getClusterName(), client.getClusterName().getName());
        });

        check("who asks is an administrator", () -> {
            equal(arguments[1], client.whoAmI().getName());
            equal(true, client.whoAmI().getTags().contains("administrator"));
        });

        check("the node runs, and one name leads to it", () -> {
            List<NodeInfo> nodes = client.getNodes();
            equal(1, nodes.size());
            NodeInfo node = client.getNode(nodes.get(0).getName());
            equal(true, node.isRunning());
            equal(false, node.isMemoryAlarmActive());
            equal(true, node.getMemoryLimit() > 0 && node.getUptime() >= 0);
        });

        check("every virtual host is alive", () -> equal(true, client.alivenessTest(HERE)));

        check("an open connection, its channel and its consumer are listed", () -> {
            ConnectionInfo connection = null;
            for (ConnectionInfo each : client.getConnections()) {
                if ("watched".equals(each.getClientProperties().getConnectionName())) {
                    connection = each;
                }
            }
            equal(connection.getName(), client.getConnection(connection.getName()).getName());
            equal(HERE, connection.getVhost());
            equal(false, connection.isUsesTLS());
            equal(1, client.getConnections(new QueryParameters().pagination().pageSize(100).query()).getItemCount());
            equal(1, client.getConnectionsOfUser(connection.getUser()).size());

            List<ChannelInfo> channels = client.getChannels(connection.getName());
            equal(1, channels.size());
            ChannelInfo channel = client.getChannel(channels.get(0).getName());
            equal(true, channel.isTransactional());
            equal(false, channel.usesPublisherConfirms());
            equal(1, channel.getConsumerCount());
            equal(1, client.getChannels().size());

            ConsumerDetails consumer = client.getConsumers(HERE).get(0);
            equal("consumed", consumer.getQueueDetails().getName());
            equal(true, consumer.isAckRequired());
            equal(channel.getName(), consumer.getChannelDetails().getName());
        });

        check("a virtual host comes, is described, limited and goes", () -> {
            client.createVhost("java");
            List<String> names = new ArrayList<>();
            for (VhostInfo vhost : client.getVhosts()) {
                names.add(vhost.getName());
            }
            equal(true, names.contains("java") && names.contains(HERE));
            equal("java", client.getVhost("java").getName());
            client.limitMaxNumberOfQueues("java", 7);
            client.limitMaxNumberOfConnections("java", 3);
            VhostLimits limits = client.getVhostLimits("java");
            equal(7, limits.getMaxQueues());
            equal(3, limits.getMaxConnections());
            client.clearMaxQueuesLimit("java");
            equal(-1, client.getVhostLimits("java").getMaxQueues());
            client.deleteVhost("java");
            equal(null, client.getVhost("java"));
        });

        check("a user comes with tags and permissions, and goes", () -> {
            client.createUser("ann", "a password of ann".toCharArray(), List.of("management"));
            UserInfo user = client.getUser("ann");
            equal(List.of("management"), user.getTags());
            client.updatePermissions(HERE, "ann", new UserPermissions("^r", "^w", "^c"));
            UserPermissions permissions = client.getPermissions(HERE, "ann");
            equal("^c ^w ^r", String.join(" ", permissions.getConfigure(), permissions.getWrite(), permissions.getRead()));
            equal(1, client.getPermissionsOf("ann").size());
            equal(true, client.getPermissionsIn(HERE).size() >= 1);
            client.updateTopicPermissions(HERE, "ann", new TopicPermissions("amq.topic", "^r", "^w"));
            TopicPermissions topics = client.getTopicPermissions(HERE, "ann").get(0);
            equal("amq.topic ^r ^w", String.join(" ", topics.getExchange(), topics.getRead(), topics.getWrite()));
            Client ann = new Client(
                new ClientParameters().url(arguments[0]).username("ann").password("a password of ann"));
            equal("ann", ann.whoAmI().getName());
            status(401, () -> ann.createVhost("of-ann"));
            client.clearTopicPermissions(HERE, "ann");
            client.clearPermissions(HERE, "ann");
            equal(0, client.getPermissionsOf("ann").size());
            client.updateUser("ann", "another one".toCharArray(), List.of("monitoring"));
            equal(List.of("monitoring"), client.getUser("ann").getTags());
            status(401, ann::whoAmI);
            client.deleteUser("ann");
            equal(null, client.getUser("ann"));
        });

        check("a queue comes with its arguments, is found page by page, and goes", () -> {
            client.declareQueue(HERE, "java-queue", new QueueInfo(true, false, false, Map.of("x-max-length", 100)));
            QueueInfo queue = client.getQueue(HERE, "java-queue");
            equal(100, queue.getArguments().get("x-max-length"));
            equal(true, queue.isDurable());
            equal("classic", queue.getType());
            client.declareQueue(HERE, "java-queue", new QueueInfo(true, false, false, Map.of("x-max-length", 100)));
            status(400, () -> client.declareQueue(HERE, "java-queue", new QueueInfo(false, false, false)));
            Page<QueueInfo> page = client.getQueues(
                HERE, new QueryParameters().name("^java-", true).pagination().pageSize(10).query());
            equal("java-queue", page.getItemsAsList().get(0).getName());
            equal(1, page.getFilteredCount());
            equal(true, client.getQueues(new DetailsParameters().messageRates(60, 5).lengths(60, 5)).size() >= 2);
            equal(1, client.getQueueBindings(HERE, "java-queue").size());
            client.deleteQueue(HERE, "java-queue", new DeleteQueueParameters(true, true));
            equal(null, client.getQueue(HERE, "java-queue"));
        });

        check("a message is published, looked at and purged", () -> {
            client.declareQueue(HERE, "java-messages", new QueueInfo(true, false, false));
            OutboundMessage message = new OutboundMessage().payload("Grüße").utf8Encoded();
            equal(true, client.publish(HERE, "amq.default", "java-messages", message.properties(Map.of("delivery_mode", 2))));
            equal(false, client.publish(HERE, "amq.default", "nowhere", message));
            for (int look = 0; look < 2; look++) {
                List<InboundMessage> found = client.get(
                    HERE, "java-messages", 5, GetAckMode.NACK_REQUEUE_TRUE, GetEncoding.AUTO);
                equal(1, found.size());
                equal("Grüße", found.get(0).getPayload());
                equal("java-messages", found.get(0).getRoutingKey());
                equal(false, found.get(0).isRedelivered());
            }
            equal(1L, client.getQueue(HERE, "java-messages").getMessagesReady());
            client.purgeQueue(HERE, "java-messages");
            equal(0L, client.getQueue(HERE, "java-messages").getMessagesReady());
            client.deleteQueue(HERE, "java-messages");
        });

        check("exchanges are declared, bound in every way, and go", () -> {
            client.declareExchange(HERE, "java-events", new ExchangeInfo("topic", true, false));
            client.declareExchange(HERE, "java-all", new ExchangeInfo("fanout", true, false));
            client.declareQueue(HERE, "java-bound", new QueueInfo(true, false, false));
            equal("topic", client.getExchange(HERE, "java-events").getType());
            equal(true, client.getExchanges(HERE).size() >= 9);
            client.bindQueue(HERE, "java-bound", "java-events", "a.*");
            client.bindQueue(HERE, "java-bound", "java-events", "", Map.of("x", 1));
            client.bindExchange(HERE, "java-events", "java-all", "k");
            equal(2, client.getQueueBindingsBetween(HERE, "java-events", "java-bound").size());
            equal(3, client.getQueueBindings(HERE, "java-bound").size());
            List<BindingInfo> between = client.getExchangeBindingsBetween(HERE, "java-all", "java-events");
            equal(DestinationType.EXCHANGE, between.get(0).getDestinationType());
            equal(1, client.getExchangeBindingsByDestination(HERE, "java-events").size());
            equal(2, client.getBindingsBySource(HERE, "java-events").size());
            client.unbindQueue(HERE, "java-bound", "java-events", "a.*");
            client.unbindExchange(HERE, "java-events", "java-all", "k");
            equal(1, client.getBindingsBySource(HERE, "java-events").size());
            equal(0, client.getBindingsBySource(HERE, "java-all").size());
            client.deleteExchange(HERE, "java-events");
            client.deleteExchange(HERE, "java-all");
            client.deleteQueue(HERE, "java-bound");
            equal(null, client.getExchange(HERE, "java-events"));
        });

        check("definitions are exported", () -> {
            Definitions definitions = client.getDefinitions();
            List<String> queues = new ArrayList<>();
            for (QueueInfo queue : definitions.getQueues()) {
                queues.add(queue.getName());
            }
            equal(true, queues.contains("consumed"));
            equal(HERE, definitions.getVhosts().get(0).getName());
        });

        check("what there is not is an empty list", () -> {
            equal(0, client.getPolicies().size());
            equal(0, client.getExtensions().size());
        });

        check("a queue that is not there is null, and a wrong password is 401", () -> {
            equal(null, client.getQueue(HERE, "nowhere"));
            Client wrong = new Client(
                new ClientParameters().url(arguments[0]).username(arguments[1]).password("wrong"));
            status(401, wrong::whoAmI);
        });

        check("a connection is closed with a reason", () -> {
            client.closeConnection(client.getConnections().get(0).getName(), "of the test");
            for (int looks = 0; looks < 6000 && !client.getConnections().isEmpty(); looks++) {
                Thread.sleep(50);  // it is gone once its client has answered
            }
            equal(0, client.getConnections().size());
        });
        System.exit(failed ? 1 : 0);
    }
}
