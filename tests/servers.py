"""Servers on this machine that behave badly, for loggers to talk to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What wandb asks for when a run begins; other questions get the same answer.
WANDB = {"data": {"upsertBucket": {"inserted": True, "bucket": {
    "id": "r", "name": "fake0001", "displayName": "d", "description": "", "config": "{}", "sweepName": None,
    "historyLineCount": 0, "project": {"id": "p", "name": "x", "entity": {"id": "e", "name": "me"}}}}}}
MLFLOW = {"experiment": {"experiment_id": "1", "name": "threed"},
          "run": {"info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING"},
                  "data": {}}}


class Server:
    """An HTTP server whose answers can change: an HTTP status, or "hang". `seen` has the requests' paths."""

    def __init__(self, answer: Any = 200, document: Any = None):
        self.answer, self.seen, self._over = answer, [], threading.Event()
        text = b"<html>" if document is None else json.dumps(document).encode()
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def _reply(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                ours.seen.append(self.path)
                if ours.answer == "hang":
                    ours._over.wait(60)
                    return
                self.send_response(ours.answer)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_PATCH = _reply

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def server(answer: Any = 200, document: Any = None) -> Iterator[Server]:
    made = Server(answer, document)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The address of a socket that takes connections and never reads."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(8)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
