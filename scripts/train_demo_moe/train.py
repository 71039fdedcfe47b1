"""Owns the training loop: routers and routed experts learn next-token prediction beside the frozen model.

The schedule goes by time, so that a run fits whatever machine it gets: warm-up, a plateau, and a linear decay
during which the experts are already seen as Q4_0, as they will be shipped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from dense import read_dense
from export import export
from model import Experts, Upcycled

# Share of a batch. Chats keep the instruction model's manners; the rest are the six domains.
MIX = {
    "code": 0.26, "math": 0.17, "chinese": 0.17, "prose": 0.12, "techdoc": 0.12, "science": 0.05,
    "chat": 0.05, "selfchat": 0.06,
}  # fmt: skip
_DECAY_FROM = 0.6
_WARM_UP_STEPS = 40


def windows(tokens: np.ndarray, length: int, seed: int) -> Iterator[np.ndarray]:
    """Windows of ``length`` tokens for ever: each epoch cuts at another offset and shuffles."""
    chance = np.random.default_rng(seed)
    while True:
        start = int(chance.integers(min(length, len(tokens) - length)))
        count = (len(tokens) - start) // length
        for index in chance.permutation(count):
            yield tokens[start + index * length : start + (index + 1) * length]


def batches(data: Path, size: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches (size, length) of int64 with ``MIX`` of the domains; fractions are drawn."""
    sources = [
        windows(np.load(data / f"{name}.train.npy"), length, seed + number) for number, name in enumerate(MIX)
    ]
    chance = np.random.default_rng(seed)
    share = np.array(list(MIX.values())) / sum(MIX.values())
    while True:
        counts = np.floor(share * size).astype(int)
        rest = chance.choice(len(share), size - counts.sum(), p=share)
        for number in rest:
            counts[number] += 1
        rows = [next(source) for source, count in zip(sources, counts, strict=True) for _ in range(count)]
        yield torch.from_numpy(np.stack(rows).astype(np.int64)).pin_memory()


def main() -> None:
    """Train for ``--seconds`` and write weights, log and checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="weights and log")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balance loss")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = Upcycled(read_dense(arguments.dense), Experts(), device, torch.bfloat16)
    model.compile()
    optimizer = torch.optim.AdamW(
        model.trained.values(), lr=arguments.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    source = batches(arguments.data, arguments.batch, arguments.length + 1, arguments.seed)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M trained parameters", flush=True)

    begin = 0.0
    step = 0
    exported_at = time.monotonic()
    with (arguments.output / "train-log.jsonl").open("w") as log:
        while True:
            tokens = next(source).to(device, non_blocking=True)
            # The first step compiles; the clock of the schedule starts after it.
            progress = (time.monotonic() - begin) / arguments.seconds if step else 0.0
            if progress >= 1:
                break
            model.quantised = progress >= _DECAY_FROM
            rate = arguments.rate * min(
                (step + 1) / _WARM_UP_STEPS, max(0.02, (1 - progress) / (1 - _DECAY_FROM)), 1.0
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            hidden, _, balance = model.hidden(tokens[:, :-1])
            loss = model.losses(hidden, tokens[:, 1:]).mean()
            (loss + arguments.balance * balance).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                torch.cuda.synchronize()
                begin = time.monotonic()
            step += 1
            if step % 10 == 0:
                seen = step * arguments.batch * arguments.length
                record = {
                    "step": step, "tokens": seen, "seconds": round(time.monotonic() - begin, 1),
                    "loss": round(loss.item(), 4), "balance": round(balance.item(), 4),
                    "norm": round(norm.item(), 3), "rate": rate,
                }  # fmt: skip
                print(json.dumps(record), file=log, flush=True)
                if step % 50 == 0:
                    print(record, flush=True)
            if time.monotonic() - exported_at > 100:
                export(model, arguments.output)
                exported_at = time.monotonic()
    export(model, arguments.output)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"done: {step} steps, {peak:.0f} GiB", flush=True)


if __name__ == "__main__":
    main()
