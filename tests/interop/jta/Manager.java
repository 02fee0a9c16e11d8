import com.arjuna.ats.arjuna.AtomicAction;
import com.arjuna.ats.arjuna.common.CoordinatorEnvironmentBean;
import com.arjuna.ats.arjuna.common.CoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.ObjectStoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.RecoveryEnvironmentBean;
import com.arjuna.ats.arjuna.common.Uid;
import com.arjuna.ats.arjuna.objectstore.StoreManager;
import com.arjuna.ats.arjuna.recovery.RecoveryManager;
import com.arjuna.ats.arjuna.state.InputObjectState;
import com.arjuna.ats.internal.arjuna.common.UidHelper;
import com.arjuna.ats.internal.arjuna.objectstore.jdbc.JDBCStore;
import com.arjuna.ats.internal.arjuna.utils.UuidProcessId;
import com.arjuna.ats.internal.jta.recovery.arjunacore.JTANodeNameXAResourceOrphanFilter;
import com.arjuna.ats.internal.jta.recovery.arjunacore.JTATransactionLogXAResourceOrphanFilter;
import com.arjuna.ats.internal.jta.recovery.arjunacore.XARecoveryModule;
import com.arjuna.ats.internal.arjuna.recovery.AtomicActionRecoveryModule;
import com.arjuna.ats.internal.jta.resources.arjunacore.XAResourceRecord;
import com.arjuna.ats.internal.jta.resources.arjunacore.XAResourceRecordWrappingPlugin;
import com.arjuna.ats.jta.common.JTAEnvironmentBean;
import com.arjuna.ats.jta.recovery.XAResourceRecoveryHelper;
import com.arjuna.common.internal.util.propertyservice.BeanPopulator;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.MessageProperties;
import com.rabbitmq.client.ShutdownSignalException;
import jakarta.transaction.RollbackException;
import jakarta.transaction.SystemException;
import jakarta.transaction.TransactionManager;
import java.io.IOException;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.util.List;
import javax.sql.XAConnection;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.jboss.tm.XAResourceWrapper;
import org.postgresql.ds.PGSimpleDataSource;
import org.postgresql.xa.PGXADataSource;

/**
 * Narayana over txmq and PostgreSQL: each message of the queue "orders" becomes a row of the table "bookings" and a
 * message of the queue "invoices", until the queue is empty and nothing is in doubt. First it recovers what the one
 * before it has left.
 *
 * The log is in tables of the database: the one in files is written in place, so a kill may leave half an entry.
 *
 * Arguments: queue or table (which is enlisted first), step (prepare 1, prepared 1, prepared 2,
 * commit 1, committed 1, or none), URL of AMQP, URL of JDBC. At the first pass of the step it prints that and waits
 * for a line. It prints "failed" when a transaction or a connection failed, and goes on; at the end "done".
 */
public final class Manager {
    private static final String NODE = "1";
    private static String step;

    public static void main(String[] arguments) {
        try {
            run(arguments);
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1);
        }
        System.exit(0); // the manager has threads of its own
    }

    private static void run(String[] arguments) throws Exception {
        boolean queueFirst = arguments[0].equals("queue");
        step = arguments[1];
        configure(arguments[3]);
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(arguments[2]);
        PGXADataSource database = new PGXADataSource();
        database.setUrl(arguments[3]);
        try (TxmqResource queue = new TxmqResource(factory); TxmqResource recovered = new TxmqResource(factory)) {
            RecoveryManager recovery = recovery(recovered, database);
            boolean done = false;
            while (!done) {
                recovery.scan();
                try {
                    while (book(queue, database, queueFirst)) {
                        continue;
                    }
                    done = nothingIsInDoubt(recovered, database);
                } catch (RollbackException | SystemException | XAException | IOException | ShutdownSignalException failed) {
                    System.out.println("failed");
                    failed.printStackTrace();
                }
            }
            System.out.println("done");
        }
    }

    private static void configure(String database) throws Exception {
        BeanPopulator.getDefaultInstance(CoreEnvironmentBean.class).setNodeIdentifier(NODE);
        BeanPopulator.getDefaultInstance(CoreEnvironmentBean.class)
            .setProcessImplementationClassName(UuidProcessId.class.getName());
        PGSimpleDataSource log = new PGSimpleDataSource();
        log.setUrl(database);
        for (String store : new String[] {null, "communicationStore", "stateStore"}) {
            ObjectStoreEnvironmentBean bean = BeanPopulator.getNamedInstance(ObjectStoreEnvironmentBean.class, store);
            bean.setObjectStoreType(JDBCStore.class.getName());
            bean.setJdbcDataSource(log);
            bean.setTablePrefix(store == null ? "log" : store);
        }
        BeanPopulator.getDefaultInstance(CoordinatorEnvironmentBean.class).setTransactionStatusManagerEnable(false);
        BeanPopulator.getDefaultInstance(CoordinatorEnvironmentBean.class).setDefaultTimeout(0);
        JTAEnvironmentBean jta = BeanPopulator.getDefaultInstance(JTAEnvironmentBean.class);
        jta.setXAResourceRecordWrappingPlugin(new Names());
        jta.setXaRecoveryNodes(List.of(NODE));
        jta.setOrphanSafetyInterval(0); // one manager: nobody prepares while it recovers
        jta.setXaResourceOrphanFilters(
            List.of(new JTATransactionLogXAResourceOrphanFilter(), new JTANodeNameXAResourceOrphanFilter()));
    }

    private static RecoveryManager recovery(TxmqResource queue, PGXADataSource database) throws Exception {
        XAResource table = database.getXAConnection().getXAResource(); // its connection ends with this process
        RecoveryEnvironmentBean bean = BeanPopulator.getDefaultInstance(RecoveryEnvironmentBean.class);
        bean.setRecoveryBackoffPeriod(1); // seconds, between the two passes of a scan
        XARecoveryModule module = new XARecoveryModule();
        module.addXAResourceRecoveryHelper(new Helper(new Steps(queue, 0, "queue")));
        module.addXAResourceRecoveryHelper(new Helper(new Steps(table, 0, "table")));
        bean.setRecoveryModules(List.of(new AtomicActionRecoveryModule(), module));
        bean.setExpiryScanners(List.of());
        RecoveryManager manager = RecoveryManager.manager(RecoveryManager.INDIRECT_MANAGEMENT);
        manager.initialize();
        return manager;
    }

    private record Helper(XAResource resource) implements XAResourceRecoveryHelper {
        @Override
        public boolean initialise(String parameter) {
            return true;
        }

        @Override
        public XAResource[] getXAResources() {
            return new XAResource[] {resource};
        }
    }

    /**
     * The log has the name of each resource. So the manager knows, when that has said what is in doubt, that a branch
     * which is not has ended.
     */
    private static final class Names implements XAResourceRecordWrappingPlugin {
        @Override
        public void transcribeWrapperData(XAResourceRecord record) {
            if (record.value() instanceof XAResourceWrapper resource) {
                record.setJndiName(resource.getJndiName());
            }
        }

        @Override
        public Integer getEISName(XAResource resource) {
            return 0;
        }

        @Override
        public String getEISName(Integer key) {
            return "";
        }
    }

    /** Books one order; false: there is none. */
    private static boolean book(TxmqResource queue, PGXADataSource database, boolean queueFirst) throws Exception {
        TransactionManager manager = com.arjuna.ats.jta.TransactionManager.transactionManager();
        XAConnection connection = database.getXAConnection();
        manager.begin();
        try (Connection session = connection.getConnection()) {
            XAResource table = connection.getXAResource();
            Steps[] both = {
                new Steps(queue, queueFirst ? 1 : 2, "queue"), new Steps(table, queueFirst ? 2 : 1, "table")
            };
            for (Steps each : queueFirst ? both : new Steps[] {both[1], both[0]}) {
                if (!manager.getTransaction().enlistResource(each)) {
                    throw new SystemException("a resource does not start: " + each);
                }
            }
            GetResponse order = queue.channel().basicGet("orders", false);
            if (order == null) {
                return false;
            }
            try (PreparedStatement insert = session.prepareStatement("INSERT INTO bookings VALUES (?)")) {
                insert.setString(1, new String(order.getBody()));
                insert.executeUpdate();
            }
            queue.channel().basicPublish("", "invoices", MessageProperties.PERSISTENT_BASIC, order.getBody());
            queue.channel().basicAck(order.getEnvelope().getDeliveryTag(), false);
            manager.commit();
            return true;
        } finally {
            if (manager.getTransaction() != null) {
                manager.rollback();
            }
            connection.close();
        }
    }

    private static boolean nothingIsInDoubt(TxmqResource queue, PGXADataSource database) throws Exception {
        XAConnection connection = database.getXAConnection();
        try {
            int flags = XAResource.TMSTARTRSCAN | XAResource.TMENDRSCAN;
            InputObjectState log = new InputObjectState();
            StoreManager.getRecoveryStore().allObjUids(new AtomicAction().type(), log);
            return queue.recover(flags).length == 0 && connection.getXAResource().recover(flags).length == 0
                && UidHelper.unpackFrom(log).equals(Uid.nullUid());
        } finally {
            connection.close();
        }
    }

    /** Stops at the step. */
    private record Steps(XAResource resource, int place, String name) implements XAResourceWrapper {
        @Override
        public XAResource getResource() {
            return resource;
        }

        @Override
        public String getProductName() {
            return name;
        }

        @Override
        public String getProductVersion() {
            return "";
        }

        @Override
        public String getJndiName() {
            return name;
        }

        private void reach(String verb) {
            if (!step.equals(verb + " " + place)) {
                return;
            }
            System.out.println(step);
            step = "none";
            try {
                System.in.read();
            } catch (IOException lost) {
                throw new IllegalStateException(lost);
            }
        }

        @Override
        public int prepare(Xid xid) throws XAException {
            reach("prepare");
            int answer = resource.prepare(xid);
            reach("prepared");
            return answer;
        }

        @Override
        public void commit(Xid xid, boolean onePhase) throws XAException {
            reach("commit");
            resource.commit(xid, onePhase);
            reach("committed");
        }

        @Override
        public void rollback(Xid xid) throws XAException {
            resource.rollback(xid);
        }

        @Override
        public void start(Xid xid, int flags) throws XAException {
            resource.start(xid, flags);
        }

        @Override
        public void end(Xid xid, int flags) throws XAException {
            resource.end(xid, flags);
        }

        @Override
        public void forget(Xid xid) throws XAException {
            resource.forget(xid);
        }

        @Override
        public Xid[] recover(int flags) throws XAException {
            return resource.recover(flags);
        }

        @Override
        public boolean isSameRM(XAResource other) throws XAException {
            return other instanceof Steps steps && resource.isSameRM(steps.resource);
        }

        @Override
        public int getTransactionTimeout() throws XAException {
            return resource.getTransactionTimeout();
        }

        @Override
        public boolean setTransactionTimeout(int seconds) throws XAException {
            return resource.setTransactionTimeout(seconds);
        }
    }
}
