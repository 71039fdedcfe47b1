"""Owns the runtime for library users: an engine of one's own, or a running proxy, behind a few calls.

It reads no command line and prints nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from moe_proxy.completions import Completion, CompletionStream, Message, ProxyClient
from moe_proxy.config import Settings, load_settings
from moe_proxy.errors import ConfigError, EngineGoneError, MoeProxyError, UsageError
from moe_proxy.loop_thread import LoopThread
from moe_proxy.private_proxy import Prepared, Progress, prepare, private_proxy, without_port

__all__ = ["AsyncHybridMoERuntime", "Completion", "CompletionStream", "HybridMoERuntime", "Message"]

Result = TypeVar("Result")

_GIB = 2**30


def _ignore(_stage: str, _fraction: float) -> None:
    """What to do with progress when nobody asked."""


class _CancelledError(MoeProxyError):
    """Ends preparations in their thread; whoever waited for them has left."""


class AsyncHybridMoERuntime:
    """A Mixture-of-Experts model to ask, in coroutines. See HybridMoERuntime for the arguments.

    ``async with AsyncHybridMoERuntime("model.gguf") as moe: await moe.generate("…")``. Belongs to the event
    loop, and an engine of its own to the thread, that it was started in.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        gpu_memory_budget_gb: float | None = None,
        ram_budget_gb: float | None = None,
        attach: str | None = None,
        api_key: str | None = None,
        engine_args: Sequence[str] = (),
        progress: Progress = _ignore,
        **settings: Any,
    ) -> None:
        flags = _flags(model, gpu_memory_budget_gb, ram_budget_gb, settings)
        if attach is not None and (flags or engine_args):
            named = next(iter(flags), "engine_args")
            raise ConfigError(
                f"{named} cannot be set for the proxy at {attach}, which runs already",
                "leave it out, or leave attach out",
            )
        if attach is None and api_key is not None:
            raise ConfigError("an engine of one's own needs no api_key", "give it with attach alone")
        self._attach, self._api_key = attach, api_key
        self._flags, self._engine_args = flags, tuple(engine_args)
        self._progress = progress
        self._stack: AsyncExitStack | None = None
        self._client: ProxyClient | None = None

    def _settings(self) -> Settings:
        return without_port(load_settings(self._flags))

    def prepare(self) -> Prepared | None:
        """What can be found out, and built, before anything is started; None with ``attach``. Blocks."""
        if self._attach is not None:
            return None
        return prepare(self._settings(), self._engine_args, self._progress)

    async def start(self) -> AsyncHybridMoERuntime:
        """Return once the model answers. ``async with`` calls it.

        The first start builds llama-server, which takes minutes. Raises UsageError (a wrong model or
        setting), EngineError (it cannot be built or started), NotRunningError (no proxy to attach to).
        """
        if self._client is None:
            await self.open(await self._prepared())
        return self

    async def open(self, prepared: Prepared | None) -> None:
        """Start with what ``prepare`` gave."""
        async with AsyncExitStack() as stack:
            if prepared is not None:
                client = await stack.enter_async_context(private_proxy(prepared))
            else:
                assert self._attach is not None
                client = ProxyClient(self._attach, aiohttp.TCPConnector(limit=0), self._api_key)
                stack.push_async_callback(client.close)
                await client.get("/v1/models")
            self._client, self._stack = client, stack.pop_all()

    async def close(self) -> None:
        """Stop what is under way, and the engine if it is one's own. A second call does nothing."""
        stack, self._stack, self._client = self._stack, None, None
        if stack is not None:
            await stack.aclose()

    async def __aenter__(self) -> AsyncHybridMoERuntime:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: str, *, max_tokens: int | None = None, domain: str | None = None, **parameters: object
    ) -> Completion:
        """Go on with the text ``prompt``. See HybridMoERuntime.generate."""
        async with await self.stream(prompt, max_tokens=max_tokens, domain=domain, **parameters) as stream:
            return await stream.read()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        domain: str | None = None,
        **parameters: object,
    ) -> Completion:
        """Answer ``messages``. See HybridMoERuntime.chat."""
        async with await self.stream(messages, max_tokens=max_tokens, domain=domain, **parameters) as stream:
            return await stream.read()

    async def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        domain: str | None = None,
        **parameters: object,
    ) -> CompletionStream:
        """The same piece by piece: ``async with await moe.stream("…") as pieces: async for piece in pieces``.

        Text is gone on with, messages are answered. Cancelled or left early, the model stops.
        """
        client = self._running()
        return await client.stream(prompt, domain, {"max_tokens": max_tokens, **parameters})

    async def stats(self) -> Mapping[str, Any]:
        """What ``GET /stats`` gives: engine, requests, prior, and the pager's counters under ``experts``."""
        return await self._running().get("/stats")

    def _running(self) -> ProxyClient:
        if self._client is None:
            raise UsageError("the runtime is not running", "use it in a with statement, or call start()")
        return self._client

    async def _prepared(self) -> Prepared | None:
        """``prepare`` in a thread, which a cancelled caller ends at its next sign of progress."""
        if self._attach is not None:
            return None
        left = threading.Event()

        def report(stage: str, fraction: float) -> None:
            if left.is_set():
                raise _CancelledError("nobody waits for the preparations any more")
            self._progress(stage, fraction)

        try:
            return await asyncio.to_thread(prepare, self._settings(), self._engine_args, report)
        except asyncio.CancelledError:
            left.set()
            raise


class HybridMoERuntime:
    """A Mixture-of-Experts model: ``with HybridMoERuntime("model.gguf", gpu_memory_budget_gb=8) as moe: …``.

    ``model``: a GGUF file, or the name of a model that ships; None: what is configured, or the first of
    those. ``gpu_memory_budget_gb``: compute on the NVIDIA GPU, with so much VRAM (2**30 bytes) for the whole
    engine. ``ram_budget_gb``: RAM for experts, in the same unit; None: all that fit. ``attach``: the URL of a
    proxy that runs already, to be used in the place of an engine of one's own; ``api_key``: a key of it.
    ``engine_args``: arguments of llama-server. ``progress``: told of a build. ``settings``: any other setting
    of docs/config.md by its name. What is not given comes from MOE_PROXY_* and the configuration file.

    Its calls may come from any thread and several at once. Nothing is read or started before ``start``, which
    the with statement calls. Raises ConfigError for arguments that exclude each other.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        gpu_memory_budget_gb: float | None = None,
        ram_budget_gb: float | None = None,
        attach: str | None = None,
        api_key: str | None = None,
        engine_args: Sequence[str] = (),
        progress: Progress = _ignore,
        **settings: Any,
    ) -> None:
        self._runtime = AsyncHybridMoERuntime(
            model,
            gpu_memory_budget_gb=gpu_memory_budget_gb,
            ram_budget_gb=ram_budget_gb,
            attach=attach,
            api_key=api_key,
            engine_args=engine_args,
            progress=progress,
            **settings,
        )
        self._loop: LoopThread | None = None
        self._changing = threading.Lock()

    def start(self) -> HybridMoERuntime:
        """Return once the model answers; Ctrl-C leaves nothing behind. Errors as in the asynchronous form."""
        with self._changing:
            if self._loop is None:
                self._loop = self._started()
                atexit.register(self.close)
        return self

    def _started(self) -> LoopThread:
        prepared = self._runtime.prepare()
        # The engine ends with the thread that started it, so not even a crash of this process leaves one.
        loop = LoopThread("moe-proxy-runtime")
        try:
            loop.run(self._runtime.open(prepared))
        except BaseException:
            loop.close()
            raise
        return loop

    def close(self) -> None:
        """Stop what is under way, and the engine if it is one's own. A second call does nothing."""
        with self._changing:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            atexit.unregister(self.close)
            try:
                loop.run(self._runtime.close())
            finally:
                loop.close()

    def __enter__(self) -> HybridMoERuntime:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompt: str, *, max_tokens: int | None = None, domain: str | None = None, **parameters: object
    ) -> Completion:
        """Go on with the text ``prompt``, as it is: no chat template.

        ``max_tokens``: at most; None: until the model ends, or the context does. ``domain``: what it is
        about, if the caller knows better than the classifier. ``parameters``: any other field of OpenAI's or
        llama-server's request: ``temperature=0.7, seed=1, stop=["\\n"], top_k=40, json_schema={…}``.

        Raises RequestError (the request is wrong), BusyError (too many at once), EngineError (llama-server
        failed; it is being restarted), NotRunningError (the proxy that was attached to has gone).
        """
        return self._run(self._runtime.generate(prompt, max_tokens=max_tokens, domain=domain, **parameters))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        domain: str | None = None,
        **parameters: object,
    ) -> Completion:
        """Answer ``messages`` (``[{"role": "user", "content": "…"}]``) by the model's chat template.

        Arguments and errors as those of ``generate``; ``tools=[…]`` are OpenAI's.
        """
        return self._run(self._runtime.chat(messages, max_tokens=max_tokens, domain=domain, **parameters))

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        domain: str | None = None,
        **parameters: object,
    ) -> Iterator[str]:
        """The answer piece by piece; text is gone on with, messages are answered.

        It is asked for with the first piece. Left early (``break``, ``close``), the model stops. Errors as
        those of ``generate``, and EngineGoneError when the answer breaks off.
        """
        stream = self._run(self._runtime.stream(prompt, max_tokens=max_tokens, domain=domain, **parameters))
        try:
            while (piece := self._run(_next(stream))) is not None:
                yield piece
        finally:
            # A runtime that was closed meanwhile has closed its streams.
            with suppress(UsageError):
                self._run(stream.aclose())

    def stats(self) -> Mapping[str, Any]:
        """What ``GET /stats`` gives: engine, requests, prior, and the pager's counters under ``experts``."""
        return self._run(self._runtime.stats())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop is None:
            work.close()
            raise UsageError("the runtime is not running", "use it in a with statement, or call start()")
        try:
            return self._loop.run(work)
        except concurrent.futures.CancelledError:
            raise EngineGoneError("the runtime was closed while the answer was under way") from None


async def _next(stream: CompletionStream) -> str | None:
    async for piece in stream:
        return piece
    return None


def _flags(
    model: str | Path | None,
    gpu_memory_budget_gb: float | None,
    ram_budget_gb: float | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings that the arguments stand for."""
    flags = dict(settings)
    if model is not None:
        flags["model"] = Path(model)
    if gpu_memory_budget_gb is not None:
        flags |= {"gpu": True, "vram_budget": _size(gpu_memory_budget_gb, "gpu_memory_budget_gb")}
    if ram_budget_gb is not None:
        flags["ram_budget"] = _size(ram_budget_gb, "ram_budget_gb")
    return flags


def _size(amount_gb: float, name: str) -> str:
    if not 0 <= amount_gb < 2**20:
        raise ConfigError(f"{name} = {amount_gb} is no amount of memory", "give gigabytes, such as 8 or 7.5")
    return str(int(amount_gb * _GIB))
