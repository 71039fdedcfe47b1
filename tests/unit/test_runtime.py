"""The runtime for library users, on the fake llama-server: its life, its failures, that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_proxy import HybridMoERuntime
from moe_proxy.errors import (
    EngineError,
    EngineGoneError,
    EngineStartError,
    MoeProxyError,
    RequestError,
    UsageError,
)
from tests.fakes.fake_llama_state import REPLY
from tests.support.fake_engine import PATIENCE_S, gone
from tests.support.proxy_process import wait_until

HELLO = [{"role": "user", "content": "hello"}]


def _pid(runtime: HybridMoERuntime) -> int:
    return int(runtime.stats()["engine"]["pid"])


def test_life(runtime_arguments: dict[str, Any]) -> None:
    """A context manager with generate, chat, stream and stats; it starts and stops its own engine."""
    with HybridMoERuntime(**runtime_arguments) as moe:
        pid = _pid(moe)
        text = moe.generate("once upon a time", max_tokens=3, temperature=0.5)
        assert (text.text, text.finish_reason, text.completion_tokens) == ("Une pomme coûte", "length", 3)
        assert text.prompt_tokens == 4
        assert (text.prompt_per_s, text.decode_per_s) == (100.0, 50.0)
        assert moe.chat(HELLO).text == REPLY
        assert "".join(moe.stream(HELLO)) == REPLY
        stats = moe.stats()
        assert stats["engine"]["state"] == "ready"
        wait_until(lambda: moe.stats()["requests"]["total"] == 3, "all are counted")
        assert moe.start() is moe
    assert gone(pid)
    moe.close()
    with pytest.raises(UsageError, match="not running"):
        moe.generate("anybody?")


def test_it_can_be_started_again(runtime_arguments: dict[str, Any]) -> None:
    """After its close, a runtime can be started anew."""
    moe = HybridMoERuntime(**runtime_arguments)
    for _ in range(2):
        moe.start()
        assert moe.generate("a", max_tokens=1).text
        moe.close()


def test_the_context_ends_with_an_exception(runtime_arguments: dict[str, Any]) -> None:
    """Every resource is closed also on exceptions."""
    with pytest.raises(ZeroDivisionError), HybridMoERuntime(**runtime_arguments) as moe:
        pid = _pid(moe)
        raise ZeroDivisionError
    assert gone(pid)


def test_thoughts_and_tools(runtime_arguments: dict[str, Any]) -> None:
    """A thinking model's thoughts and tool calls are told apart from its text."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    switches = ("--reasoning", "let me think", "--tool-call")
    with HybridMoERuntime(**runtime_arguments, engine_args=switches) as moe:
        answer = moe.chat(HELLO, tools=tools)
        assert answer.reasoning == "let me think"
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")
        (call,) = answer.tool_calls
        function: Any = call["function"]
        assert (call["id"], function["name"]) == ("call0", "weather")
        assert json.loads(function["arguments"]) == {"city": "Oslo"}


def test_a_domain_that_the_caller_knows(runtime_arguments: dict[str, Any]) -> None:
    """A client may name the domain itself."""
    with HybridMoERuntime(**runtime_arguments) as moe:
        moe.generate("print hello world", domain="math")
        recent = wait_until(lambda: moe.stats()["recent"], "the request is noted")
        assert (recent[0]["domain"], recent[0]["classifier"]) == ("math", "header")


def test_a_stream_that_is_left_stops(runtime_arguments: dict[str, Any]) -> None:
    """Left early, the model stops: nobody waits for a stream that would never end."""
    with HybridMoERuntime(**runtime_arguments, engine_args=("--hang-after-chunks", "3")) as moe:
        for piece in moe.stream(HELLO):
            assert piece == "Une"
            break
        wait_until(lambda: moe.stats()["requests"]["active"] == 0, "the request has ended")


def test_several_threads(runtime_arguments: dict[str, Any]) -> None:
    """Calls may come from several threads at once."""
    with HybridMoERuntime(**runtime_arguments) as moe:
        answers: list[str] = []
        threads = [threading.Thread(target=lambda: answers.append(moe.chat(HELLO).text)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [REPLY] * 6


def test_close_ends_what_other_threads_wait_for(runtime_arguments: dict[str, Any]) -> None:
    """Closing a runtime ends what is under way in other threads, with an error of the tree."""
    moe = HybridMoERuntime(**runtime_arguments, engine_args=("--hang-after-chunks", "2")).start()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            moe.chat(HELLO)
        except MoeProxyError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: moe.stats()["requests"]["active"] == 1, "it is asked")
    moe.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("switches", "kind"),
    [
        (("--error-status", "400"), RequestError),
        (("--error-status", "500"), EngineError),
        (("--stream-error",), EngineError),
        (("--truncate-after-chunks", "2"), EngineGoneError),
        (("--die-after-chunks", "2"), EngineGoneError),
        (("--garbage",), EngineError),
    ],
)
def test_failures_are_of_the_tree(
    runtime_arguments: dict[str, Any], switches: tuple[str, ...], kind: type[MoeProxyError]
) -> None:
    """What goes wrong on the way is an error of errors.py, and the runtime is closed all the same."""
    with HybridMoERuntime(**runtime_arguments, engine_args=switches) as moe, pytest.raises(kind):
        moe.chat(HELLO)


def test_parameters_that_are_no_json(runtime_arguments: dict[str, Any]) -> None:
    """A parameter that JSON cannot hold is refused by a sentence."""
    with HybridMoERuntime(**runtime_arguments) as moe, pytest.raises(RequestError, match="no JSON"):
        moe.generate("a", logit_bias=object())


def test_an_engine_that_does_not_start(runtime_arguments: dict[str, Any]) -> None:
    """A child that ends before it is ready: its last words in the error, nothing left."""
    moe = HybridMoERuntime(**runtime_arguments, engine_args=("--exit-at-start", "3"))
    with pytest.raises(EngineStartError, match="the fake exits on demand"):
        moe.start()


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_the_model_loads(runtime_arguments: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C in a start: KeyboardInterrupt comes through, and no engine stays."""
    starts = tmp_path / "starts"
    moe = HybridMoERuntime(**runtime_arguments, engine_args=("--never-ready", "--starts-file", str(starts)))

    def interrupt() -> None:
        wait_until(lambda: starts.exists() and starts.read_text().endswith("\n"), "it is started")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        moe.start()
    thread.join()
    assert gone(int(starts.read_text()))


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_in_an_answer(runtime_arguments: dict[str, Any]) -> None:
    """Ctrl-C in an answer stops the model's work on it; the runtime can be used on."""
    with HybridMoERuntime(**runtime_arguments, engine_args=("--hang-after-chunks", "2")) as moe:

        def interrupt() -> None:
            wait_until(lambda: moe.stats()["requests"]["active"] == 1, "it is asked")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            moe.chat(HELLO)
        thread.join()
        wait_until(lambda: moe.stats()["requests"]["active"] == 0, "the request has ended")


def test_a_killed_program_leaves_no_engine(
    runtime_arguments: dict[str, Any], runtime_place: Path, tmp_path: Path
) -> None:
    """No orphan engine: a program that is killed takes its llama-server with it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from moe_proxy import HybridMoERuntime\n"
        f"moe = HybridMoERuntime('planted-moe', engine={str(runtime_arguments['engine'])!r}).start()\n"
        "print(moe.stats()['engine']['pid'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not gone(pid)
        process.kill()
        process.wait()
        wait_until(lambda: gone(pid), "the engine is gone")
    assert list(runtime_place.glob("library-*"))
    # What the killed program left is removed by the next one.
    with HybridMoERuntime(**runtime_arguments):
        assert len(list(runtime_place.glob("library-*"))) == 1


def test_a_program_that_forgets_to_close(runtime_arguments: dict[str, Any], tmp_path: Path) -> None:
    """A program that ends without a close ends, and takes its llama-server and its files with it."""
    program = tmp_path / "program.py"
    program.write_text(
        "from moe_proxy import HybridMoERuntime\n"
        f"moe = HybridMoERuntime('planted-moe', engine={str(runtime_arguments['engine'])!r}).start()\n"
        "print(moe.stats()['engine']['pid'], flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S * 3, check=True
    )
    assert gone(int(done.stdout))


def test_importing_the_package_is_cheap() -> None:
    """`import moe_proxy` loads nothing heavy; the runtime is imported when it is asked for."""
    code = (
        "import sys, moe_proxy\n"
        "heavy = {'aiohttp', 'numpy', 'pydantic', 'asyncio', 'moe_proxy.runtime'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "moe_proxy.HybridMoERuntime\n"
        "assert 'moe_proxy.runtime' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
