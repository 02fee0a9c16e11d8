"""Each command on an object that does not exist, and with a value that is none of the values: one clear error, and
nothing that looks like an answer.

Not here: addresses of brokers, options that exclude each other, hostile names (``test_adversary.py``).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from broker_core.launcher import Broker
from tests.cli.test_adversary import COMMANDS
from txmq import cli

# ``there`` is a queue with one message and an app that has decided one batch
ABSENT = """
    queue declare q --argument x-overflow=bogus
    queue declare q --argument x-queue-type=bogus
    queue purge absent --yes
    queue delete absent --yes
    queue skip-damaged absent --yes
    exchange declare e bogus
    exchange bind absent there
    exchange bind amq.direct absent
    exchange unbind absent there key --yes
    exchange unbind amq.direct absent key --yes
    exchange unbind amq.direct there absent --yes
    exchange unbind amq.direct there key --argument a=1 --yes
    exchange delete absent --yes
    message show absent 0
    message show there 99
    message move absent --to there --yes
    message move there --to absent --yes
    message move there --back --reason bogus --yes
    message publish --exchange absent --routing-key there body
    message publish --routing-key absent body
    message peek absent
    message peek there --offset 99
    connection consumers --queue absent
    connection channels --queue absent
    connection close absent --yes
    tx list --queue absent
    tx recover --of absent
    tx commit absent --yes
    tx rollback absent --yes
    tx rollback --all --of absent --yes
    tx forget absent --yes
    history list --last 0
    history show 99
    history show absent/1
    app chown there absent
    app ledger absent
    app ledger absent --batch 1
    app ledger there --batch 99
    app ledger there --table /absent
    app unapplied absent
    app unapplied absent --rows 2
    app discard absent --yes
    app skip absent 1 --to rows --yes
    app release absent there --yes
    app release absent absent --yes
    user add absent --tag bogus
    user delete absent --yes
    user passwd absent
    user tag absent administrator
    permission set absent .* .* .*
    permission clear absent --yes
    permission set-topic absent amq.topic .* .*
    permission clear-topic absent
    vhost add absent --max-queues bogus
    vhost limit absent --max-queues 1
    vhost delete absent --yes
    policy set p .* {"bogus":1}
    policy set p .* {"overflow":"bogus"}
    policy set p .* {"x-cache-size":1}
    policy set p .* {"max-length":1} --apply-to bogus
    policy delete absent --yes
    policy delete absent --operator --yes
    broker backup --to there /absent
    broker import /absent
    broker verify /absent
    broker salvage /absent --to rows
    serve --data /absent --log-format bogus
    top --interval 0
    completion bogus
"""
# of all that there is, or of what is yet to be: no argument names an object
WHOLE = {
    *("status", "doctor", "queue list", "exchange list", "exchange bindings", "connection list", "app list"),
    *("app staged", "user list", "permission list", "vhost list", "policy list", "broker export"),
    "broker setup",  # what names yet to be need; nothing here
}
CASES = [line.split() for line in ABSENT.strip().splitlines()]
WITHOUT_BROKER = {"broker verify", "broker salvage", "serve", "completion"}


def words_of(case: list[str]) -> str:
    return next(word for word in (" ".join(case[:2]), case[0]) if tuple(word.split()) in COMMANDS)


def test_the_cases_are_of_all_commands() -> None:
    assert {words_of(case) for case in CASES} | WHOLE == {" ".join(words) for words in COMMANDS}


@pytest.fixture
def there(broker: Broker, url: str) -> str:
    with broker.channel() as channel:
        channel.queue_declare("there")
        channel.publish(b"x", routing_key="there")
        channel.queue_bind("there", "amq.direct", "key")
    opened = broker.engine.open_batch("there", "query", 0, "fail")
    broker.engine.commit_batch("there", "query", 0, opened.token, [])
    return url


def test_none_is_silent(
    there: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for case in CASES:
        monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
        address = [] if words_of(case) in WITHOUT_BROKER or "--table" in case else ["--url", there]
        try:
            code = cli.main([*case, *address])
        except SystemExit as ended:
            code = int(str(ended.code))
        printed = capsys.readouterr()
        assert (code in (1, 2), printed.out) == (True, ""), case
        *usage, line = printed.err.splitlines()
        assert line.startswith("txmq: ") and len(usage) == code - 1, (case, printed.err)
        assert not (tmp_path / "rows").exists(), case


def test_what_exists_and_is_empty_is_an_empty_list(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    for case in (
        "app unapplied there",
        "connection consumers --queue there",
        "connection channels --queue there",
        "tx list --queue there",
        "tx recover --of guest",
        "message peek there --offset 1",
    ):
        assert (cli.main([*case.split(), "--url", there]), *capsys.readouterr()) == (0, "", ""), case
    assert cli.main(["app", "ledger", "there", "--url", there]) == 0
    assert capsys.readouterr().out
