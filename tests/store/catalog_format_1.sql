-- The catalog of format 1, as the versions before the AMQP endpoint wrote it.

CREATE TABLE meta (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  format INTEGER NOT NULL,
  sequence INTEGER NOT NULL,
  next_batch_id INTEGER NOT NULL,
  next_segment INTEGER NOT NULL,
  clean INTEGER NOT NULL,
  guard INTEGER NOT NULL
);

CREATE TABLE segment (
  segment INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  schema BLOB NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('open', 'closed')),
  guard INTEGER NOT NULL
);

CREATE TABLE batch (
  batch_id INTEGER PRIMARY KEY,
  segment INTEGER NOT NULL,
  position INTEGER NOT NULL,
  length INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  checksum INTEGER NOT NULL,
  guard INTEGER NOT NULL
);

CREATE TABLE inbox (
  id INTEGER PRIMARY KEY,
  sequence INTEGER NOT NULL,
  committed_at INTEGER NOT NULL,
  exchange TEXT NOT NULL,
  routing_key TEXT NOT NULL,
  properties BLOB NOT NULL,
  body BLOB NOT NULL,
  routes BLOB NOT NULL,
  guard INTEGER NOT NULL
);

CREATE TABLE exchange (
  name TEXT, type TEXT, durable INTEGER, auto_delete INTEGER, internal INTEGER, arguments TEXT, guard INTEGER,
  PRIMARY KEY (name)
) WITHOUT ROWID;

CREATE TABLE queue (
  queue_id INTEGER, name TEXT, durable INTEGER, exclusive INTEGER, auto_delete INTEGER, arguments TEXT, guard INTEGER,
  PRIMARY KEY (queue_id)
);

CREATE TABLE binding (
  exchange TEXT, queue TEXT, routing_key TEXT, arguments TEXT, guard INTEGER,
  PRIMARY KEY (exchange, queue, routing_key, arguments)
) WITHOUT ROWID;

CREATE TABLE progress (
  queue_id INTEGER, owner TEXT, floor INTEGER, acked INTEGER, next_offset INTEGER, dispatched_below INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id)
);

CREATE TABLE hole (
  queue_id INTEGER, start INTEGER, "end" INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id, start)
) WITHOUT ROWID;

CREATE TABLE run (
  queue_id INTEGER, first INTEGER, count INTEGER, batch_id INTEGER, row INTEGER, bitmap BLOB, sequence INTEGER,
  committed_at INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id, first)
);

CREATE TABLE claim (
  app_id TEXT, lineage INTEGER, start TEXT, "end" TEXT, ranges TEXT, skipped TEXT, redelivered TEXT, position INTEGER, guard INTEGER,
  PRIMARY KEY (app_id, lineage, start)
);

CREATE TABLE origin (
  app_id TEXT, queues TEXT, lineage INTEGER, start TEXT, passed INTEGER, guard INTEGER,
  PRIMARY KEY (app_id, queues)
) WITHOUT ROWID;

CREATE TABLE read (
  app_id TEXT, query_id TEXT, batch_id INTEGER, queues TEXT, ranges TEXT, guard INTEGER,
  PRIMARY KEY (app_id, query_id, batch_id, queues)
) WITHOUT ROWID;

CREATE TABLE lineage (
  app_id TEXT, query_id TEXT, position INTEGER, first_batch INTEGER, guard INTEGER,
  PRIMARY KEY (app_id, query_id)
) WITHOUT ROWID;

CREATE TABLE attempt (
  token TEXT, app_id TEXT, query_id TEXT, batch_id INTEGER, opened_at INTEGER, guard INTEGER,
  PRIMARY KEY (token)
) WITHOUT ROWID;

CREATE TABLE part (
  branch TEXT, part INTEGER, token TEXT, kind TEXT, target TEXT, "partition" INTEGER, attempt INTEGER, rows INTEGER,
  size_bytes INTEGER, checksum INTEGER, batch_id INTEGER, inline BLOB, routes TEXT, unroutable INTEGER, examples TEXT, guard INTEGER,
  PRIMARY KEY (branch, part)
);

CREATE TABLE ledger (
  app_id TEXT, sequence INTEGER, query_id TEXT, batch_id INTEGER, token TEXT, ranges TEXT, messages INTEGER, published INTEGER,
  committed_at INTEGER, commit_sequence INTEGER, branches TEXT, claim_position INTEGER, applied INTEGER, mirrored INTEGER,
  guard INTEGER,
  PRIMARY KEY (app_id, sequence)
) WITHOUT ROWID;

CREATE TABLE released (
  queue TEXT, commit_sequence INTEGER, guard INTEGER,
  PRIMARY KEY (queue)
) WITHOUT ROWID;

CREATE TABLE prepared (
  xid TEXT, prepared_at INTEGER, publishes BLOB, routes TEXT, settles TEXT, guard INTEGER,
  PRIMARY KEY (xid)
);

CREATE TABLE outcome (
  xid TEXT, state TEXT, decided_at INTEGER, guard INTEGER,
  PRIMARY KEY (xid)
) WITHOUT ROWID;
