"""The rules of nft in ``examples/production``, loaded by the kernel in a network namespace of their own.

Not here: what the broker itself limits (``flight/test_connection_limit.py``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "examples" / "production" / "connections.nft"
# In the namespace: its loopback is brought up, and one peer connects until it is refused, then another one.
ASKED = """
import fcntl, socket, struct, subprocess, sys
with socket.socket() as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x49))  # SIOCSIFFLAGS: up, running, loopback
subprocess.run(["nft", "-f", "-"], input=sys.argv[1], text=True, check=True)

def connected(family, own, at):
    client = socket.socket(family)
    client.settimeout(30)
    client.bind((own, 0))
    client.connect((at, 5673))
    return client

for family, at, other in ((socket.AF_INET, "127.0.0.1", "127.0.0.2"), (socket.AF_INET6, "::1", None)):
    with socket.create_server((at, 5673), family=family, backlog=100):
        held = []
        try:
            while len(held) < 60:
                held.append(connected(family, at, at))
        except ConnectionRefusedError:
            pass
        print(at, len(held))
        if other:
            connected(family, other, at).close()
            print(other, "comes in")
        held.pop().close()
"""


@pytest.fixture
def in_namespace() -> list[str]:
    """The beginning of a command that runs in a network namespace of its own, where nft may load rules."""
    if not (shutil.which("nft") and shutil.which("unshare")):
        pytest.skip("nft or unshare is not installed")
    for flags in ("-n", "-rn"):
        if subprocess.run(["unshare", flags, "nft", "list", "ruleset"], capture_output=True).returncode == 0:
            return ["unshare", flags]
    pytest.skip("this user may make no network namespace, or the kernel has no nf_tables")


def test_the_rules_refuse_a_peer_its_51st_connection_and_no_other(
    in_namespace: list[str],
) -> None:
    command = [*in_namespace, sys.executable, "-c", ASKED, RULES.read_text()]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["127.0.0.1 50", "127.0.0.2 comes in", "::1 50"]
