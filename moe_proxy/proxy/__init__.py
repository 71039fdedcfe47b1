"""HTTP surface."""
