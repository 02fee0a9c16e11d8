package main

import (
	"errors"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// refusals: reply codes and texts, and what stays open after them.
func refusals() {
	channelErrors()
	connectionErrors()
}

func channelErrors() {
	missing := "NOT_FOUND - no queue 'go-missing' in vhost '/'"
	check("a passive declare of a missing queue is 404", func(*amqp.Channel) {
		refused(404, missing, func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclarePassive("go-missing", false, false, false, false, nil)
			return err
		})
	})
	check("consuming from a missing queue is 404", func(*amqp.Channel) {
		refused(404, missing, func(ch *amqp.Channel) error {
			_, err := ch.Consume("go-missing", "", true, false, false, false, nil)
			return err
		})
	})
	check("publishing to a missing exchange is 404", func(*amqp.Channel) {
		refused(404, "NOT_FOUND - no exchange 'go-missing' in vhost '/'", func(ch *amqp.Channel) error {
			return send(ch, "go-missing", "", false, persistent("a"))
		})
	})
	check("deleting what is missing is no error", func(ch *amqp.Channel) {
		equal("messages", 0, got(ch.QueueDelete("go-missing", false, false, false)))
		must(ch.ExchangeDelete("go-missing", false, false))
	})
	check("declaring a reserved name is 403", func(*amqp.Channel) {
		refused(403, "ACCESS_REFUSED - exchange name 'amq.go' contains reserved prefix 'amq.*'", func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare("amq.go", "direct", false, false, false, false, nil)
		})
	})
	check("another connection's exclusive queue is 405", func(*amqp.Channel) {
		owner := connect()
		q := got(got(owner.Channel()).QueueDeclare("", false, false, true, false, nil)).Name
		text := "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '" + q + "' in vhost '/'. It could be originally declared on " +
			"another connection or the exclusive property value does not match that of the original declaration."
		refused(405, text, func(ch *amqp.Channel) error {
			_, _, err := ch.Get(q, true)
			return err
		})
		must(owner.Close())
	})
	check("declaring a queue again with another argument is 406", func(ch *amqp.Channel) {
		q := queue(ch, amqp.Table{"x-max-length": 5})
		text := "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue '" + q + "' in vhost '/': received '6' but current is '5'"
		refused(406, text, func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclare(q, true, false, false, false, amqp.Table{"x-max-length": 6})
			return err
		})
	})
	check("an unknown delivery tag is 406", func(*amqp.Channel) {
		refused(406, "PRECONDITION_FAILED - unknown delivery tag 7", func(ch *amqp.Channel) error { return ch.Ack(7, false) })
	})
	check("many channels are closed by errors and their numbers are used again", func(ch *amqp.Channel) {
		for i := 0; i < 100; i++ {
			victim := channel()
			_, err := victim.QueueDeclarePassive("go-missing", false, false, false, false, nil)
			var refusal *amqp.Error
			equal("an error of the server", true, errors.As(err, &refusal) && refusal.Server)
			equal("code", 404, refusal.Code)
		}
		q := queue(ch)
		publish(ch, q, "a")
		equal("bodies", []string{"a"}, drain(q))
	})
}

func connectionErrors() {
	check("an unknown exchange type ends the connection with 503", func(*amqp.Channel) {
		ended(503, "COMMAND_INVALID - unknown exchange type 'x-nonsense'", func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare(name(), "x-nonsense", false, false, false, false, nil)
		})
	})
	check("a consumer tag used twice ends the connection with 530", func(*amqp.Channel) {
		ended(530, "NOT_ALLOWED - attempt to reuse consumer tag 'twice'", func(ch *amqp.Channel) error {
			q := got(ch.QueueDeclare("", false, false, true, false, nil)).Name
			consume(ch, q, "twice", true)
			_, err := ch.Consume(q, "twice", true, false, false, false, nil)
			return err
		})
	})
	check("immediate ends the connection with 540", func(*amqp.Channel) {
		ended(540, "NOT_IMPLEMENTED - immediate=true", func(ch *amqp.Channel) error {
			//lint:ignore SA1019 the deprecated flag is what is tested
			return ch.Publish("", "q", false, true, persistent("a"))
		})
	})
	check("a wrong password is refused", func(*amqp.Channel) {
		_, err := amqp.DialConfig(url, amqp.Config{SASL: []amqp.Authentication{&amqp.PlainAuth{Username: "guest", Password: "wrong"}}})
		equal("refused", true, errors.Is(err, amqp.ErrCredentials))
	})
	check("an unknown virtual host is 530", func(*amqp.Channel) {
		_, err := amqp.DialConfig(url, amqp.Config{Vhost: "nowhere"})
		var refusal *amqp.Error
		equal("an error of the server", true, errors.As(err, &refusal))
		equal("reply", "530 NOT_ALLOWED - vhost nowhere not found", fmt.Sprint(refusal.Code, " ", refusal.Reason))
	})
}
