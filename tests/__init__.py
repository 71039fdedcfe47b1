"""Tests of moe-proxy."""
