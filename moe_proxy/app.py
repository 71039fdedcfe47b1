"""Owns the wiring: the only place where objects of different parts meet.

``serve`` runs until it is told to stop; ``surface`` and ``running_engine`` are its parts, for whoever needs
no port or no HTTP surface.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moe_proxy import __version__
from moe_proxy.activity import Activity
from moe_proxy.config import Settings
from moe_proxy.domains.base import DOMAINS
from moe_proxy.domains.corrections import Corrections
from moe_proxy.engine.control import EngineControl, PriorFeed
from moe_proxy.engine.launch import LaunchInputs, launch_of, value_of
from moe_proxy.engine.supervisor import EngineStatus, Launch, Supervisor, SupervisorLimits
from moe_proxy.heap import trim_heap
from moe_proxy.instance import InstancePaths, RunningProxy, claimed, start_time_s, write_record
from moe_proxy.labelling import FILE_NAME as CORRECTIONS_FILE
from moe_proxy.labelling import Labelling
from moe_proxy.learning import Learning, learned_path
from moe_proxy.live import Reloading, with_settings
from moe_proxy.metrics import Metrics
from moe_proxy.model.gguf_header import GgufHeader
from moe_proxy.proxy.context import Limits, ModelCard, ProxyContext
from moe_proxy.proxy.keep_alive import KeepAlivePolicy
from moe_proxy.proxy.listening import Listening
from moe_proxy.proxy.listening import serve as listen
from moe_proxy.proxy.ollama.models import capabilities_of
from moe_proxy.proxy.server import change, make_app
from moe_proxy.report import Report
from moe_proxy.routing.active import ActiveRequests
from moe_proxy.routing.learner import Learner
from moe_proxy.routing.router_map import ModelKey
from moe_proxy.sd_notify import ServiceNotifier
from moe_proxy.served import Served


def launch_for(served: Served, server: Path, paths: InstancePaths, engine_args: tuple[str, ...]) -> Launch:
    """How llama-server is started for ``served``. Raises ConfigError for arguments that are ours."""
    settings = served.settings
    return launch_of(
        LaunchInputs(
            server=server,
            model=served.model,
            alias=served.alias,
            socket=paths.socket,
            context_length=served.context_length,
            slots=settings.slots,
            threads=settings.threads,
            pager=settings.pager,
            ram_budget_bytes=served.plan.ram_budget_bytes,
            expert_bytes=served.plan.expert_bytes,
            policy=settings.policy,
            vram=served.plan.vram,
            extra=engine_args,
            environment=os.environ,
            thread_wait=settings.thread_wait,
        )
    )


@dataclass(frozen=True)
class Engine:
    """A supervised llama-server and the two ways to its pager."""

    supervisor: Supervisor
    control: EngineControl
    feed: PriorFeed


@asynccontextmanager
async def running_engine(
    served: Served, server: Path, paths: InstancePaths, engine_args: tuple[str, ...] = ()
) -> AsyncIterator[Engine]:
    """A llama-server that is being started; stopped at the end of the context."""
    limits = SupervisorLimits(ready_timeout_s=served.settings.ready_timeout_s)
    async with EngineControl(paths.socket) as control, PriorFeed(control) as feed:

        async def repeat_prior() -> None:
            # A new engine knows nothing of the prior that the old one was given.
            feed.repeat()

        supervisor = Supervisor(
            launch_for(served, server, paths, engine_args),
            runtime_dir=paths.runtime,
            log_path=paths.engine_log,
            limits=limits,
            on_ready=repeat_prior,
            model_bytes=served.header.size_bytes,
        )
        async with supervisor:
            yield Engine(supervisor, control, feed)


@dataclass(frozen=True)
class Surface:
    """A supervised engine, and the context of an HTTP surface in front of it."""

    supervisor: Supervisor
    context: ProxyContext


@asynccontextmanager
async def surface(
    served: Served, server: Path, paths: InstancePaths, engine_args: tuple[str, ...] = ()
) -> AsyncIterator[Surface]:
    """All that stands behind the HTTP surface of one served model; ended at the end of the context.

    The engine is being started. The folders of ``paths`` must be there. Raises ConfigError for the keys.
    """
    settings = served.settings
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(served, server, paths, engine_args))
        active = ActiveRequests(
            served.router_map if settings.pager else None,
            kappa=settings.prior_kappa,
            min_distance=settings.prior_min_distance,
        )
        control = engine.control if settings.pager else None
        learning = None
        if settings.pager and settings.learn:
            key = ModelKey.of(served.layout)
            learner = Learner(key, served.router_map, settings.learn_half_life_tokens)
            learning = await stack.enter_async_context(
                Learning(learner, active, learned_path(paths.state, key.fingerprint))
            )
        labels = frozenset(DOMAINS).union(served.router_map.domains if served.router_map else ())
        classifier, labelling = served.classifier, None
        if settings.learn_labels:
            classifier = corrections = Corrections(served.classifier, labels)
            labelling = await stack.enter_async_context(
                Labelling(corrections, paths.state / CORRECTIONS_FILE)
            )
        activity = Activity(active, engine.feed, control, learn=learning.learn if learning else None)
        stack.callback(activity.close)
        metrics = Metrics()
        report = Report(
            model=served.alias,
            layout=served.layout,
            router_map=served.router_map.model.name if served.router_map else None,
            supervisor=engine.supervisor,
            control=control,
            feed=engine.feed,
            activity=activity,
            metrics=metrics,
            learning=learning,
            labelling=labelling,
        )
        context = ProxyContext(
            backend=Backend(paths.socket, engine.supervisor),
            model=_card(served, engine_args),
            observer=activity,
            stats=report.stats,
            placement=report.placement,
            classifier=classifier,
            domain_labels=labels,
            labelling=labelling,
            limits=Limits(hold_timeout_s=settings.hold_timeout_s),
            metrics=metrics,
            unload=engine.supervisor.rest,
            keep_alive=KeepAlivePolicy(settings.keep_alive_policy == "obey", settings.keep_alive_s),
        )
        yield Surface(engine.supervisor, await asyncio.to_thread(with_settings, context, settings))


async def serve(
    served: Served,
    server: Path,
    paths: InstancePaths,
    engine_args: tuple[str, ...],
    announce: Callable[[str], None],
    load: Callable[[], Settings],
) -> None:
    """Serve until SIGTERM or SIGINT; the second of them cuts what is still running.

    ``announce`` is told where the proxy listens and when it is ready, ``load`` reads the settings anew for
    SIGHUP. Raises EngineStartError when the model cannot be loaded, ConfigError when the port cannot be had.
    """
    settings = served.settings
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    notifier = ServiceNotifier(os.environ)

    def on_signal() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    async with AsyncExitStack() as stack:
        stack.enter_context(claimed(paths))
        behind = await stack.enter_async_context(surface(served, server, paths, engine_args))
        context = behind.context
        app = make_app(context)
        # Reading the model, the map and the classifiers took more than they are.
        trim_heap()
        listening = await listen(app, settings.host, settings.port)
        reloading = await stack.enter_async_context(
            Reloading(
                served.asked,
                context,
                load,
                lambda changed: change(app, changed),
                announce,
                notifier.reloading,
            )
        )
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, on_signal)

        def on_hangup() -> None:
            behind.supervisor.reopen_log()
            reloading.ask()

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        record = RunningProxy(
            os.getpid(), start_time_s(os.getpid()), listening.url, served.alias, __version__
        )
        write_record(paths, record)
        stack.callback(paths.record.unlink, missing_ok=True)
        announce(f"Listening on {listening.url}; loading {served.alias}.")
        await notifier.loading(served.alias)

        async def say_ready() -> None:
            announce("Ready.")
            await notifier.ready(f"{served.alias} on {listening.url}")

        try:
            await _until(stopping, behind.supervisor, settings.ready_timeout_s, say_ready)
        finally:
            await notifier.stopping()
            await _end(listening, behind.supervisor, hurrying)


async def _until(
    stopping: asyncio.Event,
    supervisor: Supervisor,
    timeout_s: float,
    say_ready: Callable[[], Awaitable[None]],
) -> None:
    """Return when told to stop; ``say_ready`` once. Raises EngineStartError when the first start fails."""
    stop = asyncio.create_task(stopping.wait())
    ready = asyncio.create_task(supervisor.ready(timeout_s))
    try:
        await asyncio.wait((stop, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            await say_ready()
            await stop
    finally:
        for task in (stop, ready):
            task.cancel()
        await asyncio.gather(stop, ready, return_exceptions=True)


async def _end(listening: Listening, supervisor: Supervisor, hurrying: asyncio.Event) -> None:
    """Drain, then stop the engine; a second signal cuts both short."""

    async def orderly() -> None:
        await listening.stop()
        await supervisor.stop()

    hurry = asyncio.create_task(hurrying.wait())
    end = asyncio.create_task(orderly())
    try:
        await asyncio.wait((hurry, end), return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            await listening.cut()
            await supervisor.stop(0)
        await end
    finally:
        hurry.cancel()


def _card(served: Served, engine_args: tuple[str, ...]) -> ModelCard:
    header = _with_given_template(served.header, engine_args)
    facts = f"{served.layout.fingerprint} {served.header.quantization} {served.header.size_bytes}"
    return ModelCard(
        name=served.alias,
        aliases=(),
        header=header,
        digest=hashlib.sha256(facts.encode()).hexdigest(),
        context_length=served.context_length,
        capabilities=capabilities_of(header, engine_args),
    )


def _with_given_template(header: GgufHeader, engine_args: tuple[str, ...]) -> GgufHeader:
    """``header`` with the chat template that llama-server is told to use in place of the model's own."""
    if name := value_of(engine_args, "--chat-template-file"):
        # What cannot be read here, llama-server cannot read either: it says so, and does not start.
        with contextlib.suppress(OSError):
            text = Path(name).read_text(encoding="utf-8", errors="replace")
            return replace(header, chat_template=text)
    return header


@dataclass(frozen=True)
class Backend:
    """The supervised engine as the HTTP surface sees it."""

    socket: Path
    supervisor: Supervisor

    @property
    def status(self) -> EngineStatus:
        """A snapshot for reports."""
        return self.supervisor.status

    async def ready(self, timeout_s: float) -> None:
        """Return once requests can be sent. Raises EngineError."""
        await self.supervisor.ready(timeout_s)
