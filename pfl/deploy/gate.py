"""What the parties reach of a SuperLink: fetching messages and sending answers, and nothing else.

At its one port a SuperLink also takes programs to run (`flwr run`), from whoever reaches it, with
TLS and keys of nodes too. So it listens on its own machine only, and a gate passes the requests of
nodes on.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pfl.deploy.wire import LIMIT
from pfl.errors import ConfigError

FLEET = re.compile("/v1/fleet/[a-z-]+")  # the requests of nodes
PATIENCE = 60.0  # seconds that a connection may be silent
CONNECTIONS = 256  # at once
OWN = ("connection", "transfer-encoding", "host", "date", "server", "content-length")


class _Server(ThreadingHTTPServer):
    """Takes connections, each in a thread of its own."""

    daemon_threads = True
    context: ssl.SSLContext
    upstream: ssl.SSLContext
    inner: int

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.free = threading.Semaphore(CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a stranger's handshake is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    """Passes the requests of one connection on, one after another."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server: _Server

    def setup(self) -> None:
        self.request.settimeout(PATIENCE)
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        known = FLEET.fullmatch(self.path) and length.isascii() and length.isdigit()
        if not known or int(length) > LIMIT or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self.send_error(404)
            return
        content = self.rfile.read(int(length))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in OWN}
        inner = http.client.HTTPSConnection(
            "127.0.0.1", self.server.inner, timeout=PATIENCE, context=self.server.upstream
        )
        try:
            with closing(inner):
                inner.request("POST", self.path, content, headers)
                answer = inner.getresponse()
                told = answer.read()
        except (OSError, http.client.HTTPException):
            self.send_error(502)
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@contextmanager
def gate(port: int, inner: int, folder: Path) -> Iterator[None]:
    """Passes the requests of nodes on while the block runs.

    Args:
        port: Where the parties come.
        inner: The SuperLink's port on this machine.
        folder: The folder with `server.crt`, `server.key` and `ca.crt`.

    Raises:
        ConfigError: The port is in use.
    """
    try:
        server = _Server(("", port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"port {port} is in use ({error.strerror}); end what uses it, or give --port"
        ) from error
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server.upstream = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    server.inner = inner
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                server.shutdown()
            thread.join()
