package main

import (
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// restart: what is there after the broker was killed and started again; the client reconnects by itself.
func restart() {
	victim := connect()
	closed := victim.NotifyClose(make(chan *amqp.Error, 1))
	ch := got(victim.Channel())
	durable := func() string { return got(ch.QueueDeclare(name(), true, false, false, false, nil)).Name }
	moved, left, taken := durable(), durable(), durable()
	must(ch.Tx())
	publish(ch, taken, "taken")
	for i := 0; i < 1000; i++ {
		publish(ch, []string{moved, left}[i%2], "message")
	}
	must(ch.TxCommit())
	must(get(ch, taken).Ack(false))
	publish(ch, moved, "never")
	fmt.Println("kill the broker")
	next(closed)
	reconnect()
	check("a committed transaction is whole in every queue after the broker was killed", func(*amqp.Channel) {
		equal("first", 500, len(drain(moved)))
		equal("second", 500, len(drain(left)))
	})
	check("an open transaction is rolled back by the broker being killed", func(ch *amqp.Channel) {
		delivery := get(ch, taken)
		equal("body", "taken", string(delivery.Body))
		equal("redelivered", true, delivery.Redelivered)
	})
}

func reconnect() {
	deadline := time.Now().Add(3 * timeout)
	for {
		again, err := amqp.Dial(url)
		if err == nil {
			connection = again
			return
		}
		if time.Now().After(deadline) {
			panic(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
