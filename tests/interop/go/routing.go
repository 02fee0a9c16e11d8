package main

import (
	"bytes"
	"fmt"
	"math"
	"math/rand"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// routing: exchanges of all kinds, field tables of all types and bodies of all sizes.
func routing() {
	bindings()
	fields()
	content()
}

func bindings() {
	check("a message passes from exchange to exchange and reaches each queue once", func(ch *amqp.Channel) {
		first, second, q := exchange(ch, "topic"), exchange(ch, "fanout"), queue(ch)
		must(ch.ExchangeBind(second, "a.*", first, false, nil))
		must(ch.ExchangeBind(first, "#", second, false, nil))
		must(ch.QueueBind(q, "#", first, false, nil))
		must(ch.QueueBind(q, "", second, false, nil))
		must(send(ch, first, "a.b", false, persistent("once")))
		awaitReady(q, 1)
		equal("bodies", []string{"once"}, drain(q))
		must(ch.ExchangeUnbind(second, "a.*", first, false, nil))
		must(ch.QueueUnbind(q, "#", first, nil))
		must(send(ch, first, "a.b", false, persistent("nowhere")))
		equal("after unbind", []string{}, drain(q))
	})
	check("a headers exchange compares typed values, all or any", func(ch *amqp.Channel) {
		e, all, either := exchange(ch, "headers"), queue(ch), queue(ch)
		must(ch.QueueBind(all, "", e, false, amqp.Table{"x-match": "all", "number": int32(7), "text": "t", "flag": true}))
		must(ch.QueueBind(either, "", e, false, amqp.Table{"x-match": "any", "number": int32(7), "text": "t", "flag": true}))
		messages := []struct {
			body    string
			headers amqp.Table
		}{
			{"complete", amqp.Table{"number": int32(7), "text": "t", "flag": true}},
			{"long number", amqp.Table{"number": int64(7), "text": "t", "flag": true}},
			{"one", amqp.Table{"flag": true}},
			{"text for number", amqp.Table{"number": "7"}},
			{"none", nil},
		}
		for _, message := range messages {
			must(send(ch, e, "", false, amqp.Publishing{Headers: message.headers, Body: []byte(message.body)}))
		}
		awaitReady(either, 3)
		equal("all", []string{"complete", "long number"}, drain(all))
		equal("any", []string{"complete", "long number", "one"}, drain(either))
	})
}

func fields() {
	check("field tables of all types come back as they were", func(ch *amqp.Channel) {
		sent := everyType()
		sent["nested"] = everyType()
		sent["array"] = []any{int32(1), "two", 3.0, nil, everyType(), []any(nil)}
		q := queue(ch)
		arriving := consume(ch, q, "", true)
		must(send(ch, "", q, false, amqp.Publishing{Headers: sent}))
		equal("headers", sent, next(arriving).Headers)
	})
	check("field tables of all types are dead-lettered as they were", func(ch *amqp.Channel) {
		sent := everyType()
		sent["nested"] = everyType()
		dead := queue(ch)
		q := queue(ch, amqp.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
		must(send(ch, "", q, false, amqp.Publishing{Headers: sent}))
		must(get(ch, q).Reject(false))
		found := next(consume(ch, dead, "", true)).Headers
		for header, value := range sent {
			equal(header, value, found[header])
		}
	})
}

func everyType() amqp.Table {
	return amqp.Table{
		"bool":           true,
		"unsigned byte":  byte(255),
		"byte":           int8(-128),
		"short":          int16(math.MinInt16),
		"unsigned short": uint16(math.MaxUint16),
		"int":            int32(math.MinInt32),
		"unsigned int":   uint32(math.MaxUint32),
		"long":           int64(math.MinInt64),
		"float":          float32(1.5),
		"double":         -0.1,
		"decimal":        amqp.Decimal{Scale: 3, Value: 123456789},
		"string":         "übergroß ✓",
		"bytes":          []byte{0, 255, 128},
		"timestamp":      time.Unix(1_700_000_000, 0),
		"void":           nil,
		"":               "",
	}
}

func content() {
	check("all properties come back as they were", func(ch *amqp.Channel) {
		q := queue(ch)
		arriving := consume(ch, q, "", true)
		sent := amqp.Publishing{
			Headers: amqp.Table{"h": int32(1)}, ContentType: "text/plain", ContentEncoding: "identity", DeliveryMode: 2, Priority: 3,
			CorrelationId: "c", ReplyTo: "r", Expiration: "60000", MessageId: "m", Timestamp: time.Unix(1_700_000_000, 0), Type: "t",
			UserId: "guest", AppId: "a", Body: []byte("body"),
		}
		must(send(ch, "", q, false, sent))
		d := next(arriving)
		equal("properties", sent, amqp.Publishing{
			Headers: d.Headers, ContentType: d.ContentType, ContentEncoding: d.ContentEncoding, DeliveryMode: d.DeliveryMode, Priority: d.Priority,
			CorrelationId: d.CorrelationId, ReplyTo: d.ReplyTo, Expiration: d.Expiration, MessageId: d.MessageId, Timestamp: d.Timestamp,
			Type: d.Type, UserId: d.UserId, AppId: d.AppId, Body: d.Body,
		})
		equal("routing", []string{"", q}, []string{d.Exchange, d.RoutingKey})
	})
	check("bodies from nothing to 20 MB come back as they were", func(ch *amqp.Channel) {
		frame := connection.Config.FrameSize
		q := queue(ch)
		arriving := consume(ch, q, "", true)
		for _, size := range []int{0, 1, 255, frame - 9, frame - 8, frame - 7, frame, 3 * (frame - 8), 20_000_000} {
			body := make([]byte, size)
			rand.New(rand.NewSource(int64(size))).Read(body)
			must(send(ch, "", q, false, amqp.Publishing{Body: body}))
			equal(fmt.Sprint("body of ", size, " bytes is the same"), true, bytes.Equal(body, next(arriving).Body))
		}
	})
}
