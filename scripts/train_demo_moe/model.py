"""Owns the upcycled model: SmolLM2's frozen blocks, with routed experts beside the later ones.

A MoE block adds to the frozen feed-forward network ``F`` (the shared expert of llama.cpp's ``deepseek``):

    y = F(x) + scale * sum over the top-k experts e of softmax(R x)_e * D_e (silu(G_e x) * U_e x)

The softmax runs over all experts and is not normalised again after top-k. ``D`` starts at zero, so training
starts from the dense model. Experts are small: all of them are computed as one wide network and the ones that
were not picked get the weight zero. That costs arithmetic and saves sorting tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from dense import Dense
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BLOCK = 32
"""Weights that share a scale in Q4_0."""
_LOSS_CHUNK = 16384


@dataclass(frozen=True)
class Experts:
    """Shape of the routed part. The first ``dense_layers`` blocks have none."""

    dense_layers: int = 6
    count: int = 32
    used: int = 4
    width: int = 32
    scale: float = 8.0

    def record(self) -> dict[str, float]:
        """As plain values, for a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """What a block needs to know of the dense model."""

    heads: int
    kv_heads: int
    epsilon: float


def q4_0(weights: Tensor) -> Tensor:
    """Round to what ggml's Q4_0 can hold: 16 levels of one half-precision scale per ``BLOCK`` of a row.

    Same rule as ggml: the entry of largest magnitude becomes level -8.
    """
    blocks = weights.float().reshape(-1, BLOCK)
    peak = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    step = peak / -8
    inverse = torch.where(step == 0, 0.0, 1 / step)
    levels = (blocks * inverse + 8.5).floor().clamp(0, 15) - 8
    return (levels * step.half().float()).reshape(weights.shape)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root mean square norm, computed in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over neighbouring pairs, as in llama GGUFs. ``x``: (batch, heads, time, width)."""
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return pairs.flatten(-2).to(x.dtype)


def attention(x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Causal grouped-query attention. ``x``: (batch, time, width)."""
    batch, time, width = x.shape

    def split(matrix: Tensor, count: int) -> Tensor:
        return F.linear(x, matrix).view(batch, time, count, -1).transpose(1, 2)

    query = rotate(split(w["attn_q"], heads), cos, sin)
    key = rotate(split(w["attn_k"], kv_heads), cos, sin).repeat_interleave(heads // kv_heads, 1)
    value = split(w["attn_v"], kv_heads).repeat_interleave(heads // kv_heads, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(batch, time, width), w["attn_output"])


def feed_forward(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The frozen gated network."""
    return F.linear(F.silu(F.linear(x, w["ffn_gate"])) * F.linear(x, w["ffn_up"]), w["ffn_down"])


def dense_block(x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, shape: Shape) -> Tensor:
    """One block of the dense model."""
    x = x + attention(rms_norm(x, w["attn_norm"], shape.epsilon), w, cos, sin, shape.heads, shape.kv_heads)
    return x + feed_forward(rms_norm(x, w["ffn_norm"], shape.epsilon), w)


def moe_block(
    x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, shape: Shape, experts: Experts
) -> tuple[Tensor, Tensor, Tensor]:
    """One block with routed experts: output, picks (batch, time, used), load-balance loss.

    The loss is that of Switch Transformers (Fedus, Zoph, Shazeer 2021) over the whole batch: 1 if balanced.
    """
    x = x + attention(rms_norm(x, w["attn_norm"], shape.epsilon), w, cos, sin, shape.heads, shape.kv_heads)
    normed = rms_norm(x, w["ffn_norm"], shape.epsilon)
    probabilities = F.linear(normed.float(), w["router"]).softmax(-1)
    picks = probabilities.topk(experts.used, -1).indices
    picked = torch.zeros_like(probabilities).scatter_(-1, picks, 1.0)
    load = picked.mean((0, 1)) / experts.used
    balance = experts.count * (load * probabilities.mean((0, 1))).sum()
    weight = (experts.scale * probabilities * picked).to(x.dtype).repeat_interleave(experts.width, -1)
    inner = F.silu(F.linear(normed, w["expert_gate"])) * F.linear(normed, w["expert_up"]) * weight
    return x + feed_forward(normed, w) + F.linear(inner, w["expert_down"]), picks, balance


class Upcycled(nn.Module):
    """The dense model with routed experts; only routers and experts have parameters.

    ``dtype`` is that of the frozen weights and the activations; parameters are float32.
    """

    def __init__(self, dense: Dense, experts: Experts, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = Shape(dense.heads, dense.kv_heads, dense.epsilon)
        self.experts = experts
        self.rope_base = dense.rope_base
        self.head_width = dense.width // dense.heads
        self.layers = range(experts.dense_layers, dense.layers)
        self.frozen = [
            {
                name: self._frozen(dense, f"blk.{layer}.{name}.weight", device, dtype)
                for name in (
                    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
                    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
                )
            }
            for layer in range(dense.layers)
        ]  # fmt: skip
        self.embedding = self._frozen(dense, "token_embd.weight", device, dtype)
        self.output_norm = self._frozen(dense, "output_norm.weight", device, dtype)
        count, inner, width = experts.count, experts.width, dense.width
        sizes = {
            "router": (count, width),
            "expert_gate": (count, inner, width),
            "expert_up": (count, inner, width),
            "expert_down": (count, width, inner),
        }
        self.trained = nn.ParameterDict(
            {f"{name}_{layer}": torch.empty(size) for name, size in sizes.items() for layer in self.layers}
        )
        for name, parameter in self.trained.items():
            if name.startswith("expert_down"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        self.trained.to(device)
        self.quantised = False
        self.dense_step = dense_block
        self.moe_step = moe_block

    @staticmethod
    def _frozen(dense: Dense, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(dense.tensors[name]).to(device)
        return tensor if name.endswith("norm.weight") else tensor.to(dtype)

    def compile(self) -> None:
        """Compile one dense and one MoE block; all layers share the two."""
        self.dense_step = torch.compile(dense_block)
        self.moe_step = torch.compile(moe_block)

    def _routed(self, layer: int) -> dict[str, Tensor]:
        """Router and experts of a layer, as the block wants them: all experts side by side."""
        dtype = self.embedding.dtype

        def seen(name: str) -> Tensor:
            weight = self.trained[f"{name}_{layer}"]
            # Straight through: forward sees the rounded weights, the gradient goes to the exact ones.
            return weight + (q4_0(weight) - weight).detach() if self.quantised else weight

        down = seen("expert_down").to(dtype)
        return {
            "router": self.trained[f"router_{layer}"],
            "expert_gate": seen("expert_gate").to(dtype).flatten(0, 1),
            "expert_up": seen("expert_up").to(dtype).flatten(0, 1),
            "expert_down": down.permute(1, 0, 2).flatten(1, 2),
        }

    def hidden(self, tokens: Tensor, routed: bool = True) -> tuple[Tensor, list[Tensor], Tensor]:
        """Normed last hidden states, picks per MoE layer, mean balance loss. ``tokens``: (batch, time).

        ``routed=False`` is the dense model itself.
        """
        time = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        power = torch.arange(0, self.head_width, 2, device=tokens.device, dtype=torch.float32)
        angles = torch.outer(time, self.rope_base ** (-power / self.head_width))
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embedding)
        all_picks = []
        balances = []
        for layer, weights in enumerate(self.frozen):
            if layer in self.layers and routed:
                joined = weights | self._routed(layer)
                x, picks, balance = self.moe_step(x, joined, cos, sin, self.shape, self.experts)
                all_picks.append(picks)
                balances.append(balance)
            else:
                x = self.dense_step(x, weights, cos, sin, self.shape)
        balance = torch.stack(balances).mean() if balances else x.new_zeros(())
        return rms_norm(x, self.output_norm, self.shape.epsilon), all_picks, balance

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy per token (flat), over chunks so that no full table of logits is ever kept."""
        flat, wanted = hidden.flatten(0, 1), targets.flatten()
        parts = [
            checkpoint(
                self._loss, flat[i : i + _LOSS_CHUNK], wanted[i : i + _LOSS_CHUNK], use_reentrant=False
            )
            for i in range(0, len(wanted), _LOSS_CHUNK)
        ]
        return torch.cat(parts)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.embedding).float(), targets, reduction="none")

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The ``count`` most likely tokens after ``prompt``, one by one (without a cache: for checks)."""
        tokens = list(prompt)
        for _ in range(count):
            hidden, _, _ = self.hidden(torch.tensor([tokens], device=self.embedding.device))
            tokens.append(int(F.linear(hidden[0, -1], self.embedding).argmax()))
        return tokens[len(prompt) :]
