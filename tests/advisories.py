"""``python -m tests.advisories [--strict] requirements.lock``: whether a locked version has a known vulnerability.

pip-audit asks the database of OSV, which needs the network. Where that cannot be reached, the last line says so
and the exit code is 0, or 1 with ``--strict``; for a vulnerability it is 1.
Not here: weaknesses of the code (bandit, in ``pyproject.toml``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request

OSV = "https://api.osv.dev/v1/query"
PROBE_S = 5.0
LIMIT_S = 300.0
LOST = re.compile(
    r"\w*(?:ConnectionError|ServiceError|Timeout)\b[^\n]*"
)  # in what pip-audit says when it fails


def main(lock: str, url: str = OSV, *, strict: bool = False) -> int:
    """The exit code. ``strict``: what could not be asked is a failure too."""
    why = unreachable(url)
    if why:
        print(f"not audited: {url} cannot be reached: {why}")
        return int(strict)
    command = [sys.executable, "-m", "pip_audit", "--requirement", lock, "--disable-pip", "--format", "json"]
    command += ["--vulnerability-service", "osv", "--osv-url", url, "--progress-spinner", "off"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"not audited: {url} has not answered for {LIMIT_S:.0f} s")
        return int(strict)
    try:
        listed = json.loads(ended.stdout)["dependencies"]
    except ValueError:
        lost = LOST.findall(ended.stderr)
        if lost:
            print(f"not audited: {url} was lost: {lost[-1][:200]}")
            return int(strict)
        print(ended.stderr, file=sys.stderr)
        return 1
    found = [(each, vulnerability) for each in listed for vulnerability in each.get("vulns", ())]
    for each, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
        print(f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in {fixed}")
    if not found:
        print(f"no known vulnerability in {sum('skip_reason' not in each for each in listed)} packages")
    skipped = [each for each in listed if "skip_reason" in each]
    for each in skipped:
        print(f"not audited: {each['name']}: {each['skip_reason']}")
    return int(bool(found) or (strict and bool(skipped)))


def unreachable(url: str) -> str:
    """Why the database does not answer; "" if it does."""
    asked = json.dumps({"package": {"name": "pip", "ecosystem": "PyPI"}, "version": "26.0"}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=asked), timeout=PROBE_S) as answer:
            json.load(answer)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    *options, path = sys.argv[1:]
    sys.exit(main(path, os.environ.get("TXMQ_OSV_URL", OSV), strict="--strict" in options))
