"""moe-proxy: a proxy, a supervisor and an expert pager that keep a large MoE model fast on a small card."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_proxy.domains.base import Classification

__version__ = "0.1.0"
__all__ = ["__version__", "classify"]


def classify(text: str) -> Classification:
    """Domain and distribution over domains of ``text``.

    ``classify("print hello world").domain`` is "codegen". Asks the default cascade; ``domain`` is None and
    ``distribution`` empty when it abstains.
    """
    # Imported here, so that `import moe_proxy` for the version loads no model.
    from moe_proxy.domains.choice import default_classifier

    return default_classifier().classify(text)
