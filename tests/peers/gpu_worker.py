"""A process that runs one peer: `gpu_worker.py transformers|vllm CHECKPOINT cuda|cpu MAX_LENGTH MAX_BATCH`.

First it answers {"versions": …} or {"skipped": reason}; then each line {"prompts", "new"} of standard input with
{"seconds", "tokens"}. (cpu: transformers uncompiled, to try this file where there is no GPU.)
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata, util
from typing import Any

Prompts = list[list[int]]


class Skipped(Exception):
    """This peer cannot run here."""


class Transformers:
    """`generate` with a static cache in bfloat16, whose decode step transformers compiles with torch.compile and runs
    as a CUDA graph (its own default for such caches on a GPU)."""

    packages = ("torch", "transformers")

    def __init__(self, checkpoint: str, device: str, max_length: int, max_batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if device == "cuda" and not torch.cuda.is_available():
            raise Skipped(f"torch {torch.__version__} finds no CUDA")
        self.torch, self.device = torch, device
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self.model = model.to(device).eval()
        self.caches: dict[tuple[int, int], tuple[int, Any]] = {}

    def generate(self, prompts: Prompts, new: int) -> Prompts:
        from transformers import StaticCache

        length, key = len(prompts[0]), (len(prompts), len(prompts[0]))
        # One cache for each shape, as a captured graph holds its addresses; the warm-up finds how long it must be.
        room, cache = self.caches.get(key, (0, None))
        if room < length + new:
            room = -(-(length + new) // 64) * 64
            cache = StaticCache(config=self.model.config, max_cache_len=room)
            self.caches[key] = room, cache
        cache.reset()
        ids = self.torch.tensor(prompts, device=self.device)
        found = self.model.generate(
            ids, attention_mask=self.torch.ones_like(ids), past_key_values=cache, do_sample=False, max_new_tokens=new,
            min_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        tokens: Prompts = found[:, length:].tolist()
        return tokens


class Vllm:
    """vLLM's offline engine with its defaults, but for prefix caching, which would skip the prompts."""

    packages = ("vllm", "torch")

    def __init__(self, checkpoint: str, device: str, max_length: int, max_batch: int) -> None:
        if util.find_spec("vllm") is None:
            raise Skipped("vllm is not installed")
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self.params = SamplingParams
        self.llm = LLM(
            model=checkpoint, dtype="bfloat16", gpu_memory_utilization=0.4, max_model_len=max_length,
            max_num_seqs=max_batch, enable_prefix_caching=False,
        )  # fmt: skip

    def generate(self, prompts: Prompts, new: int) -> Prompts:
        params = self.params(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


PEERS: dict[str, Any] = {"transformers": Transformers, "vllm": Vllm}


def _main(name: str, checkpoint: str, device: str, max_length: str, max_batch: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        peer = PEERS[name](checkpoint, device, int(max_length), int(max_batch))
    except Skipped as reason:
        answer({"skipped": str(reason)})
        return
    answer({"versions": {package: metadata.version(package) for package in peer.packages}})
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = peer.generate(request["prompts"], request["new"])
        answer({"seconds": time.perf_counter() - start, "tokens": tokens})


if __name__ == "__main__":
    _main(*sys.argv[1:])
