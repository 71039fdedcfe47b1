"""Tests of the whole, most of them on the real engine."""
