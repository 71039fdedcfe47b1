"""Owns letting the dense model answer questions of our own making, so that training keeps how it chats."""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import numpy as np
import torch
from corpus import END_OF_TEXT, SYSTEM
from dense import Dense, load_tokenizer, read_dense
from transformers import LlamaConfig, LlamaForCausalLM

END_OF_TURN = 2
_ASKS = (
    "What is {}?", "Tell me about {}.", "Explain {} in simple terms.", "Why is {} important?",
    "Write a short story about {}.", "Write a poem about {}.", "Give me three facts about {}.",
    "How does {} work?", "Write a short email to a friend about {}.", "What are the benefits of {}?",
    "Summarise what you know about {} in two sentences.", "How would you teach {} to a child?",
    "What should a beginner know about {}?", "Describe {} in one paragraph.",
    "Translate into French: I like {}.", "Write a Python function that has to do with {}.",
    "Is {} a good subject for a first project?", "List five words connected with {}.",
)  # fmt: skip
_TOPICS = (
    "the moon", "photosynthesis", "a garden", "the ocean", "gravity", "a lighthouse", "recursion", "cooking",
    "the Roman Empire", "electricity", "friendship", "a bicycle", "the heart", "volcanoes", "music",
    "honesty",
    "a list of numbers", "sorting", "databases", "fractions", "prime numbers", "triangles", "winter", "bread",
    "trees", "bees", "sleep", "exercise", "a train journey", "the sun", "rain", "rivers", "maps", "books",
    "chess", "painting", "history", "chemistry", "DNA", "vaccines", "money", "saving", "a small village",
    "the internet", "programming", "a text file", "dates and times", "strings", "probability", "percentages",
    "a king and a farmer", "dragons", "a lost dog", "the desert", "coffee", "tea", "football", "language",
    "grammar", "dictionaries", "proverbs", "China", "Paris", "India", "the Amazon", "islands", "whales",
    "dinosaurs", "planets", "stars", "light", "sound", "water", "iron", "glass", "paper", "clocks", "bridges",
    "engines", "robots", "logic", "proofs", "sets", "equations", "climate", "earthquakes", "mountains",
)  # fmt: skip


def questions(count: int, seed: int) -> list[str]:
    """``count`` different questions in a fixed random order."""
    every = [ask.format(topic) for ask, topic in itertools.product(_ASKS, _TOPICS)]
    random.Random(seed).shuffle(every)
    return every[:count]


def as_llama(dense: Dense, device: torch.device) -> LlamaForCausalLM:
    """The dense model in transformers' own class, for its generation with a cache."""
    vocabulary, width = dense.tensors["token_embd.weight"].shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=dense.tensors["blk.0.ffn_gate.weight"].shape[0],
        num_hidden_layers=dense.layers,
        num_attention_heads=dense.heads,
        num_key_value_heads=dense.kv_heads,
        rms_norm_eps=dense.epsilon,
        rope_theta=dense.rope_base,
        rope_parameters={"rope_type": "default", "rope_theta": dense.rope_base},
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": dense.tensors["token_embd.weight"],
        "lm_head.weight": dense.tensors["token_embd.weight"],
        "model.norm.weight": dense.tensors["output_norm.weight"],
    }
    for layer in range(dense.layers):
        for ours, theirs in names.items():
            matrix = dense.tensors[f"blk.{layer}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):
                # GGUF files of llama hold rotary pairs side by side; transformers holds two halves.
                heads = dense.heads if ours == "attn_q" else dense.kv_heads
                matrix = matrix.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(matrix.shape)
            state[f"model.layers.{layer}.{theirs}.weight"] = matrix
    model = LlamaForCausalLM(config)
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state.items()})
    return model.to(device, torch.bfloat16).eval()


def main() -> None:
    """Write ``selfchat.train.npy``: whole chats, the answers sampled from the dense model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1530)
    parser.add_argument("--tokens", type=int, default=220)
    parser.add_argument("--rounds", type=int, default=3, help="answers to each question")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = load_tokenizer(arguments.tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = as_llama(read_dense(arguments.dense), device)
    prompts = [
        tokenizer.encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        ).ids
        for question in questions(arguments.count, arguments.seed)
    ]
    longest = max(map(len, prompts))
    padded = torch.tensor([[END_OF_TURN] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    chats: list[int] = []
    for _ in range(arguments.rounds):
        answers = model.generate(
            input_ids=padded, attention_mask=mask, max_new_tokens=arguments.tokens, do_sample=True,
            temperature=0.6, top_p=0.95, eos_token_id=END_OF_TURN, pad_token_id=END_OF_TURN,
        )  # fmt: skip
        for prompt, answer in zip(prompts, answers[:, longest:].tolist(), strict=True):
            # An answer that did not end is cut off: nothing teaches the model to stop there.
            whole = answer[: answer.index(END_OF_TURN) + 1] if END_OF_TURN in answer else answer
            chats += [*prompt, *whole, END_OF_TEXT]
    np.save(arguments.output, np.array(chats, np.uint16))
    print(f"selfchat: {len(chats)} tokens", flush=True)
    print(tokenizer.decode(chats[:700], skip_special_tokens=False), flush=True)


if __name__ == "__main__":
    main()
