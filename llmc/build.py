"""The table of contents of the compiler: one function that strings its stages together.

checkpoint -> FX graph (frontend) -> lowered graph (passes) -> kernels and C++ (codegen) -> engine.plan, with the
accuracy report measured on the code that goes into the plan.
"""

from __future__ import annotations

import copy
import hashlib
import platform
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from torch import fx

import llmc
from llmc import accuracy
from llmc.codegen.cpu.compile import compile_unit
from llmc.codegen.cpu.emit import emit_unit
from llmc.codegen.cpu.program import Program, select_kernels
from llmc.codegen.plan_writer import PlanWriter
from llmc.errors import UserError
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import resolve
from llmc.frontend.tokenizer import TokenizerAssets, load_tokenizer
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.weights import Reader
from llmc.passes.pipeline import PipelineReport, listing, probe_batch, run_pipeline
from llmc.passes.result import PassContext
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.executor import PAGE_SIZE, CpuExecutor, ExecutorConfig
from llmc.runtime.targets import CPU_TARGETS, Target, parse_target, runnable_targets
from llmc.runtime.threads import default_threads

DATA = Path(__file__).parent / "data"
FORMATS = {"fp32": ("f32", "f32", "f32"), "bf16": ("bf16", "bf16", "bf16"),
           "int8": ("w8", "w8", "bf16"), "int4": ("w4", "w8", "bf16")}  # fmt: skip
"""precision -> (format of linears, format of head and token embedding, KV dtype)"""


class Progress(Protocol):
    """What `build` tells its caller: stages by name, and bars with a total."""

    def stage(self, name: str) -> None: ...

    def bar(self, name: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]: ...


@dataclass(frozen=True)
class BuildOptions:
    """The flags of `llmc build`; see its help. targets: names as the user wrote them, () is every CPU target."""

    precision: str = "int8"
    targets: tuple[str, ...] = ()
    max_model_len: int | None = None
    check_passes: bool = False
    dump_ir: Path | None = None
    evaluate: bool = True
    eval_text: Path | None = None
    max_kl: float | None = None
    sha256: str | None = None
    revision: str | None = None
    cxx: str | None = None


def build(model: str, output: Path, options: BuildOptions, progress: Progress) -> dict[str, Any]:
    """Builds a plan and returns its manifest with "engine_id" and "file_size".

    Raises UserError for whatever the user can mend; then nothing is left at `output` that was not there before.
    """
    targets = _targets(options)
    _check_output(output)
    progress.stage("resolve")
    checkpoint = open_checkpoint(resolve(model, sha256=options.sha256, revision=options.revision))
    try:
        return _Build(checkpoint, output, options, targets, progress).run()
    finally:
        checkpoint.close()


def _check_output(output: Path) -> None:
    """Refuses early what could not be replaced by a plan, or must not be, such as a device."""
    if output.is_dir():
        raise UserError(f"-o {output}: is a directory; give a file name such as {output}/engine.plan")
    if output.exists() and not output.is_file():
        raise UserError(f"-o {output}: is not an ordinary file; give another name")
    if not output.parent.is_dir():
        raise UserError(f"-o {output}: there is no directory {output.parent}; make it first")


def _targets(options: BuildOptions) -> list[Target]:
    wanted = [parse_target(name) for name in options.targets] or list(CPU_TARGETS)
    return [t for t in CPU_TARGETS if t in wanted]


class _Build:
    """One build; every method is a stage."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: Path,
        options: BuildOptions,
        targets: list[Target],
        progress: Progress,
    ) -> None:
        self.checkpoint, self.output, self.options = checkpoint, output, options
        self.targets, self.progress = targets, progress
        self.reader: Reader = checkpoint.read
        self.context = PassContext(*FORMATS[options.precision])

    def run(self) -> dict[str, Any]:
        config = self.checkpoint.hf_config()
        self.max_model_len = self.context_length(config)
        assets = load_tokenizer(self.checkpoint)
        tokens = self.eval_tokens(assets)
        self.progress.stage("export")
        graph = self.export(config)
        float32 = copy.deepcopy(graph) if tokens is not None else None
        report = self.lower(graph, config)
        if float32 is not None:
            run_pipeline(float32, PassContext())
        program = select_kernels(graph)
        source = emit_unit(program)
        with PlanWriter(self.output) as writer:
            code = self.write_segments(writer, program, source, graph, assets)
            result = self.evaluate(writer, float32, code, tokens)
            manifest = self.manifest(program, report, assets, result, config)
            engine_id = writer.finish(manifest)
        return manifest | {"engine_id": engine_id, "file_size": self.output.stat().st_size}

    def context_length(self, config: Any) -> int:
        """The model's context, or what --max-model-len asks for within it."""
        limit: int | None = getattr(config, "max_position_embeddings", None)
        wanted = self.options.max_model_len
        if limit is None and wanted is None:
            raise UserError("config.json does not say how long the context is; give --max-model-len")
        if wanted is not None and (wanted < 1 or (limit is not None and wanted > limit)):
            raise UserError(f"--max-model-len {wanted}: must be between 1 and the model's context of {limit}")
        return wanted or limit or 0

    def eval_tokens(self, assets: TokenizerAssets | None) -> list[int] | None:
        """The ids of the evaluation text, or None when there is to be no report."""
        options = self.options
        if not options.evaluate:
            if options.max_kl is not None:
                raise UserError("--max-kl needs the accuracy report; leave out --no-eval")
            return None
        if assets is None or not [t for t in self.targets if t in runnable_targets()]:
            why = "the checkpoint has no tokenizer" if assets is None else "no target runs on this machine"
            if options.max_kl is not None or options.eval_text is not None:
                raise UserError(f"no accuracy report can be made: {why}")
            self.progress.stage(f"no accuracy report: {why}")
            return None
        path = options.eval_text or DATA / "eval.txt"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--eval-text {path}: cannot be read as UTF-8 text: {error}") from error
        tokens = TextCodec(assets.tokenizer_json).encode(text)
        tokens = tokens[: min(accuracy.MAX_TOKENS, self.max_model_len)]
        if len(tokens) < 2:
            raise UserError(f"--eval-text {path}: needs at least two tokens")
        return tokens

    def export(self, config: Any) -> fx.Graph:
        model = build_meta_model(config)
        names = match_parameters(self.checkpoint, model)
        exported = export_model(model)
        return import_graph(exported, names)

    def lower(self, graph: fx.Graph, config: Any) -> PipelineReport:
        probe = (probe_batch(int(config.vocab_size)), self.reader) if self.options.check_passes else None
        self.progress.stage("passes")
        return run_pipeline(graph, self.context, probe, self.options.dump_ir)

    def write_segments(
        self,
        writer: PlanWriter,
        program: Program,
        source: str,
        graph: fx.Graph,
        assets: TokenizerAssets | None,
    ) -> dict[str, bytes]:
        """Compiles in the background while the weights are packed. Returns the code by target."""
        with ThreadPoolExecutor(len(self.targets)) as pool:
            self.progress.stage("compile")
            jobs = {t.name: pool.submit(compile_unit, source, t, self.options.cxx) for t in self.targets}
            table = program.weights
            stored = sum(e.size for e in table.entries)
            with self.progress.bar("pack weights", stored, "B") as advance:
                self.weights = writer.add_blocks("weights", table.size, table.blocks(self.reader), advance)
            code = {name: job.result() for name, job in jobs.items()}
        for name, data in code.items():
            writer.add(f"code/{name}", data)
        writer.add("source/step.cpp", source.encode())
        writer.add("ir/lowered.txt", "\n".join(listing(graph)).encode())
        if assets is not None:
            writer.add("tokenizer.json", assets.tokenizer_json)
            if assets.chat_template is not None:
                writer.add("chat_template.jinja", assets.chat_template.encode())
        return code

    def evaluate(
        self, writer: PlanWriter, graph: fx.Graph | None, code: dict[str, bytes], tokens: list[int] | None
    ) -> accuracy.Accuracy | None:
        if graph is None or tokens is None:
            return None
        need = accuracy.memory_needed(graph, len(tokens))
        self.progress.stage(f"accuracy report: takes about {need / 2**20:.0f} MiB (--no-eval skips it)")
        target = next(t for t in runnable_targets() if t.name in code)
        pages = -(-len(tokens) // PAGE_SIZE)
        config = ExecutorConfig(accuracy.ROWS, accuracy.ROWS, pages, default_threads())
        executor = CpuExecutor(code[target.name], writer.map_segment(self.weights), config)
        try:
            with self.progress.bar("accuracy", len(tokens), "tok") as advance:
                seen = 0

                def report(done: int) -> None:
                    nonlocal seen
                    advance(done - seen)
                    seen = done

                result = accuracy.measure(graph, self.reader, executor, tokens, report)
        finally:
            executor.close()
        limit = self.options.max_kl
        if limit is not None and not result.kl <= limit:
            raise UserError(f"mean KL {result.kl:.4g} is over --max-kl {limit:g}; no plan was written")
        return result

    # ---- what the plan says of itself

    def manifest(
        self,
        program: Program,
        report: PipelineReport,
        assets: TokenizerAssets | None,
        result: accuracy.Accuracy | None,
        config: Any,
    ) -> dict[str, Any]:
        page_bytes = sum(slot.page_bytes for slot in program.kv_slots)
        weight_bytes = sum(e.size for e in program.weights.entries)
        return {
            "format": "llmc.plan",
            "model": {
                "architecture": type(config).__name__.removesuffix("Config"),
                "vocab_size": program.vocab_size,
                "num_layers": report.counts["kv_layout"],
                "max_model_len": self.max_model_len,
                "precision": self.options.precision,
                "kv_dtype": self.context.kv_dtype,
                "page_size": PAGE_SIZE,
                "kv_bytes_per_token": page_bytes // PAGE_SIZE,
            },
            "targets": [t.name for t in self.targets],
            "tokenizer": _tokenizer(assets),
            "generation_config": _plain(self.checkpoint.generation_config),
            "weights": [_weight(e) for e in program.weights.entries],
            "memory": {
                "weight_bytes": weight_bytes,
                "arena_bytes_per_token": program.peaks["tokens"],
                "arena_bytes_per_row": program.peaks["rows"],
            },
            "accuracy": self.accuracy(result),
            "provenance": self.provenance(report),
        }

    def accuracy(self, result: accuracy.Accuracy | None) -> dict[str, Any] | None:
        if result is None:
            return None
        path = self.options.eval_text or DATA / "eval.txt"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        text = "llmc/data/eval.txt" if self.options.eval_text is None else path.name
        return result.manifest() | {"text": text, "text_sha256": digest, "against": "float32 graph"}

    def provenance(self, report: PipelineReport) -> dict[str, Any]:
        tools = ("torch", "transformers", "ziglang", "numpy", "tokenizers")
        return {
            "checkpoint": {"name": self.checkpoint.source_label, "sha256": self.checkpoint.digest},
            "llmc": llmc.__version__,
            "tools": {name: metadata.version(name).partition("+")[0] for name in tools},
            "compiler": Path(self.options.cxx).name if self.options.cxx else "zig c++",
            "passes": [{"name": name, "count": count} for name, count in report.counts.items()],
        }


def peak_memory() -> int:
    """Peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if platform.system() == "Darwin" else 1024)


def _weight(entry: Any) -> dict[str, Any]:
    shape = entry.ref.shape if entry.ref is not None else tuple(entry.constant.shape)
    name = entry.ref.describe() if entry.ref is not None else "constant"
    short = name if len(name) <= 400 else f"{name[:380]}… #{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return {"name": short, "shape": list(shape), "format": entry.format, "gated": entry.gated,
            "offset": entry.offset, "size": entry.size}  # fmt: skip


def _tokenizer(assets: TokenizerAssets | None) -> dict[str, Any] | None:
    if assets is None:
        return None
    return {"eos_token_ids": list(assets.eos_token_ids), "special_tokens": dict(assets.special_tokens),
            "add_bos": assets.add_bos}  # fmt: skip


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The scalar fields of generation_config.json that mean something to sampling."""
    kept = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
    return {k: v for k, v in config.items() if k in kept and isinstance(v, bool | int | float)}
