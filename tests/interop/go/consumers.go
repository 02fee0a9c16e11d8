package main

import (
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// consumers: deliveries and what settles them.
func consumers() {
	deliveries()
	settling()
	sharing()
}

func deliveries() {
	check("1000 messages arrive once each and in order", func(ch *amqp.Channel) {
		q := queue(ch)
		arriving := consume(ch, q, "", true)
		sent := []string{}
		for i := 0; i < 1000; i++ {
			sent = append(sent, fmt.Sprint("message ", i))
			publish(ch, q, sent[i])
		}
		equal("bodies", sent, bodies(arriving, 1000))
		nothing(arriving)
	})
	check("prefetch limits one consumer until it acks", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b", "c")
		must(ch.Qos(2, 0, false))
		arriving := consume(ch, q, "", false)
		first := next(arriving)
		next(arriving)
		nothing(arriving)
		must(first.Ack(false))
		equal("third", []string{"c"}, bodies(arriving, 1))
	})
	check("a cancelled consumer gets nothing more and may still ack", func(ch *amqp.Channel) {
		q := queue(ch)
		arriving := consume(ch, q, "mine", false)
		publish(ch, q, "a")
		delivery := next(arriving)
		equal("tag", "mine", delivery.ConsumerTag)
		must(ch.Cancel("mine", false))
		publish(ch, q, "b")
		nothing(arriving)
		must(delivery.Ack(false))
		must(ch.Close())
		equal("left", []string{"b"}, drain(q))
	})
	check("deleting the queue notifies its consumer", func(ch *amqp.Channel) {
		q := queue(ch)
		cancelled := ch.NotifyCancel(make(chan string, 1))
		consume(ch, q, "mine", true)
		got(channel().QueueDelete(q, false, false, false))
		equal("cancelled", "mine", next(cancelled))
		equal("closed", false, ch.IsClosed())
	})
}

func settling() {
	check("what a closed channel held comes again in order as redelivered", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b", "c")
		arriving := consume(ch, q, "", false)
		must(next(arriving).Ack(false))
		next(arriving)
		next(arriving)
		must(ch.Close())
		awaitReady(q, 2)
		reader := channel()
		delivery := get(reader, q)
		equal("body", "b", string(delivery.Body))
		equal("redelivered", true, delivery.Redelivered)
		must(reader.Close())
	})
	check("recover gives everything unacked again", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b")
		arriving := consume(ch, q, "", false)
		equal("redelivered", false, next(arriving).Redelivered)
		next(arriving)
		must(ch.Recover(true))
		again := next(arriving)
		equal("body", "a", string(again.Body))
		equal("redelivered", true, again.Redelivered)
		equal("tag", uint64(3), again.DeliveryTag)
		equal("rest", []string{"b"}, bodies(arriving, 1))
	})
	check("reject drops or requeues", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "dropped", "requeued")
		must(get(ch, q).Reject(false))
		must(get(ch, q).Reject(true))
		awaitReady(q, 1)
		delivery := get(ch, q)
		equal("body", "requeued", string(delivery.Body))
		equal("redelivered", true, delivery.Redelivered)
	})
	check("nack with multiple settles everything up to its tag", func(ch *amqp.Channel) {
		q := queue(ch)
		publish(ch, q, "a", "b", "c")
		get(ch, q)
		second, third := get(ch, q), get(ch, q)
		must(second.Nack(true, false))
		must(third.Ack(false))
		must(ch.Close())
		equal("left", []string{}, drain(q))
	})
	check("a rejected message is dead-lettered with x-death", func(ch *amqp.Channel) {
		dead := queue(ch)
		q := queue(ch, amqp.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
		publish(ch, q, "a")
		must(get(ch, q).Reject(false))
		headers := next(consume(ch, dead, "", true)).Headers
		death := headers["x-death"].([]any)[0].(amqp.Table)
		equal("reason", "rejected", death["reason"])
		equal("queue", q, death["queue"])
		equal("count", int64(1), death["count"])
		equal("keys", []any{q}, death["routing-keys"])
	})
}

func sharing() {
	check("an exclusive consumer keeps others out", func(ch *amqp.Channel) {
		q := queue(ch)
		got(ch.Consume(q, "only", false, true, false, false, nil))
		refused(403, "ACCESS_REFUSED - queue '"+q+"' in vhost '/' in exclusive use", func(other *amqp.Channel) error {
			_, err := other.Consume(q, "", false, false, false, false, nil)
			return err
		})
	})
	check("two consumers take turns", func(ch *amqp.Channel) {
		q := queue(ch)
		left, right := consume(ch, q, "", true), consume(ch, q, "", true)
		publish(ch, q, "a", "b", "c", "d")
		equal("all", []string{"a", "b", "c", "d"}, sorted(append(bodies(left, 2), bodies(right, 2)...)))
	})
	check("a consumer of higher priority comes first until its credit is gone", func(ch *amqp.Channel) {
		q := queue(ch)
		must(ch.Qos(2, 0, false))
		low := consume(ch, q, "", false)
		high := got(ch.Consume(q, "", false, false, false, false, amqp.Table{"x-priority": 10}))
		publish(ch, q, "a", "b", "c")
		equal("high", []string{"a", "b"}, bodies(high, 2))
		equal("low", []string{"c"}, bodies(low, 1))
	})
}
