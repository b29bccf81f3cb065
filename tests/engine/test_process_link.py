"""The way to the engine's process when something goes wrong on this side of it."""

import asyncio
import logging
import pickle
import socket

import pytest

from pagedjax.engine.messages import Abort, Failed
from pagedjax.engine.process_link import ProcessLink
from tests.engine.fakes import build_counting, make_engine


@pytest.fixture
def sockets(monkeypatch):
    """Both ends of each connection that is made, the event loop's own too."""
    made, real = [], socket.socketpair

    def socketpair():
        made.extend(pair := real())
        return pair

    monkeypatch.setattr(socket, "socketpair", socketpair)
    return made


def are_closed(sockets):
    return [one.fileno() for one in sockets] == [-1] * 4


def test_a_report_that_cannot_be_taken_in_ends_the_process_and_is_logged(caplog):
    heard = []

    def hear(report):
        heard.append(report)
        if len(heard) == 1:
            raise KeyError("x")

    async def scenario():
        link = ProcessLink(make_engine().config, build_counting)
        await link.start(hear)
        for name in "ab":
            link.send(Abort(name, "abort"))
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        await link.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert heard[1:] == [Failed("the engine's process has ended (exit code 1)")]
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == ["event=report_not_taken", "event=engine_process_lost"]


def test_a_process_that_cannot_be_started_leaves_no_socket(sockets):
    link = ProcessLink(make_engine().config, lambda config: None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        asyncio.run(link.start(lambda report: None))
    assert link.process_id is None and are_closed(sockets)


def test_a_start_that_is_cancelled_before_it_is_connected_leaves_neither_process_nor_socket(sockets):
    async def scenario():
        link = ProcessLink(make_engine().config, build_counting)
        starting = asyncio.ensure_future(link.start(lambda report: None))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.to_thread(link._process.join, 20)
        return link._process.exitcode

    assert asyncio.run(scenario()) == -9
    assert are_closed(sockets)
