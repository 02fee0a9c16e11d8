import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.ShutdownSignalException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeoutException;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * A resource of a manager of distributed transactions (JTA) over the client for RabbitMQ.
 *
 * Each branch has a channel of its own, so a suspended branch is a channel that waits, and no branch joins that
 * of another resource: {@code isSameRM} is false, and the manager gives each resource a branch. After a lost
 * connection it asks by a new one how a branch ended.
 */
public final class TxmqResource implements XAResource, AutoCloseable {
    private static final String COMMANDS = "amq.transaction";
    private static final Pattern NAME = Pattern.compile("xa:(-?\\d+):([\\w-]+):([\\w-]*)");
    private static final Pattern ROW = Pattern.compile("\"xid\": \"(xa:[^\"]+)\"");
    private static final long CONFIRM_MS = 60_000;

    private final ConnectionFactory factory;
    private final Map<String, Branch> branches = new HashMap<>();
    private Connection connection;
    private Branch current;
    private int timeoutSeconds;

    public TxmqResource(ConnectionFactory factory) {
        this.factory = factory.clone();
        this.factory.setAutomaticRecoveryEnabled(false); // a channel that comes back by itself has lost its branch
    }

    private static final class Branch {
        final Channel channel;
        boolean failed;

        Branch(Channel channel) {
            this.channel = channel;
        }
    }

    /** The channel of the branch between start and end: what it publishes and acks is part of the transaction. */
    public Channel channel() {
        if (current == null) {
            throw new IllegalStateException("no transaction is started: enlist this resource first");
        }
        return current.channel;
    }

    // -- the work of a branch -------------------------------------------------------------------------------

    @Override
    public synchronized void start(Xid xid, int flags) throws XAException {
        String name = nameOf(xid);
        if (current != null) {
            throw new XAException(XAException.XAER_PROTO);
        }
        if (flags == TMRESUME || flags == TMJOIN) {
            current = branch(name);
            return;
        }
        if (branches.containsKey(name)) {
            throw new XAException(XAException.XAER_DUPID);
        }
        try {
            Channel channel = connection().createChannel();
            channel.txSelect();
            if (timeoutSeconds > 0) {
                channel.basicPublish(COMMANDS, "timeout", null, bytes(Integer.toString(timeoutSeconds)));
            }
            current = new Branch(channel);
            branches.put(name, current);
        } catch (IOException | TimeoutException | ShutdownSignalException lost) {
            throw error(XAException.XAER_RMFAIL, lost);
        }
    }

    @Override
    public synchronized void end(Xid xid, int flags) throws XAException {
        Branch branch = branch(nameOf(xid));
        branch.failed |= flags == TMFAIL;
        if (current == branch) {
            current = null;
        }
    }

    @Override
    public synchronized int prepare(Xid xid) throws XAException {
        String name = nameOf(xid);
        Branch branch = branch(name);
        if (branch.failed) {
            rollback(xid);
            throw new XAException(XAException.XA_RBROLLBACK);
        }
        branches.remove(name);
        try {
            branch.channel.basicPublish(COMMANDS, "prepare", null, bytes(name));
            branch.channel.txCommit();
        } catch (IOException | ShutdownSignalException refused) {
            if (!outcome(name).equals("prepared")) { // the answer alone was lost, or its work ended with the channel
                boolean connection = branch.channel.getCloseReason().isHardError();
                throw error(connection ? XAException.XA_RBCOMMFAIL : XAException.XA_RBROLLBACK, refused);
            }
            return XA_OK;
        }
        close(branch.channel);
        return outcome(name).equals("prepared") ? XA_OK : XA_RDONLY; // without work nothing is prepared
    }

    // -- the decision ---------------------------------------------------------------------------------------

    @Override
    public synchronized void commit(Xid xid, boolean onePhase) throws XAException {
        // A commit whose answer is lost cannot be told from one that is still on its way; a prepare can be repeated.
        if (!onePhase || prepare(xid) == XA_OK) {
            decide("commit", nameOf(xid), "committed");
        }
    }

    @Override
    public synchronized void rollback(Xid xid) throws XAException {
        String name = nameOf(xid);
        Branch open = branches.remove(name);
        if (open == null) {
            decide("rollback", name, "rolled_back");
            return;
        }
        if (current == open) {
            current = null;
        }
        close(open.channel); // its work ends with it, as with one that was lost
    }

    @Override
    public void forget(Xid xid) throws XAException {
        decide("forget", nameOf(xid), "committed", "rolled_back");
    }

    /** Where the answer is an error, or lost, the broker is asked how it ended. */
    private void decide(String verb, String name, String... ends) throws XAException {
        try {
            Channel channel = connection().createChannel();
            channel.confirmSelect();
            channel.basicPublish(COMMANDS, verb, null, bytes(name));
            channel.waitForConfirmsOrDie(CONFIRM_MS);
            channel.close();
            return;
        } catch (IOException | TimeoutException | ShutdownSignalException refused) {
            // below
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            throw error(XAException.XAER_RMFAIL, interrupted);
        }
        String outcome = outcome(name);
        if (!List.of(ends).contains(outcome)) {
            throw new XAException(verb.equals("forget") ? codeOfForget(outcome) : codeOfEnd(outcome));
        }
    }

    private static int codeOfEnd(String outcome) {
        return switch (outcome) {
            case "heuristically_committed" -> XAException.XA_HEURCOM;
            case "heuristically_rolled_back" -> XAException.XA_HEURRB;
            case "prepared" -> XAException.XAER_RMFAIL; // the decision was lost on its way: repeat it
            case "committed", "rolled_back" -> XAException.XAER_PROTO; // as this manager has decided before
            default -> XAException.XAER_NOTA;
        };
    }

    private static int codeOfForget(String outcome) {
        return switch (outcome) {
            case "heuristically_committed", "heuristically_rolled_back" -> XAException.XAER_RMFAIL;
            case "prepared" -> XAException.XAER_PROTO;
            default -> XAException.XAER_NOTA;
        };
    }

    /** Empty: no such transaction. */
    private String outcome(String name) throws XAException {
        try {
            Channel channel = connection().createChannel();
            GetResponse answer = channel.basicGet(COMMANDS + "." + name, true);
            channel.close();
            return answer == null ? "" : new String(answer.getBody(), StandardCharsets.UTF_8);
        } catch (IOException | TimeoutException | ShutdownSignalException lost) {
            throw error(XAException.XAER_RMFAIL, lost);
        }
    }

    // -- what is in doubt -----------------------------------------------------------------------------------

    /** All pages at the start of a scan. Names that are no xids belong to other programs of the user. */
    @Override
    public Xid[] recover(int flags) throws XAException {
        List<Xid> found = new ArrayList<>();
        if ((flags & TMSTARTRSCAN) != 0) {
            try {
                Channel channel = connection().createChannel();
                GetResponse page = channel.basicGet(COMMANDS + "@recover", true);
                while (page != null) {
                    Matcher row = ROW.matcher(new String(page.getBody(), StandardCharsets.UTF_8));
                    while (row.find()) {
                        found.add(xidOf(row.group(1)));
                    }
                    page = channel.basicGet(page.getEnvelope().getRoutingKey(), true);
                }
                channel.close();
            } catch (IOException | TimeoutException | ShutdownSignalException lost) {
                throw error(XAException.XAER_RMFAIL, lost);
            }
        }
        return found.toArray(new Xid[0]);
    }

    // -- the connection -------------------------------------------------------------------------------------

    @Override
    public boolean isSameRM(XAResource other) {
        return other == this;
    }

    @Override
    public int getTransactionTimeout() {
        return timeoutSeconds;
    }

    @Override
    public boolean setTransactionTimeout(int seconds) {
        timeoutSeconds = seconds;
        return true;
    }

    @Override
    public void close() {
        if (connection != null) {
            connection.abort();
        }
    }

    private Connection connection() throws IOException, TimeoutException {
        if (connection == null || !connection.isOpen()) {
            connection = factory.newConnection();
        }
        return connection;
    }

    private static void close(Channel channel) {
        try {
            channel.abort();
        } catch (IOException | ShutdownSignalException ended) {
            // so it is closed
        }
    }

    private Branch branch(String name) throws XAException {
        Branch found = branches.get(name);
        if (found == null) {
            throw new XAException(XAException.XAER_NOTA);
        }
        return found;
    }

    // -- names ----------------------------------------------------------------------------------------------

    static String nameOf(Xid xid) {
        Base64.Encoder base64 = Base64.getUrlEncoder().withoutPadding();
        return "xa:" + xid.getFormatId() + ":" + base64.encodeToString(xid.getGlobalTransactionId()) + ":"
            + base64.encodeToString(xid.getBranchQualifier());
    }

    private static Xid xidOf(String name) {
        Matcher parts = NAME.matcher(name);
        if (!parts.matches()) {
            throw new IllegalArgumentException(name);
        }
        Base64.Decoder base64 = Base64.getUrlDecoder();
        return xidOf(
            Integer.parseInt(parts.group(1)), base64.decode(parts.group(2)), base64.decode(parts.group(3)));
    }

    static Xid xidOf(int format, byte[] global, byte[] branch) {
        return new Named(format, global, branch);
    }

    private record Named(int getFormatId, byte[] getGlobalTransactionId, byte[] getBranchQualifier)
        implements Xid {
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static XAException error(int code, Exception cause) {
        XAException made = new XAException(code);
        made.initCause(cause);
        return made;
    }
}
