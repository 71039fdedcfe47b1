"""moe-proxy: a proxy, a supervisor and an expert pager that keep a large MoE model fast on a small card."""

__version__ = "0.1.0"
