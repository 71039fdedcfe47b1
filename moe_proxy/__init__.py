"""moe-proxy: a proxy, a supervisor and an expert pager that keep a large MoE model fast on a small card."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_proxy.domains.base import Classification
    from moe_proxy.runtime import AsyncHybridMoERuntime, HybridMoERuntime

__version__ = "0.1.0"
__all__ = ["AsyncHybridMoERuntime", "HybridMoERuntime", "__version__", "classify"]

_OF_RUNTIME = frozenset({"AsyncHybridMoERuntime", "HybridMoERuntime"})


def classify(text: str) -> Classification:
    """Domain and distribution over domains of ``text``.

    ``classify("print hello world").domain`` is "codegen". Asks the default cascade; ``domain`` is None and
    ``distribution`` empty when it abstains.
    """
    # Imported here, so that `import moe_proxy` for the version loads no model.
    from moe_proxy.domains.choice import default_classifier

    return default_classifier().classify(text)


def __getattr__(name: str) -> object:
    """The runtimes, imported when somebody first asks for one: `import moe_proxy` stays cheap."""
    if name in _OF_RUNTIME:
        from moe_proxy import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
