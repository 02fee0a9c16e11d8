// Package main checks a broker with the official Go client. It prints one line per check: "ok NAME", "FAILED NAME: why" or
// "skipped NAME: why", and "kill the broker" where it wants that done.
//
// Not here: any rule of the broker. Invariant: what a check declared with queue or exchange is deleted after it.
package main

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"runtime/debug"
	"sort"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	timeout = 120 * time.Second
	quiet   = 150 * time.Millisecond // long enough for a delivery that must not come to arrive on loopback
)

var (
	url        string
	connection *amqp.Connection
	queues     []string
	exchanges  []string
	failed     bool
	names      int
)

var groups = map[string]func(){
	"transactions": transactions,
	"confirms":     confirms,
	"consumers":    consumers,
	"errors":       refusals,
	"routing":      routing,
	"restart":      restart,
}

func main() {
	if len(os.Args) != 3 || groups[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: checks GROUP URL")
		os.Exit(2)
	}
	url = os.Args[2]
	connection = connect()
	groups[os.Args[1]]()
	must(connection.Close())
	if failed {
		os.Exit(1)
	}
}

func check(name string, body func(ch *amqp.Channel)) {
	ch := channel()
	func() {
		defer func() {
			if failure := recover(); failure != nil {
				failed = true
				fmt.Printf("FAILED %s: %s\n", name, strings.ReplaceAll(fmt.Sprint(failure), "\n", " "))
				fmt.Fprintf(os.Stderr, "%s: %v\n%s\n", name, failure, debug.Stack())
			} else {
				fmt.Println("ok " + name)
			}
		}()
		body(ch)
	}()
	if connection.IsClosed() {
		connection = connect()
	} else if !ch.IsClosed() {
		must(ch.Close())
	}
	tidy()
}

// only runs a check of what only one product promises.
func only(product, name string, body func(ch *amqp.Channel)) {
	if connection.Properties["product"] == product {
		check(name, body)
	} else {
		fmt.Printf("skipped %s: only %s promises it\n", name, product)
	}
}

func tidy() {
	ch := channel()
	for _, queue := range queues {
		got(ch.QueueDelete(queue, false, false, false))
	}
	for _, exchange := range exchanges {
		must(ch.ExchangeDelete(exchange, false, false))
	}
	queues, exchanges = nil, nil
	must(ch.Close())
}

// connect opens a connection beside the one that the checks share.
func connect() *amqp.Connection {
	return got(amqp.DialConfig(url, amqp.Config{Heartbeat: 10 * time.Second, Locale: "en_US"}))
}

// channel opens another channel on the connection that the checks share.
func channel() *amqp.Channel {
	return got(connection.Channel())
}

// ---------------------------------------------------------------------------------------------------------------- topology

func name() string {
	names++
	return fmt.Sprintf("go-%d-%d-%d", os.Getpid(), time.Now().UnixNano(), names)
}

func queue(ch *amqp.Channel, arguments ...amqp.Table) string {
	queue := got(ch.QueueDeclare(name(), true, false, false, false, table(arguments))).Name
	queues = append(queues, queue)
	return queue
}

func exchange(ch *amqp.Channel, kind string, arguments ...amqp.Table) string {
	exchange := name()
	must(ch.ExchangeDeclare(exchange, kind, true, false, false, false, table(arguments)))
	exchanges = append(exchanges, exchange)
	return exchange
}

func table(arguments []amqp.Table) amqp.Table {
	if len(arguments) > 0 {
		return arguments[0]
	}
	return nil
}

// ---------------------------------------------------------------------------------------------------------------- messages

func persistent(body string) amqp.Publishing {
	return amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte(body)}
}

func send(ch *amqp.Channel, exchange, key string, mandatory bool, message amqp.Publishing) error {
	return ch.PublishWithContext(context.Background(), exchange, key, mandatory, false, message)
}

func publish(ch *amqp.Channel, queue string, bodies ...string) {
	for _, body := range bodies {
		must(send(ch, "", queue, false, persistent(body)))
	}
}

func get(ch *amqp.Channel, queue string) amqp.Delivery {
	delivery, found, err := ch.Get(queue, false)
	must(err)
	equal("a message is there", true, found)
	return delivery
}

func empty(ch *amqp.Channel, queue string) {
	delivery, found, err := ch.Get(queue, true)
	must(err)
	equal("a message is there ("+string(delivery.Body)+")", false, found)
}

// awaitReady waits until queue has this many ready messages, as another channel sees it.
func awaitReady(queue string, count int) {
	ch := channel()
	deadline := time.Now().Add(timeout)
	for {
		found := got(ch.QueueDeclarePassive(queue, true, false, false, false, nil)).Messages
		if found == count {
			break
		}
		if time.Now().After(deadline) {
			panic(fmt.Sprintf("expected %d ready messages in the queue, found %d", count, found))
		}
		time.Sleep(5 * time.Millisecond)
	}
	must(ch.Close())
}

// drain takes everything that is ready out of queue.
func drain(queue string) []string {
	ch := channel()
	bodies := []string{}
	for {
		delivery, found, err := ch.Get(queue, true)
		must(err)
		if !found {
			break
		}
		bodies = append(bodies, string(delivery.Body))
	}
	must(ch.Close())
	return bodies
}

func consume(ch *amqp.Channel, queue, tag string, noAck bool) <-chan amqp.Delivery {
	return got(ch.Consume(queue, tag, noAck, false, false, false, nil))
}

func next[T any](arriving <-chan T) T {
	select {
	case one, open := <-arriving:
		if !open {
			panic("the channel was closed")
		}
		return one
	case <-time.After(timeout):
		panic("nothing came")
	}
}

func bodies(deliveries <-chan amqp.Delivery, count int) []string {
	found := []string{}
	for len(found) < count {
		found = append(found, string(next(deliveries).Body))
	}
	return found
}

func nothing(deliveries <-chan amqp.Delivery) {
	select {
	case delivery, open := <-deliveries:
		if open {
			panic(fmt.Sprintf("unexpected delivery of %q", delivery.Body))
		}
	case <-time.After(quiet):
	}
}

func sorted(texts []string) []string {
	sort.Strings(texts)
	return texts
}

// ------------------------------------------------------------------------------------------------------------ expectations

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func got[T any](value T, err error) T {
	must(err)
	return value
}

func equal(what string, expected, found any) {
	if !reflect.DeepEqual(expected, found) {
		panic(fmt.Sprintf("%s: expected %#v, found %#v", what, expected, found))
	}
}

// refused: action closes its channel with this code and text; another channel of the connection goes on.
func refused(code int, text string, action func(ch *amqp.Channel) error) {
	bystander := channel()
	still := got(bystander.QueueDeclare("", false, false, true, false, nil)).Name
	victim := channel()
	closed := victim.NotifyClose(make(chan *amqp.Error, 1))
	_ = action(victim)
	reason := next(closed)
	equal("reply", fmt.Sprint(code, " ", text), fmt.Sprint(reason.Code, " ", reason.Reason))
	equal("the connection is closed", false, connection.IsClosed())
	publish(bystander, still, "still here")
	equal("another channel", "still here", string(get(bystander, still).Body))
	must(bystander.Close())
}

// ended: action closes its whole connection with this code and text; the other connections go on.
func ended(code int, text string, action func(ch *amqp.Channel) error) {
	victim := connect()
	closed := victim.NotifyClose(make(chan *amqp.Error, 1))
	_ = action(got(victim.Channel()))
	reason := next(closed)
	equal("reply", fmt.Sprint(code, " ", text), fmt.Sprint(reason.Code, " ", reason.Reason))
	must(channel().Close())
}
