"""Runs in a child process: raw Mooncake, driven line by line by a test (see `raw.py`).

Each line on stdin is a JSON object {"code": ...}: Python to execute; its variable `result` comes back as JSON.
For tests alone: what is executed comes from the test that started the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import traceback
from typing import Any


def main() -> None:
    names: dict[str, Any] = {"ctypes": ctypes, "os": os, "threading": threading}
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line)["code"], names)
            answer = {"result": names["result"]}
        except Exception:  # noqa: BLE001 -- the test has to hear of it
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
