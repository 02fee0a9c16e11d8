import com.rabbitmq.client.Channel;
import java.util.Arrays;
import java.util.List;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/** What the resource of txmq says to a manager, in codes of the XA standard. */
public final class Codes {
    private static final int SCAN = XAResource.TMSTARTRSCAN | XAResource.TMENDRSCAN;
    private static int branches;

    interface Call {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        Checks.open(arguments[0]);
        work();
        ends();
        Checks.finish();
    }

    private static void work() throws Exception {
        Checks.check("a branch without work is read only and leaves nothing in doubt", channel -> {
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                Xid xid = xid();
                resource.start(xid, XAResource.TMNOFLAGS);
                resource.end(xid, XAResource.TMSUCCESS);
                Checks.equal("vote", XAResource.XA_RDONLY, resource.prepare(xid));
                code(XAException.XAER_NOTA, () -> resource.commit(xid, false));
            }
        });
        Checks.check("a suspended branch goes on beside another one", channel -> {
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                String queue = Checks.queue(channel);
                Xid first = xid();
                Xid second = xid();
                resource.start(first, XAResource.TMNOFLAGS);
                publish(resource, queue, "first");
                resource.end(first, XAResource.TMSUSPEND);
                resource.start(second, XAResource.TMNOFLAGS);
                publish(resource, queue, "second");
                code(XAException.XAER_PROTO, () -> resource.start(first, XAResource.TMRESUME));
                resource.end(second, XAResource.TMSUCCESS);
                resource.start(first, XAResource.TMRESUME);
                publish(resource, queue, "first again");
                resource.end(first, XAResource.TMSUCCESS);
                resource.rollback(second);
                resource.prepare(first);
                resource.commit(first, false);
                Checks.equal("bodies", List.of("first", "first again"), Checks.drain(queue));
            }
        });
        Checks.check("a branch has one start, and its calls follow it", channel -> {
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                Xid xid = xid();
                code(XAException.XAER_NOTA, () -> resource.end(xid, XAResource.TMSUCCESS));
                code(XAException.XAER_NOTA, () -> resource.prepare(xid));
                resource.start(xid, XAResource.TMNOFLAGS);
                resource.end(xid, XAResource.TMSUCCESS);
                code(XAException.XAER_DUPID, () -> resource.start(xid, XAResource.TMNOFLAGS));
                resource.rollback(xid);
            }
        });
        Checks.check("two resources of one broker have a branch each", channel -> {
            try (TxmqResource one = new TxmqResource(Checks.factory());
                TxmqResource other = new TxmqResource(Checks.factory())) {
                Checks.equal("same", false, one.isSameRM(other));
                Checks.equal("itself", true, one.isSameRM(one));
            }
        });
        Checks.check("a branch that failed or took too long is rolled back", channel -> {
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                String queue = Checks.queue(channel);
                Xid failed = prepared(resource, queue, XAResource.TMFAIL);
                code(XAException.XA_RBROLLBACK, () -> resource.prepare(failed));
                Checks.equal("set", true, resource.setTransactionTimeout(1));
                Xid slow = xid();
                resource.start(slow, XAResource.TMNOFLAGS);
                publish(resource, queue, "slow");
                Channel open = resource.channel();
                resource.end(slow, XAResource.TMSUCCESS);
                long end = System.nanoTime() + Checks.TIMEOUT_MS * 1_000_000;
                while (open.isOpen() && System.nanoTime() < end) {
                    Thread.sleep(20);
                }
                code(XAException.XA_RBROLLBACK, () -> resource.prepare(slow));
                Checks.equal("bodies", List.of(), Checks.drain(queue));
            }
        });
    }

    private static void ends() throws Exception {
        Checks.check("one phase commits, once", channel -> {
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                String queue = Checks.queue(channel);
                Xid xid = prepared(resource, queue, XAResource.TMSUCCESS);
                resource.commit(xid, true);
                resource.commit(xid, false); // repeated after a lost answer
                Checks.equal("bodies", List.of("work"), Checks.drain(queue));
            }
        });
        Checks.check("an unknown xid and another decision are errors", channel -> {
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                Xid unknown = xid();
                code(XAException.XAER_NOTA, () -> resource.commit(unknown, false));
                code(XAException.XAER_NOTA, () -> resource.rollback(unknown));
                code(XAException.XAER_NOTA, () -> resource.forget(unknown));
                Xid xid = prepared(resource, Checks.queue(channel), XAResource.TMSUCCESS);
                resource.prepare(xid);
                code(XAException.XAER_PROTO, () -> resource.forget(xid)); // nobody has decided it
                resource.rollback(xid);
                resource.rollback(xid);
                code(XAException.XAER_PROTO, () -> resource.commit(xid, false));
            }
        });
        Checks.check("a new connection recovers the xids and ends them", channel -> {
            String queue = Checks.queue(channel);
            Xid xid;
            try (TxmqResource lost = new TxmqResource(Checks.factory())) {
                xid = prepared(lost, queue, XAResource.TMSUCCESS);
                lost.prepare(xid);
            }
            try (TxmqResource resource = new TxmqResource(Checks.factory())) {
                Xid[] found = resource.recover(SCAN);
                Checks.equal("found", 1, found.length);
                Checks.equal("format", xid.getFormatId(), found[0].getFormatId());
                Checks.equal("global", true, Arrays.equals(xid.getGlobalTransactionId(), found[0].getGlobalTransactionId()));
                Checks.equal("branch", true, Arrays.equals(xid.getBranchQualifier(), found[0].getBranchQualifier()));
                Checks.equal("the end of a scan", 0, resource.recover(XAResource.TMENDRSCAN).length);
                resource.commit(found[0], false);
                Checks.equal("left", 0, resource.recover(SCAN).length);
                Checks.equal("bodies", List.of("work"), Checks.drain(queue));
            }
        });
    }

    /** A branch with a message, up to its end. */
    private static Xid prepared(TxmqResource resource, String queue, int end) throws Exception {
        Xid xid = xid();
        resource.start(xid, XAResource.TMNOFLAGS);
        publish(resource, queue, "work");
        resource.end(xid, end);
        return xid;
    }

    private static void publish(TxmqResource resource, String queue, String body) throws Exception {
        Checks.publish(resource.channel(), queue, body);
    }

    /** Bytes of every kind: what base64url writes in two ways is in them. */
    private static Xid xid() {
        byte[] global = new byte[64];
        for (int place = 0; place < global.length; place++) {
            global[place] = (byte) (place * 41 - 5);
        }
        global[0] = (byte) ++branches;
        return TxmqResource.xidOf(-131_077, global, new byte[] {(byte) 0xff, (byte) 0xfe});
    }

    private static void code(int expected, Call call) throws Exception {
        try {
            call.run();
        } catch (XAException error) {
            Checks.equal("code", expected, error.errorCode);
            return;
        }
        throw new AssertionError("no error, but " + expected + " was to come");
    }
}
