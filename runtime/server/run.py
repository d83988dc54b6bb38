"""Serving an app over HTTP with uvicorn, until a signal ends it."""

import logging
import socket
import sys

import uvicorn
from fastapi import FastAPI

_GRACE_SECONDS = 5  # for answers in progress, when a signal ends the server


def bind(host: str, port: int) -> socket.socket:
    """A socket on `host` and `port` (0: any free one), not listening yet; OSError if it is taken.

    To be had before a model is loaded, which takes longer than finding out.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from error
    return listener


def run_server(app: FastAPI, listener: socket.socket, *, quiet: bool = False) -> None:
    """Serve `app` until Ctrl-C or SIGTERM, which are no errors: a server ends that way.

    Answers in progress get a few seconds. The log goes to stderr; `quiet` leaves errors alone.
    """
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(message)s")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # which uvicorn raises again once it has shut down
        return
