package main

import (
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// transactions: what tx.select, tx.commit and tx.rollback promise.
func transactions() {
	transactionalPublishes()
	transactionalAcks()
	transactionRefusals()
}

func transactionalPublishes() {
	check("others see the publishes of a transaction only after its commit", func(ch *amqp.Channel) {
		first, second := queue(ch), queue(ch)
		must(ch.Tx())
		publish(ch, first, "a", "b")
		publish(ch, second, "c")
		other := connect()
		reader := got(other.Channel())
		empty(reader, first)
		empty(reader, second)
		must(ch.TxCommit())
		equal("first", 2, got(reader.QueueDeclarePassive(first, true, false, false, false, nil)).Messages)
		equal("second", 1, got(reader.QueueDeclarePassive(second, true, false, false, false, nil)).Messages)
		must(other.Close())
		equal("order", []string{"a", "b"}, drain(first))
	})
	check("a rollback drops the publishes and the channel goes on", func(ch *amqp.Channel) {
		q := queue(ch)
		must(ch.Tx())
		publish(ch, q, "dropped")
		must(ch.TxRollback())
		publish(ch, q, "kept")
		must(ch.TxCommit())
		equal("bodies", []string{"kept"}, drain(q))
	})
	check("select may be repeated and an empty commit is fine", func(ch *amqp.Channel) {
		q := queue(ch)
		must(ch.Tx())
		publish(ch, q, "a")
		must(ch.Tx())
		must(ch.TxCommit())
		must(ch.TxCommit())
		must(ch.TxRollback())
		equal("bodies", []string{"a"}, drain(q))
	})
	check("a mandatory message without a queue comes back before commit-ok", func(ch *amqp.Channel) {
		returns := ch.NotifyReturn(make(chan amqp.Return, 1))
		must(ch.Tx())
		must(send(ch, "", name(), true, persistent("lost")))
		must(ch.TxCommit())
		select {
		case back := <-returns:
			equal("returned", "312 NO_ROUTE lost", fmt.Sprint(back.ReplyCode, " ", back.ReplyText, " ", string(back.Body)))
		default:
			panic("commit-ok came first")
		}
	})
	check("a commit of 5000 messages is whole", func(ch *amqp.Channel) {
		q := queue(ch)
		must(ch.Tx())
		for i := 0; i < 5000; i++ {
			publish(ch, q, fmt.Sprint("message ", i))
		}
		must(ch.TxCommit())
		equal("count", 5000, got(ch.QueueDeclarePassive(q, true, false, false, false, nil)).Messages)
	})
	only("txmq", "a commit that a full reject-publish queue cannot take fails whole with 406", func(ch *amqp.Channel) {
		full, other := queue(ch, amqp.Table{"x-max-length": 1, "x-overflow": "reject-publish"}), queue(ch)
		closed := ch.NotifyClose(make(chan *amqp.Error, 1))
		must(ch.Tx())
		publish(ch, other, "a")
		publish(ch, full, "b", "c")
		_ = ch.TxCommit()
		equal("code", 406, next(closed).Code)
		equal("full queue", []string{}, drain(full))
		equal("other queue", []string{}, drain(other))
	})
}

func transactionalAcks() {
	check("consume, publish, ack and commit move a message", func(ch *amqp.Channel) {
		source, sink := queue(ch), queue(ch)
		publish(ch, source, "in")
		must(ch.Tx())
		delivery := next(consume(ch, source, "", false))
		publish(ch, sink, "out of "+string(delivery.Body))
		must(delivery.Ack(false))
		must(ch.TxCommit())
		must(ch.Close())
		equal("source", []string{}, drain(source))
		equal("sink", []string{"out of in"}, drain(sink))
	})
	check("acked tags are unacked again after a rollback and may be acked again", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b")
		must(ch.Tx())
		first, second := get(ch, q), get(ch, q)
		must(second.Ack(true))
		must(ch.TxRollback())
		empty(ch, q)
		must(first.Ack(false))
		must(second.Ack(false))
		must(ch.TxCommit())
		must(ch.Close())
		equal("bodies", []string{}, drain(q))
	})
	check("a nack in a transaction requeues at commit", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a")
		must(ch.Tx())
		must(get(ch, q).Nack(false, true))
		empty(ch, q)
		must(ch.TxCommit())
		awaitReady(q, 1)
		equal("redelivered", true, get(ch, q).Redelivered)
	})
	check("prefetch credit comes back at commit", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b")
		must(ch.Tx())
		must(ch.Qos(1, 0, false))
		deliveries := consume(ch, q, "", false)
		must(next(deliveries).Ack(false))
		nothing(deliveries)
		must(ch.TxCommit())
		equal("second", []string{"b"}, bodies(deliveries, 1))
	})
	check("recover leaves out what the open transaction acked", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "acked", "open")
		must(ch.Tx())
		must(get(ch, q).Ack(false))
		get(ch, q)
		must(ch.Recover(true))
		again := get(ch, q)
		equal("body", "open", string(again.Body))
		equal("redelivered", true, again.Redelivered)
		empty(ch, q)
	})
	check("closing the channel rolls back and requeues acked and unacked", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b")
		must(ch.Tx())
		must(get(ch, q).Ack(false))
		get(ch, q)
		publish(ch, q, "never")
		must(ch.Close())
		awaitReady(q, 2)
		reader := channel()
		for _, body := range []string{"a", "b"} {
			delivery := get(reader, q)
			equal("body", body, string(delivery.Body))
			equal("redelivered", true, delivery.Redelivered)
			must(delivery.Ack(false))
		}
		must(reader.Close())
	})
}

func transactionRefusals() {
	mode := "PRECONDITION_FAILED - "
	check("commit without select is 406", func(*amqp.Channel) {
		refused(406, mode+"channel is not transactional", func(ch *amqp.Channel) error { return ch.TxCommit() })
	})
	check("rollback without select is 406", func(*amqp.Channel) {
		refused(406, mode+"channel is not transactional", func(ch *amqp.Channel) error { return ch.TxRollback() })
	})
	check("confirm.select on a transactional channel is 406", func(*amqp.Channel) {
		refused(406, mode+"cannot switch from tx to confirm mode", func(ch *amqp.Channel) error {
			must(ch.Tx())
			return ch.Confirm(false)
		})
	})
	check("tx.select on a confirming channel is 406", func(*amqp.Channel) {
		refused(406, mode+"cannot switch from confirm to tx mode", func(ch *amqp.Channel) error {
			must(ch.Confirm(false))
			return ch.Tx()
		})
	})
	check("an unknown delivery tag in a transaction is 406 at once", func(*amqp.Channel) {
		refused(406, mode+"unknown delivery tag 42", func(ch *amqp.Channel) error {
			must(ch.Tx())
			return ch.Ack(42, false)
		})
	})
	check("acking a tag twice in a transaction is 406", func(*amqp.Channel) {
		refused(406, mode+"unknown delivery tag 1", func(ch *amqp.Channel) error {
			q := queue(ch)
			publish(ch, q, "a")
			must(ch.Tx())
			delivery := get(ch, q)
			must(delivery.Ack(false))
			return delivery.Ack(false)
		})
	})
}
