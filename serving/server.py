"""The process around the app: bind, build the engine, serve, drain.

The first SIGTERM or SIGINT drains: /ready says no, new requests get 503, running ones have `drain_timeout_s` to
finish and then end with an error. The second ends them at once; the third leaves without waiting for anything.
While the model loads /health answers already, /ready and the API say 503, and a signal ends the process at once.
"""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from pagedjax.core.errors import ConfigError
from serving import errors
from serving.access.keys import KeySource
from serving.access.origins import is_loopback
from serving.app import MAX_BODY_BYTES, create_app
from serving.interfaces import Engine
from serving.options import ApiOptions
from serving.protocol import MAX_HEADER_BYTES, bounded_protocol
from serving.service import Service
from serving.telemetry import access_log

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

# What the last chunks may take to reach their clients, once nothing is generated any more.
FLUSH_TIMEOUT_S = 5
TICKS_PER_S = 10
# An engine whose step has not ended by its time limit has so long to come back: a machine may have slept.
STUCK_GRACE_S = 10.0
# A step loop that ended does not come back; whoever watches may still see it.
FAILED_GRACE_S = 1.0


def serve(
    make_engine: Callable[[], Engine],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_timeout_s: float = 30.0,
    max_body_bytes: int = MAX_BODY_BYTES,
    trust_tenant_header: bool = False,
    keys: KeySource = KeySource(),  # noqa: B008
    options: ApiOptions = ApiOptions(),  # noqa: B008
    tracer_provider: "TracerProvider | None" = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serves until a signal and returns the exit status: 0, 1 if the engine died, or 128 + the signal's number if it
    came while the model still loaded. Threads that compile cannot be stopped: leave with `os._exit`.

    The port is taken before the engine is made, so that a port in use is found before a model is loaded.
    `on_ready` is called with the URL once the model is loaded. Raises ConfigError, and what the engine raises.
    """
    listener = bind(host, port)
    if options.access_log == "json":
        access_log.begin_json()
    if is_loopback(listener.getsockname()[0]):
        options = replace(options, local_name=host.lower())
    try:
        app = create_app(
            make_engine(),
            max_body_bytes=max_body_bytes,
            trust_tenant_header=trust_tenant_header,
            keys=keys,
            options=options,
            tracer_provider=tracer_provider,
        )
        server = DrainingServer(app, listener, drain_timeout_s, on_ready)
        return server.serve_until_signal()
    finally:
        listener.close()
        if tracer_provider is not None:
            # Sends the spans that are left.
            tracer_provider.shutdown()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet. Raises ConfigError."""
    # getaddrinfo wraps larger numbers round.
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} does not exist; give --port a number from 0 (any free one) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't use the address {host}: {error.strerror}; try --host 127.0.0.1") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host} port {port}: {error}; try another --port") from error
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn, but signals drain the service first. `on_tick` runs on the event loop ten times a second."""

    def __init__(
        self,
        app: Callable[..., object],
        listener: socket.socket,
        drain_timeout_s: float,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
                http=bounded_protocol(),
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self._service: Service = app.state.service  # type: ignore[attr-defined]
        self._listener, self._drain_timeout_s, self._on_ready = listener, drain_timeout_s, on_ready
        self._num_signals = 0
        self._num_dead_ticks = 0
        self._drain_deadline_s: float | None = None
        self._exit_status = 0
        self._has_started = False
        self._start_error: BaseException | None = None

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve_until_signal(self) -> int:
        try:
            self.run(sockets=[self._listener])
        except OSError as error:
            raise ConfigError(f"can't listen on {self.url}: {error.strerror}; try another --port") from error
        if self._start_error is not None:
            raise self._start_error
        return self._exit_status

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        log.info("event=listening url=%s", self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs inside whatever the signal interrupted: only counts."""
        self._num_signals += 1
        if not self._has_started:
            self._exit_status = 128 + sig
        self.force_exit = self.force_exit or self._num_signals > 2

    async def on_tick(self, counter: int) -> bool:
        if not self._has_started:
            self._watch_start()
        else:
            self._watch_engine()
        if self._num_signals and self._drain_deadline_s is None:
            self._begin_drain()
        if self._drain_deadline_s is not None:
            self._advance_drain(self._drain_deadline_s)
        return await super().on_tick(counter)

    def _begin_drain(self) -> None:
        log.info("event=drain active=%d timeout_s=%g", len(self._service.active), self._drain_timeout_s)
        self._service.drain()
        self._drain_deadline_s = time.monotonic() + self._drain_timeout_s

    def _advance_drain(self, deadline_s: float) -> None:
        active = self._service.active
        if len(active) and (self._num_signals > 1 or time.monotonic() > deadline_s):
            log.warning("event=drain_ended_early interrupted=%d", len(active))
            active.interrupt_all(errors.shutting_down())
        self.should_exit = self.should_exit or not len(active) or self._num_signals > 2

    def _watch_start(self) -> None:
        starting = self._service.starting
        if starting is None or not starting.done():
            return
        self._has_started = True
        self._start_error = starting.exception()
        if self._start_error is not None:
            self.should_exit = True
            return
        log.info("event=ready url=%s", self.url)
        if self._on_ready is not None:
            self._on_ready(self.url)

    def _watch_engine(self) -> None:
        health = self._service.health()
        if health == "ok":
            if self._num_dead_ticks:
                log.warning("event=engine_back dead_s=%.1f", self._num_dead_ticks / TICKS_PER_S)
            self._num_dead_ticks = 0
            return
        if self._num_dead_ticks == 0:
            age_s = self._service.engine.step_age_s()
            log.critical("event=engine_%s step_age_s=%.1f active=%d", health, age_s, len(self._service.active))
            if health == "stuck":
                self._service.engine.dump_stacks()
        self._num_dead_ticks += 1
        grace_s = STUCK_GRACE_S if health == "stuck" else FAILED_GRACE_S
        if self._num_dead_ticks > grace_s * TICKS_PER_S and not self.should_exit:
            log.critical("event=engine_given_up health=%s interrupted=%d", health, len(self._service.active))
            self._service.active.interrupt_all(RuntimeError(f"the engine has {health}"))
            self._exit_status, self.should_exit = 1, True
