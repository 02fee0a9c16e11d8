//go:build ignore

// Consumes ten orders, publishes an invoice for each, and commits both in one transaction.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	amqp "github.com/rabbitmq/amqp091-go"
)

func main() {
	url := "amqp://guest:guest@127.0.0.1:5672"
	if len(os.Args) > 1 {
		url = os.Args[1]
	}
	if err := run(url); err != nil {
		log.Fatal(err)
	}
}

func run(url string) error {
	connection, err := amqp.Dial(url)
	if err != nil {
		return err
	}
	defer connection.Close()
	channel, err := connection.Channel()
	if err != nil {
		return err
	}
	for _, queue := range []string{"orders", "invoices"} {
		if _, err := channel.QueueDeclare(queue, true, false, false, false, nil); err != nil {
			return err
		}
	}
	if err := channel.Tx(); err != nil {
		return err
	}

	for number := 1; number <= 10; number++ {
		if err := publish(channel, "orders", fmt.Sprint("order ", number)); err != nil {
			return err
		}
	}
	if err := channel.TxCommit(); err != nil { // ten orders become visible at once
		return err
	}

	for {
		order, found, err := channel.Get("orders", false)
		if err != nil {
			return err
		}
		if !found {
			break
		}
		if err := publish(channel, "invoices", "invoice for "+string(order.Body)); err != nil {
			return err
		}
		if err := order.Ack(false); err != nil {
			return err
		}
	}
	if err := channel.TxCommit(); err != nil { // the orders are consumed and the invoices published: both or neither
		return err
	}
	invoices, err := channel.QueueDeclarePassive("invoices", true, false, false, false, nil)
	if err != nil {
		return err
	}
	fmt.Println(invoices.Messages, "invoices")
	return nil
}

func publish(channel *amqp.Channel, queue, body string) error {
	message := amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte(body)}
	return channel.PublishWithContext(context.Background(), "", queue, false, false, message)
}
