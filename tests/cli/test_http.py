"""``txmq http``: what it refuses before it listens. The door itself: ``tests/server/http/test_http_kafka.py``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from txmq.cli import main

KAFKA = "kafka://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "txmq://127.0.0.1:1"], "a broker of txmq has this door itself: txmq serve --http"),
        (["--url", KAFKA, "--http", "0.0.0.0:1"], "--http is 0.0.0.0:1, which other hosts can reach"),
        (["--url", KAFKA, "--http", "nowhere"], "'nowhere'"),
        (["--url", KAFKA, "--tls-cert", "cert.pem"], "one of --tls-cert and --tls-key is missing"),
        (["--url", KAFKA, "--audit", "/nowhere"], "--audit is '/nowhere', which is no directory"),
        (["--url", KAFKA, "--users", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["http", *options]) == 1
    told = capsys.readouterr()
    assert told.out == "" and says in told.err and told.err.count("\n") == 1


def test_without_the_packages_of_the_door_the_remedy_is_in_the_error() -> None:
    without = (
        "import sys\nsys.modules['uvicorn'] = None\nfrom txmq.cli import main\n"
        f"sys.exit(main(['http', '--url', {KAFKA!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "pip install '.[http]'" in done.stderr
