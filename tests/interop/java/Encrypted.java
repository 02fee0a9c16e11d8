import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.MessageProperties;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLHandshakeException;
import javax.net.ssl.TrustManagerFactory;

/**
 * AMQPS with a user of few permissions: {@code Encrypted URL CA OTHER_CA}. It prints what it was allowed and what not.
 *
 * Invariant: the certificate of the broker is verified, with the name of its host.
 */
public final class Encrypted {
    private static ConnectionFactory factory(String url, String authority) throws Exception {
        KeyStore known = KeyStore.getInstance(KeyStore.getDefaultType());
        known.load(null, null);
        try (InputStream file = new FileInputStream(authority)) {
            known.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(file));
        }
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(known);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, trust.getTrustManagers(), null);
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(url);
        factory.useSslProtocol(context);
        factory.enableHostnameVerification();
        factory.setAutomaticRecoveryEnabled(false);
        return factory;
    }

    public static void main(String[] arguments) throws Exception {
        try (Connection connection = factory(arguments[0], arguments[1]).newConnection()) {
            Channel channel = connection.createChannel();
            channel.queuePurge("orders");
            channel.txSelect();
            for (int number = 0; number < 10; number++) {
                channel.basicPublish("", "orders", MessageProperties.PERSISTENT_BASIC, ("order " + number).getBytes());
            }
            channel.txCommit();
            System.out.println(channel.messageCount("orders") + " orders");
            channel.basicAck(channel.basicGet("orders", false).getEnvelope().getDeliveryTag(), false);
            channel.txCommit();
            try {
                channel.queueDeclare("mine", true, false, false, null);
            } catch (IOException refused) {
                System.out.println(refused.getCause().getMessage().replaceFirst(".*reply-text=([^,]*),.*", "$1"));
            }
        }
        try {
            factory(arguments[0], arguments[2]).newConnection().close();
        } catch (SSLHandshakeException refused) {
            System.out.println("another authority is refused");
        }
    }
}
