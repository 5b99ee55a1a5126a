"""From a verified plan to an engine over the machine's best code for it, and its tokenizer."""

from __future__ import annotations

from llmc.errors import UserError
from llmc.runtime.batch import Executor
from llmc.runtime.config import EngineConfig, LoadOptions
from llmc.runtime.cpu import load as cpu
from llmc.runtime.cuda import load as cuda
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.engine import Engine
from llmc.runtime.plan import Plan, manifest_fields


def load_engine(plan: Plan, codec: TextCodec | None, options: LoadOptions) -> Engine:
    """An engine over an open, verified plan; not yet started. Raises UserError for limits that cannot be met."""
    with manifest_fields(plan.path):
        max_model_len = int(plan.manifest["model"]["max_model_len"])
        eos = frozenset((plan.manifest["tokenizer"] or {}).get("eos_token_ids", ()))
    if options.max_model_len is not None:
        if not 1 <= options.max_model_len <= max_model_len:
            raise UserError(
                f"--max-model-len {options.max_model_len}: the plan was built for 1 to {max_model_len} tokens"
            )
        max_model_len = options.max_model_len
    gpu = cuda.choose_gpu(plan, options.device)
    budget, seqs = options.max_num_batched_tokens, options.max_num_seqs
    if budget is None:
        budget = cpu.DEFAULT_TOKENS if gpu is None else cuda.DEFAULT_TOKENS
    if seqs is None:
        seqs = cpu.DEFAULT_SEQS if gpu is None else cuda.default_seqs(plan, options, budget, gpu)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_queue=options.max_queue,
        eos_token_ids=eos,
        prefix_cache=options.prefix_cache,
        kv_eviction=options.kv_eviction,
    )
    executor: Executor
    if gpu is None:
        executor = cpu.load_cpu_executor(plan, options, config)
    else:
        executor = cuda.load_cuda_executor(plan, options, config, gpu)
        executor.capture_graphs()
    return Engine(executor, config, codec)


def load_codec(plan: Plan) -> TextCodec | None:
    """The plan's tokenizer, or None when it was built without one."""
    return TextCodec(bytes(plan.segment("tokenizer.json"))) if "tokenizer.json" in plan.segments else None
