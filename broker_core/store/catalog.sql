-- The catalog: what it does not name does not exist. Written by hand; a test holds the columns equal to the record classes.
-- "guard" is xxh3_64 over the row's other values, signed: SQLite does not notice a flipped bit inside a value.
-- A table whose rows may hold large values keeps its rowid; the others are stored in the order of their key.

-- One row.
CREATE TABLE meta (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  format INTEGER NOT NULL,
  sequence INTEGER NOT NULL,       -- last commit sequence number, where no inbox row carries it
  next_block_id INTEGER NOT NULL,  -- at least this; block and inbox may know better
  next_segment INTEGER NOT NULL,   -- at least this; a number is never used again, a reader may still map the old file
  clean INTEGER NOT NULL,          -- 0 -> 1 close(clean), 1 -> 0 open
  guard INTEGER NOT NULL
);

-- state: open -> closed when the segment is full, when all its branch rows are forgotten, at close, or by recovery (which
-- cuts the torn tail and writes the end mark); closed -> row deleted by the commit that forgets its last block, then the file goes.
CREATE TABLE segment (
  segment INTEGER PRIMARY KEY,     -- data/segments/NNNNNNNN.arrow
  kind TEXT NOT NULL,              -- message, merged, branch
  schema BLOB NOT NULL,            -- Arrow IPC schema message
  state TEXT NOT NULL CHECK (state IN ('open', 'closed')),
  guard INTEGER NOT NULL
);

-- no row -> named (names), or moved out of the inbox (seals) -> other place, same rows (moves) -> row deleted (forgets).
CREATE TABLE block (
  block_id INTEGER PRIMARY KEY,
  segment INTEGER NOT NULL,
  position INTEGER NOT NULL,
  length INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  checksum INTEGER NOT NULL,       -- xxh3_64 of the bytes, signed
  guard INTEGER NOT NULL
);

-- The messages of a small commit, which share a row (inbox.py).
-- no row -> committed in the open block -> row deleted when the block is sealed or forgotten.
CREATE TABLE inbox (
  id INTEGER PRIMARY KEY,          -- block_id << 20 | row of the first message: a small commit touches the last page only
  count INTEGER NOT NULL,          -- of messages
  messages BLOB NOT NULL,
  guard INTEGER NOT NULL
);

-- The records of the domain: no row -> put -> put again under the same key replaces it -> dropped.

CREATE TABLE exchange (
  name TEXT, type TEXT, durable INTEGER, auto_delete INTEGER, internal INTEGER, arguments TEXT, vhost TEXT, guard
  INTEGER,
  PRIMARY KEY (name, vhost)
) WITHOUT ROWID;

CREATE TABLE queue (
  queue_id INTEGER, name TEXT, durable INTEGER, exclusive INTEGER, auto_delete INTEGER, arguments TEXT, vhost TEXT,
  guard INTEGER,
  PRIMARY KEY (queue_id)
);

CREATE TABLE binding (
  exchange TEXT, queue TEXT, routing_key TEXT, arguments TEXT, vhost TEXT, guard INTEGER,
  PRIMARY KEY (exchange, queue, routing_key, arguments, vhost)
) WITHOUT ROWID;

CREATE TABLE progress (
  queue_id INTEGER, owner TEXT, floor INTEGER, acked INTEGER, next_offset INTEGER, dispatched_below INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id)
);

-- no row -> settled out of order -> grown (put again) -> dropped when the floor has passed it.
CREATE TABLE hole (
  queue_id INTEGER, start INTEGER, "end" INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id, start)
) WITHOUT ROWID;

-- no row -> enqueued, or its batch sealed -> dropped when every entry is deletable.
CREATE TABLE run (
  queue_id INTEGER, first INTEGER, count INTEGER, block_id INTEGER, row INTEGER, bitmap BLOB, sequence INTEGER,
  committed_at INTEGER, expires_us INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id, first)
);

-- no row -> claimed; immutable -> dropped when no replay can ask for it.
CREATE TABLE claim (
  app_id TEXT, lineage INTEGER, start TEXT, "end" TEXT, ranges TEXT, skipped TEXT, redelivered TEXT, position INTEGER,
  vhost TEXT, guard INTEGER,
  PRIMARY KEY (app_id, lineage, start, vhost)
);

CREATE TABLE origin (
  app_id TEXT, queues TEXT, lineage INTEGER, start TEXT, passed INTEGER, vhost TEXT, guard INTEGER,
  PRIMARY KEY (app_id, queues, vhost)
) WITHOUT ROWID;

CREATE TABLE read (
  app_id TEXT, query_id TEXT, batch_id INTEGER, queues TEXT, ranges TEXT, vhost TEXT, guard INTEGER,
  PRIMARY KEY (app_id, query_id, batch_id, queues, vhost)
) WITHOUT ROWID;

CREATE TABLE lineage (
  app_id TEXT, query_id TEXT, position INTEGER, first_batch INTEGER, vhost TEXT, guard INTEGER,
  PRIMARY KEY (app_id, query_id, vhost)
) WITHOUT ROWID;

-- no row -> opened -> dropped when its batch is decided or rolled back.
CREATE TABLE attempt (
  token TEXT, app_id TEXT, query_id TEXT, batch_id INTEGER, opened_at INTEGER, vhost TEXT, guard INTEGER,
  PRIMARY KEY (token, vhost)
) WITHOUT ROWID;

-- no row -> staged (invisible) -> dropped when published or applied, or with its attempt.
CREATE TABLE part (
  branch TEXT, part INTEGER, token TEXT, kind TEXT, target TEXT, "partition" INTEGER, attempt INTEGER, rows INTEGER,
  size_bytes INTEGER, checksum INTEGER, block_id INTEGER, inline BLOB, routes TEXT, unroutable INTEGER, examples TEXT,
  vhost TEXT, expiration_us INTEGER, guard INTEGER,
  PRIMARY KEY (branch, part, vhost)
);

-- no row -> decided -> applied = 1 -> mirrored = 1.
CREATE TABLE ledger (
  app_id TEXT, sequence INTEGER, query_id TEXT, batch_id INTEGER, token TEXT, ranges TEXT, messages INTEGER, published
  INTEGER, committed_at INTEGER, commit_sequence INTEGER, branches TEXT, claim_position INTEGER, applied INTEGER,
  mirrored INTEGER, vhost TEXT, offset_log TEXT, guard INTEGER,
  PRIMARY KEY (app_id, sequence, vhost)
) WITHOUT ROWID;

CREATE TABLE released (
  queue TEXT, commit_sequence INTEGER, vhost TEXT, guard INTEGER,
  PRIMARY KEY (queue, vhost)
) WITHOUT ROWID;

-- no row -> prepared -> dropped with its outcome, by commit or rollback only.
CREATE TABLE prepared (
  xid TEXT, prepared_at INTEGER, publishes BLOB, routes TEXT, settles TEXT, vhost TEXT, guard INTEGER,
  PRIMARY KEY (xid)
);

CREATE TABLE outcome (
  xid TEXT, state TEXT, decided_at INTEGER, guard INTEGER,
  PRIMARY KEY (xid)
) WITHOUT ROWID;

CREATE TABLE exchange_binding (
  source TEXT, destination TEXT, routing_key TEXT, arguments TEXT, vhost TEXT, guard INTEGER,
  PRIMARY KEY (source, destination, routing_key, arguments, vhost)
) WITHOUT ROWID;

-- no row -> came back from a consumer -> came back again (put again) -> dropped when it is settled.
CREATE TABLE delivery (
  queue_id INTEGER, "offset" INTEGER, count INTEGER, guard INTEGER,
  PRIMARY KEY (queue_id, "offset")
) WITHOUT ROWID;

-- no row -> enqueued -> dropped when its last id is forgotten.
CREATE TABLE message_ids (
  queue_id INTEGER, first INTEGER, committed_at INTEGER, ids BLOB, guard INTEGER,
  PRIMARY KEY (queue_id, first)
) WITHOUT ROWID;

CREATE TABLE channel_commit (
  channel TEXT, number INTEGER, decided_at INTEGER, guard INTEGER,
  PRIMARY KEY (channel)
) WITHOUT ROWID;

CREATE TABLE forgotten (
  kind TEXT, decided_at INTEGER, guard INTEGER,
  PRIMARY KEY (kind)
) WITHOUT ROWID;

CREATE TABLE user (
  name TEXT, password_hash TEXT, tags TEXT, guard INTEGER,
  PRIMARY KEY (name)
) WITHOUT ROWID;

CREATE TABLE permission (
  user TEXT, vhost TEXT, configure TEXT, write TEXT, read TEXT, guard INTEGER,
  PRIMARY KEY (user, vhost)
) WITHOUT ROWID;

CREATE TABLE topic_permission (
  user TEXT, vhost TEXT, exchange TEXT, write TEXT, read TEXT, guard INTEGER,
  PRIMARY KEY (user, vhost, exchange)
) WITHOUT ROWID;

CREATE TABLE app_user (
  vhost TEXT, app_id TEXT, user TEXT, guard INTEGER,
  PRIMARY KEY (vhost, app_id)
) WITHOUT ROWID;

CREATE TABLE vhost (
  name TEXT, vhost_id INTEGER, max_queues INTEGER, max_connections INTEGER, max_messages INTEGER, guard INTEGER,
  PRIMARY KEY (name)
) WITHOUT ROWID;

CREATE TABLE policy (
  vhost TEXT, kind TEXT, name TEXT, pattern TEXT, apply_to TEXT, priority INTEGER, definition TEXT, guard INTEGER,
  PRIMARY KEY (vhost, kind, name)
) WITHOUT ROWID;

CREATE TABLE release_note (
  app_id TEXT, queue TEXT, vhost TEXT, queue_id TEXT, released_at INTEGER, released_by TEXT, interrupted INTEGER,
  position INTEGER, ends TEXT, guard INTEGER,
  PRIMARY KEY (app_id, queue, vhost)
) WITHOUT ROWID;

CREATE TABLE write_user (
  vhost TEXT, token TEXT, user TEXT, guard INTEGER,
  PRIMARY KEY (vhost, token)
) WITHOUT ROWID;

-- no row -> written by the commits it tells of -> packed with others (put again under the number of the first) -> dropped.
CREATE TABLE history (
  number INTEGER, first INTEGER, last INTEGER, ended_at INTEGER, packed INTEGER, commits BLOB, guard INTEGER,
  PRIMARY KEY (number)
);
