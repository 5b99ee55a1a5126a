"""Logits of one engine: `accuracy_worker.py ENGINE MODEL TOKENS OUT`. TOKENS is a JSON file with windows of token ids,
all of one length; OUT becomes a float32 array [windows, length, vocabulary] in numpy's format. It runs in the
environment of its engine, as cpu_worker.py does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

Windows = list[list[int]]
Logits = np.ndarray[Any, np.dtype[np.float32]]


def llmc(model: str, windows: Windows) -> list[Logits]:
    """The plan's machine code, as the accuracy report of `llmc build` runs it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed
    from llmc.accuracy import ROWS, engine_logits
    from llmc.kv_page import PAGE_SIZE
    from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
    from llmc.runtime.cpu.targets import choose_target
    from llmc.runtime.plan import Plan

    plan, pages = Plan.open(Path(model)), -(-len(windows[0]) // PAGE_SIZE)
    target = choose_target(list(plan.manifest["targets"]))
    config = ExecutorConfig(max_num_tokens=ROWS, max_num_rows=ROWS, num_pages=pages, threads=1)
    executor = CpuExecutor(plan.segment(f"code/{target.name}"), plan.segment("weights"), config)
    found = [np.concatenate(list(engine_logits(executor, np.array(window, np.int32)))) for window in windows]
    executor.close()
    return found


def openvino(model: str, windows: Windows) -> list[Logits]:
    """The model that OpenVINO GenAI runs, through optimum: its pipeline gives no logits."""
    import torch
    from optimum.intel import OVModelForCausalLM  # type: ignore[import-not-found]

    engine = OVModelForCausalLM.from_pretrained(model)
    ones = torch.ones(1, len(windows[0]), dtype=torch.long)
    return [engine(torch.tensor([window]), attention_mask=ones).logits[0].float().numpy() for window in windows]


def onnxruntime(model: str, windows: Windows) -> list[Logits]:
    """ONNX Runtime GenAI's generator, after the window as a prompt."""
    import onnxruntime_genai as genai  # type: ignore[import-not-found]

    engine, found = genai.Model(model), []
    for window in windows:
        params = genai.GeneratorParams(engine)
        params.set_search_options(do_sample=False, max_length=len(window) + 1, batch_size=1)
        generator = genai.Generator(engine, params)
        generator.append_tokens(np.array([window], np.int32))
        found.append(np.asarray(generator.get_output("logits"), np.float32)[0])
    return found


def transformers(model: str, windows: Windows) -> list[Logits]:
    """The checkpoint in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [engine(torch.tensor([window])).logits[0].numpy() for window in windows]


ENGINES = {"llmc": llmc, "openvino": openvino, "onnxruntime": onnxruntime, "transformers": transformers}


if __name__ == "__main__":
    np.save(sys.argv[4], np.stack(ENGINES[sys.argv[1]](sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))))
