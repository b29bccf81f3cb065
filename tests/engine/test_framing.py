"""Messages over a socket: whole and in order, however their bytes arrive, until one end goes."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from pagedjax.engine.framing import Inbox, LoopEnd, WaitingEnd

MESSAGES = [b"", b"a", b"bc" * 1000, bytes(3_000_000), b"last"]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_messages_are_whole_however_their_bytes_arrive(size):
    data = b"".join(len(message).to_bytes(8, "big") + message for message in (b"", b"abc", bytes(20), b"d"))
    inbox = Inbox()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert [message for piece in pieces for message in inbox.feed(piece)] == [b"", b"abc", bytes(20), b"d"]


def exchange(on_loop):
    """Run `on_loop(end, received)` beside a thread that sends back whatever it gets."""

    def echo(connection):
        with connection:
            end = WaitingEnd(connection)
            while messages := end.receive():
                for message in messages:
                    end.send(message)

    async def main():
        ours, theirs = socket.socketpair()
        received, lost = asyncio.Queue(), asyncio.Event()
        end = await LoopEnd.open(ours, received.put_nowait, lost.set)
        with ThreadPoolExecutor() as threads:
            echoing = asyncio.get_running_loop().run_in_executor(threads, echo, theirs)
            await on_loop(end, received)
            end.close()
            await asyncio.wait_for(asyncio.gather(lost.wait(), echoing), 20)

    asyncio.run(main())


def test_messages_of_any_size_come_back_in_order():
    async def send_and_compare(end, received):
        for message in MESSAGES:
            end.send(message)
        assert [await received.get() for _ in MESSAGES] == MESSAGES

    exchange(send_and_compare)


def test_closing_is_the_end_on_both_sides():
    async def nothing(end, received):
        pass

    exchange(nothing)


def test_the_loop_is_told_once_that_the_other_end_has_gone():
    async def main():
        ours, theirs = socket.socketpair()
        lost, num_lost = asyncio.Event(), []
        end = await LoopEnd.open(ours, lambda message: None, lambda: (num_lost.append(1), lost.set()))
        theirs.close()
        await asyncio.wait_for(lost.wait(), 20)
        end.close()
        await asyncio.sleep(0)
        return num_lost

    assert asyncio.run(main()) == [1]


def test_sending_where_nobody_is_raises():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        WaitingEnd(ours).send(b"a")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_taken_behind_a_message_at_which_this_end_was_closed(new_loop):
    async def main():
        ours, theirs = socket.socketpair()
        taken, lost = [], asyncio.Event()

        def take(message):
            taken.append(message)
            if message == b"bad":
                end.close()

        end = await LoopEnd.open(ours, take, lost.set)
        with theirs:
            theirs.sendall(b"".join(len(word).to_bytes(8, "big") + word for word in (b"good", b"bad", b"good")))
            await asyncio.wait_for(lost.wait(), 20)
        return taken

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == [b"good", b"bad"]
