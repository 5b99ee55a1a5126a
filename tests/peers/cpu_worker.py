"""A process that runs one engine on the CPU: `cpu_worker.py ENGINE MODEL THREADS MAX_LENGTH
MAX_BATCH PROMPT_TOKENS` (limits: tokens of a sequence, sequences, tokens of all prompts at once).

It runs in the environment of its engine and imports nothing of the others. First it answers {"versions": …}; then each
line {"prompts", "new"} of standard input with {"first_s", "first_tokens", "seconds", "tokens"}: seconds from all
prompts at hand until every sequence had its first token, the tokens given by then, seconds to the end, and the tokens
of each sequence, greedy and past any end of text.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Answer = dict[str, Any]
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class Clock:
    """Collects the tokens of all sequences, and the moment when the last of them began."""

    def __init__(self, sequences: int) -> None:
        self.tokens: Prompts = [[] for _ in range(sequences)]
        self._waiting = sequences
        self._first_s, self._first_tokens = 0.0, 0
        self._start = time.perf_counter()

    def add(self, sequence: int, tokens: list[int]) -> None:
        if not tokens:
            return
        begins = not self.tokens[sequence]
        self.tokens[sequence] += tokens
        if begins:
            self._waiting -= 1
        if self._waiting == 0 and not self._first_s:
            self._first_s = time.perf_counter() - self._start
            self._first_tokens = sum(map(len, self.tokens))

    def answer(self) -> Answer:
        return {
            "first_s": self._first_s, "first_tokens": self._first_tokens,
            "seconds": time.perf_counter() - self._start, "tokens": self.tokens,
        }  # fmt: skip


class Llmc:
    """As `llmc serve` runs a plan, without HTTP and text: scheduler, batches, executor."""

    packages = ("numpy",)

    def __init__(self, model: str, threads: int, max_length: int, max_batch: int, prompt_tokens: int) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed
        from llmc.runtime.config import LoadOptions
        from llmc.runtime.load import load_engine
        from llmc.runtime.plan import Plan

        options = LoadOptions(
            prefix_cache=False,
            max_model_len=max_length, max_num_seqs=max_batch, max_num_batched_tokens=prompt_tokens, threads=threads,
            device="cpu",
        )  # fmt: skip
        self.engine = load_engine(Plan.open(Path(model)), None, options)
        self.engine.start()
        self.loop = asyncio.new_event_loop()
        self.requests = 0

    def generate(self, prompts: Prompts, new: int) -> Answer:
        from llmc.runtime.request import Request, SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        names = {f"{self.requests}-{i}": i for i in range(len(prompts))}
        self.requests += 1
        requests = [Request(name, tuple(prompts[i]), params) for name, i in names.items()]

        async def collect() -> Answer:
            clock = Clock(len(prompts))
            stream = self.engine.open_stream(requests)
            try:
                async for output in stream:
                    clock.add(names[output.request_id], list(output.token_ids))
            finally:
                stream.close()
            return clock.answer()

        return self.loop.run_until_complete(collect())


class OpenVino:
    """OpenVINO GenAI's pipeline for continuous batching, step by step."""

    packages = ("openvino", "openvino-genai")

    def __init__(self, model: str, threads: int, max_length: int, max_batch: int, prompt_tokens: int) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = max_batch, prompt_tokens
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.requests = 0

    def generate(self, prompts: Prompts, new: int) -> Answer:
        import numpy as np
        import openvino as ov  # type: ignore[import-not-found]
        import openvino_genai as genai

        config = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        clock = Clock(len(prompts))
        handles = [self.pipeline.add_request(self.requests + i, ids, config) for i, ids in enumerate(inputs)]
        self.requests += len(prompts)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    (output,) = handle.read().values()
                    clock.add(i, list(output.generated_ids))
        return clock.answer()


class OnnxRuntime:
    """ONNX Runtime GenAI's generator."""

    packages = ("onnxruntime", "onnxruntime-genai")

    def __init__(self, model: str, threads: int, max_length: int, max_batch: int, prompt_tokens: int) -> None:
        import onnxruntime_genai as genai  # type: ignore[import-not-found]

        config = genai.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self.model = genai.Model(config)

    def generate(self, prompts: Prompts, new: int) -> Answer:
        import numpy as np
        import onnxruntime_genai as genai

        length = len(prompts[0]) + new
        params = genai.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, max_length=length, min_length=length, batch_size=len(prompts))
        generator = genai.Generator(self.model, params)
        clock = Clock(len(prompts))
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            for i, token in enumerate(generator.get_next_tokens()):
                clock.add(i, [int(token)])
        return clock.answer()


class Transformers:
    """transformers, eager in float32, with its dynamic cache; no more than the model and an argmax in each step."""

    packages = ("torch", "transformers")

    def __init__(self, model: str, threads: int, max_length: int, max_batch: int, prompt_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompts: Prompts, new: int) -> Answer:
        from transformers import DynamicCache

        ids, cache = self.torch.tensor(prompts), DynamicCache(config=self.model.config)
        clock = Clock(len(prompts))
        with self.torch.inference_mode():
            for _ in range(new):
                logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                for i, (token,) in enumerate(ids.tolist()):
                    clock.add(i, [token])
        return clock.answer()


ENGINES: dict[str, Any] = {
    "llmc": Llmc, "openvino": OpenVino, "onnxruntime": OnnxRuntime, "transformers": Transformers
}  # fmt: skip


def _main(name: str, model: str, *limits: str) -> None:
    # Stopped, it would not see that nobody is left to ask: it ends with the process that began it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: Answer) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    engine = ENGINES[name](model, *map(int, limits))
    answer({"versions": {package: metadata.version(package) for package in engine.packages}})
    for line in sys.stdin:
        request = json.loads(line)
        answer(engine.generate(request["prompts"], request["new"]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
