"""``python -m moe_proxy``."""

from moe_proxy.cli import main

main()
