"""Owns how an answer of the engine becomes a stream to the client: one pump for every API.

What the bytes look like is a ``Form``'s affair; when they are sent, what the client gets while it waits and
how a stream ends when something breaks is decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Protocol

from aiohttp import web

from moe_proxy.errors import MoeProxyError
from moe_proxy.proxy.admission import Ticket
from moe_proxy.proxy.exchange import Exchange
from moe_proxy.proxy.replies import refusal
from moe_proxy.proxy.upstream import Answer

Opening = Coroutine[object, object, Answer]


class Form(Protocol):
    """The shape of one stream. Pure: bytes in, bytes out."""

    @property
    def content_type(self) -> str:
        """Of the stream."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life that changes nothing for the client."""
        ...

    def opened(self, held_ns: int) -> None:
        """The engine's answer begins; the request was held ``held_ns`` before it could be sent."""
        ...

    def feed(self, data: bytes) -> bytes:
        """Bytes of the engine to bytes for the client. Raises MoeProxyError for an error among them."""
        ...

    def end(self) -> bytes:
        """The engine's stream ended in order. Raises EngineGoneError when it was not complete."""
        ...

    def failure(self, error: MoeProxyError) -> bytes:
        """The last bytes of a stream that breaks off."""
        ...

    def whole(self, answer: Answer, body: bytes) -> web.StreamResponse:
        """The reply for an answer that is no stream. Raises MoeProxyError when it is an error."""
        ...


async def relay(
    exchange: Exchange, ticket: Ticket, opening: Opening, form: Form, *, patient: bool
) -> web.StreamResponse:
    """Send the answer of ``opening`` in ``form``.

    ``patient``: the client asked for a stream, so it can be kept waiting with signs of life. Raises
    MoeProxyError as long as nothing was sent; after that, an error is the stream's last message.
    """
    stream = _Stream(exchange, form)
    # A task of its own only for who has to be told that it is still under way: it costs a turn of the loop.
    task = asyncio.ensure_future(opening) if patient else None
    answer: Answer | None = None
    try:
        with ticket.cuttable():
            answer = await (opening if task is None else stream.opened(task))
            form.opened(answer.held_ns)
            if not answer.is_event_stream or answer.status != 200:
                body = await answer.read()
                if not stream.response.prepared:
                    ticket.failed = answer.status >= 500
                    return form.whole(answer, body)
                raise refusal(answer.status, body)
            while data := await answer.chunk():
                said = form.feed(data)
                await (stream.write(said) if said else stream.not_silent())
            await stream.write(form.end())
    except MoeProxyError as error:
        ticket.failed = error.http_status >= 500
        if not stream.response.prepared:
            raise
        await stream.send(form.failure(error))
    finally:
        if task is not None:
            close_opening(task)
        elif answer is not None:
            answer.close()
    await stream.response.write_eof()
    return stream.response


class _Stream:
    """The reply under way; its head is sent with the first bytes."""

    def __init__(self, exchange: Exchange, form: Form) -> None:
        self._exchange = exchange
        self._form = form
        self._spoken = False
        self._sent_s = exchange.started_s
        # Proxies between us and the client must neither gather nor keep a stream.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Content-Type": form.content_type}
        self.response = web.StreamResponse(headers=headers)

    async def opened(self, task: asyncio.Future[Answer]) -> Answer:
        """Wait for the answer's head; after a while the client gets its own head and signs of life."""
        limits = self._exchange.context.limits
        timeout_s = limits.header_wait_s
        while True:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if done:
                return task.result()
            await self.send(self._form.keep_alive())
            timeout_s = limits.keep_alive_s

    async def write(self, data: bytes) -> None:
        """Send bytes that come from the model, if there are any; waits while the client is slow."""
        if data:
            if not self._spoken:
                self._spoken = True
                self._exchange.first_token()
            await self.send(data)

    async def not_silent(self) -> None:
        """A sign of life, if nothing of what the engine said lately was for the client.

        A tool call goes out whole, and may take minutes to write; llama-server's own pings are swallowed.
        """
        limit_s = self._exchange.context.limits.keep_alive_s
        if self._exchange.context.clocks.monotonic_s() - self._sent_s > limit_s:
            await self.send(self._form.keep_alive())

    async def send(self, data: bytes) -> None:
        """Send bytes, after the head if it was not sent yet."""
        self._sent_s = self._exchange.context.clocks.monotonic_s()
        await deliver(self._exchange, self.response, data)


async def deliver(exchange: Exchange, response: web.StreamResponse, data: bytes) -> None:
    """Send bytes of a stream, after its head if that was not sent yet; waits while the client is slow."""
    if not response.prepared:
        exchange.committed = True
        exchange.stamp(response)
        await response.prepare(exchange.request)
    transport = exchange.request.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    # A write waits for a client that does not read; one that has hung for good gives its slot back.
    timer = asyncio.get_running_loop().call_later(exchange.context.limits.stall_s, transport.abort)
    try:
        await response.write(data)
    finally:
        timer.cancel()


def close_opening(task: asyncio.Future[Answer]) -> None:
    """Leave no connection open, however far the opening came; waits for nothing."""
    if task.done():
        _close_answer(task)
    else:
        task.cancel()
        task.add_done_callback(_close_answer)


def _close_answer(task: asyncio.Future[Answer]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
