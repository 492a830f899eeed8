"""A local S3 server, in a process of its own: `python -m tests.s3_server [DEADLY]` prints its port.

It keeps buckets in memory. Where DEADLY is given it dies of the first request to write an object whose name
has that in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true"}
BUCKET = "bucket"


class Server:
    """A test's handle of the server's process."""

    def __init__(self, deadly: str = ""):
        self._process = subprocess.Popen([sys.executable, "-m", "tests.s3_server", deadly],
                                         stdout=subprocess.PIPE, text=True,
                                         cwd=Path(__file__).parents[1], env={**os.environ, **KEYS})
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.env = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", aws_access_key_id="key",
                            aws_secret_access_key="secret", region_name="us-east-1")

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Name -> bytes."""
        listed = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for entry in listed.get("Contents", ())}

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _serve(deadly: str) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ: Any, start_response: Any) -> Any:
        if deadly and environ["REQUEST_METHOD"] == "PUT" and deadly in environ["PATH_INFO"]:
            os._exit(1)
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(sys.argv[1] if len(sys.argv) > 1 else "")
