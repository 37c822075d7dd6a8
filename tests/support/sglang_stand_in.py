"""A program that is called as an interpreter with SGLang would be, and starts in its place.

It writes down its command line and the file of its secrets, has a child, and answers ``/health``
and ``/model_info`` on its port. With the model ``broken`` it ends with a message instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = sys.argv[1:]
def option(name):
    return arguments[arguments.index(name) + 1] if name in arguments else None

secrets = option("--config")
print("server_args", open(secrets).read() if secrets else "")  # as SGLang does
if option("--model-path") == "broken":
    sys.exit("ValueError: no such architecture")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({record!r} + ".part", "w") as file:
    json.dump({{
        "arguments": arguments,
        "pids": [os.getpid(), child.pid],
        "secrets": open(secrets).read() if secrets else None,
        "mode": os.stat(secrets).st_mode & 0o777 if secrets else None,
        "mark": os.environ.get("MARK"),
    }}, file)
os.replace({record!r} + ".part", {record!r})

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"model_path": option("--served-model-name")}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass

HTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""


def sglang_stand_in(folder: Path) -> tuple[Path, Path]:
    """The program, and the JSON file that it writes once it runs."""
    program, record = folder / "python", folder / "started.json"
    program.write_text(_PROGRAM.format(python=sys.executable, record=str(record)))
    program.chmod(0o755)
    return program, record
