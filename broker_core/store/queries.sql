-- The catalog's own statements, by name. Those of the record tables are made from the record classes (catalog.py).

-- name: read_format
SELECT format FROM meta

-- name: read_meta
SELECT format, sequence, next_block_id, next_segment, clean, guard FROM meta WHERE id = 1

-- name: set_meta
INSERT OR REPLACE INTO meta (id, format, sequence, next_block_id, next_segment, clean, guard) VALUES (1, ?, ?, ?, ?, ?, ?)

-- name: put_segment
INSERT OR REPLACE INTO segment (segment, kind, schema, state, guard) VALUES (?, ?, ?, ?, ?)

-- name: drop_segment
DELETE FROM segment WHERE segment = ?

-- name: segment
SELECT segment, kind, schema, state, guard FROM segment WHERE segment = ?

-- name: segments
SELECT segment, kind, schema, state, guard FROM segment ORDER BY segment

-- name: put_block
INSERT OR REPLACE INTO block (block_id, segment, position, length, rows, size_bytes, checksum, guard) VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: drop_block
DELETE FROM block WHERE block_id = ?

-- name: blocks
SELECT block_id, segment, position, length, rows, size_bytes, checksum, guard FROM block ORDER BY block_id

-- name: put_inbox
INSERT INTO inbox (id, count, messages, guard) VALUES (?, ?, ?, ?)

-- name: drop_inbox
DELETE FROM inbox WHERE id BETWEEN ? AND ?

-- name: inbox
SELECT id, count, messages, guard FROM inbox ORDER BY id
