package main

import (
	"context"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// confirms: publisher confirms, and messages that come back.
func confirms() {
	check("a deferred confirmation of every message is an ack", func(ch *amqp.Channel) {
		q := queue(ch)
		must(ch.Confirm(false))
		waiting := []*amqp.DeferredConfirmation{}
		for i := 0; i < 500; i++ {
			waiting = append(waiting, deferred(ch, q, fmt.Sprint("message ", i)))
		}
		for i, each := range waiting {
			equal("delivery tag", uint64(i+1), each.DeliveryTag)
			equal("acked", true, acked(each))
		}
		awaitReady(q, 500)
	})
	check("each sequence number is confirmed exactly once and in order", func(ch *amqp.Channel) {
		q := queue(ch)
		must(ch.Confirm(false))
		events := ch.NotifyPublish(make(chan amqp.Confirmation, 500))
		for i := uint64(1); i <= 500; i++ {
			equal("sequence number", i, ch.GetNextPublishSeqNo())
			publish(ch, q, "message")
		}
		for i := uint64(1); i <= 500; i++ {
			equal("confirmation", amqp.Confirmation{DeliveryTag: i, Ack: true}, next(events))
		}
	})
	check("a full reject-publish queue nacks what it does not take", func(ch *amqp.Channel) {
		q := queue(ch, amqp.Table{"x-max-length": 2, "x-overflow": "reject-publish"})
		must(ch.Confirm(false))
		for _, expected := range []bool{true, true, false, false} {
			equal("acked", expected, acked(deferred(ch, q, "message")))
		}
		equal("taken", 2, len(drain(q)))
		equal("after room was made", true, acked(deferred(ch, q, "message")))
	})
	check("a mandatory message is returned before it is confirmed", func(ch *amqp.Channel) {
		must(ch.Confirm(false))
		returns := ch.NotifyReturn(make(chan amqp.Return, 1))
		events := ch.NotifyPublish(make(chan amqp.Confirmation, 1))
		must(send(ch, "", "go-nowhere", true, persistent("lost")))
		equal("confirmation", amqp.Confirmation{DeliveryTag: 1, Ack: true}, next(events))
		select {
		case back := <-returns:
			found := fmt.Sprint(back.ReplyCode, " ", back.ReplyText, " ", back.RoutingKey, " ", string(back.Body))
			equal("returned", "312 NO_ROUTE go-nowhere lost", found)
		default:
			panic("the confirmation came first")
		}
	})
	check("a message that no queue takes is confirmed", func(ch *amqp.Channel) {
		must(ch.Confirm(false))
		equal("acked", true, acked(deferred(ch, name(), "nowhere")))
	})
	check("a publish to a missing exchange closes the channel with 404", func(*amqp.Channel) {
		refused(404, "NOT_FOUND - no exchange 'go-missing' in vhost '/'", func(ch *amqp.Channel) error {
			must(ch.Confirm(false))
			return send(ch, "go-missing", "", false, persistent("a"))
		})
	})
}

func deferred(ch *amqp.Channel, queue, body string) *amqp.DeferredConfirmation {
	return got(ch.PublishWithDeferredConfirmWithContext(context.Background(), "", queue, false, false, persistent(body)))
}

func acked(confirmation *amqp.DeferredConfirmation) bool {
	limited, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return got(confirmation.WaitContext(limited))
}
