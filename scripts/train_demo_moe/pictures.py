"""Owns the pictures of docs/demo-model.md: training loss, routing by domain. It measures nothing."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


def loss_picture(log: list[dict[str, float]], target: Path) -> None:
    """Training loss over tokens, with a running mean."""
    tokens = np.array([row["tokens"] for row in log]) / 1e6
    loss = np.array([row["loss"] for row in log])
    width = 9
    mean = np.convolve(loss, np.ones(width) / width, "valid")
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(tokens, loss, color="0.75", linewidth=0.8, label="one batch in ten")
    axes.plot(tokens[width // 2 : -(width // 2)], mean, color="C0", label=f"mean of {width}")
    axes.set(xlabel="million tokens", ylabel="cross entropy, nats per token", title="Training loss")
    axes.legend(frameon=False)
    figure.savefig(target, dpi=100)
    plt.close(figure)


def routing_picture(counts: dict[str, list[list[int]]], layers: list[int], target: Path) -> None:
    """Share of picks by expert (across) and layer (down), one panel for each domain."""
    figure, panels = plt.subplots(2, 3, figsize=(11, 6), layout="constrained", sharex=True, sharey=True)
    for panel, (domain, table) in zip(panels.flat, counts.items(), strict=True):
        share = np.array(table) / np.sum(table, axis=1, keepdims=True) * 100
        image = panel.imshow(share, cmap="magma", vmin=0, vmax=12, aspect="auto", interpolation="nearest")
        panel.set_title(domain)
        panel.set_yticks(range(0, len(layers), 4), [layers[i] for i in range(0, len(layers), 4)])
    figure.supxlabel("expert")
    figure.supylabel("layer")
    figure.colorbar(image, ax=panels, label="% of the layer's picks (even: 3.1)", shrink=0.8)
    figure.savefig(target, dpi=80)
    plt.close(figure)
