"""The table of contents of the compiler: one function that strings its stages together.

checkpoint -> FX graph (frontend) -> lowered graph (passes) -> C++ and GPU launches (codegen) -> engine.plan, with the
accuracy report measured on the code that goes into the plan.
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from llmc import accuracy, budget, calibration
from llmc.build_options import BuildOptions, pass_context
from llmc.codegen.backend import BACKENDS, CPU, Backend, Code, backend_of, parse_targets
from llmc.codegen.cpu.compile import stopped_compilers
from llmc.codegen.plan_writer import PlanWriter
from llmc.codegen.weights import WeightTable, no_quantizer, quantised_rows
from llmc.errors import UserError
from llmc.files import check_output
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import resolve
from llmc.frontend.text_part import left_out
from llmc.frontend.tokenizer import TokenizerAssets, check_vocabulary, load_tokenizer
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import W4, W8, Format
from llmc.kernels.weights import Reader, WeightRef
from llmc.kv_page import PAGE_SIZE
from llmc.manifest import (
    DATA,
    accuracy_section,
    generation_section,
    model_section,
    provenance_section,
    tokenizer_section,
    weight_section,
)
from llmc.passes.pipeline import PipelineReport, listing, probe_batch, run_pipeline
from llmc.passes.result import PassContext
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import runnable_targets
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.template_process import probe_template
from llmc.runtime.threads import default_threads
from llmc.sensitivity import units_of
from llmc.stored import stored_lines, stored_weights


class Progress(Protocol):
    """What `build` tells its caller: stages by name, and bars with a total."""

    def stage(self, name: str) -> None: ...

    def bar(self, name: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]: ...


def build(model: str, output: Path, options: BuildOptions, progress: Progress) -> dict[str, Any]:
    """Builds a plan and returns its manifest with "engine_id" and "file_size".

    Raises UserError for whatever the user can mend; then nothing is left at `output` that was not there before.
    """
    targets = parse_targets(options.targets)
    context = pass_context(options)  # flags that do not go together are refused before anything is read
    if options.calibration_text is not None and context.body_format.stored is not W4:
        raise UserError("--calibration: only --int4 is calibrated; leave it out")
    check_output(output, "-o")
    if options.dump_ir is not None and options.dump_ir.exists() and not options.dump_ir.is_dir():
        raise UserError(f"--dump-ir {options.dump_ir}: is not a directory; name one, or one that is to be made")
    progress.stage("resolve")
    source = resolve(model, sha256=options.sha256, revision=options.revision, bar=progress.bar)
    output = check_output(output, "-o", (source.path, *(p for p in (options.eval_text, options.calibration_text) if p)))
    checkpoint = open_checkpoint(source, progress.stage)
    try:
        grids = {name: info.grid for name, info in checkpoint.tensors.items() if info.grid is not None}
        context = pass_context(options, grids)
        return _Build(checkpoint, output, options, targets, context, progress).run()
    finally:
        checkpoint.close()


class _Build:
    """One build; every method is a stage."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: Path,
        options: BuildOptions,
        targets: list[str],
        context: PassContext,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.output, self.options = checkpoint, output, options
        self.targets, self.context, self.progress = targets, context, progress
        self.reader: Reader = checkpoint.read
        quantised = any(info.grid is not None for info in checkpoint.tensors.values())
        self.codes = checkpoint.codes if quantised and options.as_stored is not False else None
        self.measured_on = self._measuring_target()
        self.calibration: calibration.Calibration | None = None
        self.budget: budget.Choice | None = None

    def _measuring_target(self) -> str | None:
        """The CPU target whose code the accuracy report runs. A plan whose code does not run here, for GPUs or another
        CPU, is measured on code for this one that is not stored (docs/gpu.md says how GPUs differ); there is none for
        weight-only products."""
        runnable = [target.name for target in runnable_targets()]
        stored = next((name for name in runnable if name in self.targets), None)
        if stored is not None or "cpu" not in self.context.body_format.backends:
            return stored
        return runnable[0] if runnable else None

    def run(self) -> dict[str, Any]:
        config = self.checkpoint.hf_config()
        model = build_meta_model(config)
        self.max_model_len = self.context_length(config)
        assets = load_tokenizer(self.checkpoint, self.progress.stage)
        _check_end_tokens(assets, config)
        if assets is None:
            self.progress.stage("the checkpoint has no tokenizer: run and serve will refuse the plan")
        else:
            check_vocabulary(assets, int(config.vocab_size), self.progress.stage)
        if assets is not None and assets.chat_template is not None:
            probe_template(assets.chat_template, assets.special_tokens)
        tokens = self.eval_tokens(assets)
        text = self.calibration_text(assets, config)
        self.progress.stage("export")
        graph = self.export(model)
        if self.options.max_weight_bytes is not None:
            measured = tokens or (text or calibration.choose_text(None, assets, int(config.vocab_size))).tokens
            self.context = replace(self.context, choose=lambda exact: self.choose_formats(exact, text, measured))
        report = self.lower(graph, config, keep_exact=tokens is not None or text is not None)
        self.calibrate(report.exact, text)
        table = WeightTable()
        if tokens is None:
            self.measured_on = None
        codes = self.select(graph, table)
        with PlanWriter(self.output) as writer:
            compiled = self.write_code(writer, table, codes)
            self.write_assets(writer, graph, assets)
            result = self.evaluate(writer, report.exact, compiled, tokens)
            manifest = self.manifest(table, codes, compiled, report, assets, result, config)
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
        if assets is None or self.measured_on is None:
            why = "no target runs on this machine" if self.targets_of(CPU) else "the CPU has no code of this arithmetic"
            why = "the checkpoint has no tokenizer" if assets is None else why
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

    def calibration_text(self, assets: TokenizerAssets | None, config: Any) -> calibration.Text | None:
        """What int4 is calibrated on; None where nothing is."""
        options = self.options
        if self.context.body_format.stored is not W4 or not options.calibrate:
            return None
        if not runnable_targets():
            raise UserError("no target of llmc runs on this machine, so it cannot calibrate; add --no-calibration")
        return calibration.choose_text(options.calibration_text, assets, int(config.vocab_size))

    def export(self, model: Any) -> fx.Graph:
        recipes = match_parameters(self.checkpoint, model, self.progress.stage)
        exported = export_model(model)
        if unused := left_out(dict(model.named_parameters()), exported.parameters.values()):
            self.progress.stage(f"no text goes through these weights, which are left out: {unused}")
        return import_graph(exported, recipes)

    def lower(self, graph: fx.Graph, config: Any, keep_exact: bool) -> PipelineReport:
        """keep_exact: the report is to hold the float32 graph, for the accuracy report."""
        probe = (probe_batch(int(config.vocab_size)), self.reader) if self.options.check_passes else None
        self.progress.stage("passes")
        return run_pipeline(graph, self.context, probe, self.options.dump_ir, keep_exact)

    def calibrate(self, graph: fx.Graph | None, text: calibration.Text | None) -> None:
        """Sets `calibration`, if it is not set yet."""
        if graph is not None and text is not None and self.calibration is None:
            with self.progress.bar("calibrate", accuracy.layers(graph), "layer") as advance:
                self.calibration = calibration.collect(graph, self.reader, text, self.max_model_len, lambda: advance(1))

    def choose_formats(
        self, graph: fx.Graph, text: calibration.Text | None, tokens: Sequence[int]
    ) -> Mapping[WeightRef, Format]:
        """The formats of linears within --max-weight-bytes; sets `budget`. tokens: to measure on."""
        self.calibrate(graph, text)
        quantizer = self.calibration.quantize if self.calibration else no_quantizer
        with self.progress.bar("measure linears", len(units_of(graph)), "linear") as advance:
            self.budget = budget.decide(
                graph, self.reader, budget.windows_of(tokens, self.max_model_len),
                lambda ref, format: quantised_rows(quantizer, ref, format, ref.read(self.reader)).values(),
                (W4, W8, self.context.head_format), self.options.max_weight_bytes or 0, lambda: advance(1),
            )  # fmt: skip
        return self.budget.formats

    def select(self, graph: fx.Graph, table: WeightTable) -> dict[Backend, Code]:
        """What every backend with a part in this build makes of the graph; all read one set of weights."""
        needed = {backend_of(name) for name in self.compiled_for()}
        return {b: b.select(graph, table, self.options.cxx) for b in BACKENDS if b in needed}

    def compiled_for(self) -> list[str]:
        """The targets of the plan, and that of the accuracy report if it is none of them."""
        extra = self.measured_on
        return self.targets if extra is None or extra in self.targets else [*self.targets, extra]

    def targets_of(self, backend: Backend) -> list[str]:
        """The targets of the plan that are a backend's."""
        return [name for name in self.targets if backend_of(name) is backend]

    def write_code(self, writer: PlanWriter, table: WeightTable, codes: dict[Backend, Code]) -> dict[str, bytes]:
        """Compiles what reports no progress in the background while the weights are packed, then the rest. Returns the
        code by target, with that of the accuracy report."""
        quiet = [name for name in self.compiled_for() if not codes[backend_of(name)].steps(name)]
        with ThreadPoolExecutor(max(1, len(quiet))) as pool, stopped_compilers():
            self.progress.stage("compile")
            jobs = {name: pool.submit(codes[backend_of(name)].compile, name, lambda done: None) for name in quiet}
            stored = sum(e.size for e in table.entries)
            with self.progress.bar("pack weights", stored, "B") as advance:
                quantizer = self.calibration.quantize if self.calibration else no_quantizer
                blocks = table.blocks(self.reader, self.codes, quantizer)
                self.weights = writer.add_blocks("weights", table.size, blocks, advance)
            compiled = {name: job.result() for name, job in jobs.items()}
        self.stored = stored_weights(table, self.checkpoint)
        for line in stored_lines(self.stored):
            self.progress.stage(line)
        for backend, code in codes.items():
            for name in self.targets_of(backend):
                if name not in compiled:
                    with self.progress.bar(f"compile {name}", code.steps(name), "kernel") as advance:
                        compiled[name] = code.compile(name, advance)
                writer.add(f"code/{name}", compiled[name])
            for name, data in code.sources.items() if self.targets_of(backend) else ():
                writer.add(name, data)
        return compiled

    def write_assets(self, writer: PlanWriter, graph: fx.Graph, assets: TokenizerAssets | None) -> None:
        writer.add("ir/lowered.txt", "\n".join(listing(graph)).encode())
        if assets is not None:
            writer.add("tokenizer.json", assets.tokenizer_json)
            if assets.chat_template is not None:
                writer.add("chat_template.jinja", assets.chat_template.encode())

    def evaluate(
        self, writer: PlanWriter, graph: fx.Graph | None, compiled: dict[str, bytes], tokens: list[int] | None
    ) -> accuracy.Accuracy | None:
        if graph is None or tokens is None:
            return None
        need = peak_memory() + self.weights.size + accuracy.memory_needed(graph, len(tokens))
        self.progress.stage(f"accuracy report: takes about {need / 2**20:.0f} MiB (--no-eval skips it)")
        with self.progress.bar("float32 reference", accuracy.layers(graph), "layer") as advance:
            reference = accuracy.run_reference(graph, self.reader, tokens, lambda: advance(1))
        assert self.measured_on is not None
        pages = -(-len(tokens) // PAGE_SIZE)
        config = ExecutorConfig(accuracy.ROWS, accuracy.ROWS, pages, default_threads())
        executor = CpuExecutor(compiled[self.measured_on], writer.map_segment(self.weights), config)
        try:
            with self.progress.bar("accuracy", len(tokens), "tok") as advance:
                seen = 0

                def report(done: int) -> None:
                    nonlocal seen
                    advance(done - seen)
                    seen = done

                result = accuracy.measure(reference, executor, tokens, report)
        finally:
            executor.close()
        limit = self.options.max_kl
        if limit is not None and not result.kl <= limit:
            raise UserError(f"mean KL {result.kl:.4g} is over --max-kl {limit:g}; no plan was written")
        return result

    def precision(self) -> str:
        """What the plan calls its precision."""
        if self.budget is not None:
            return "int4 and int8"
        asked = self.options.precision or "int8"
        named = f"as stored, else {asked}" if self.context.grids else asked
        return named + (" weight-only" if self.options.weight_only else "")

    def manifest(
        self,
        table: WeightTable,
        codes: dict[Backend, Code],
        compiled: dict[str, bytes],
        report: PipelineReport,
        assets: TokenizerAssets | None,
        result: accuracy.Accuracy | None,
        config: Any,
    ) -> dict[str, Any]:
        """What the plan says of itself."""
        code = next(iter(codes.values()))
        layers = report.counts["kv_layout"]
        model = model_section(config, code.vocab_size, layers, self.max_model_len, code.kv_page_bytes) | {
            "precision": self.precision(),
            "kv_dtype": self.context.kv_dtype,
        }
        memory: dict[str, Any] = {"weight_bytes": sum(e.size for e in table.entries)}
        tools: list[str] = []
        for backend, code in codes.items():
            if stored := {name: compiled[name] for name in self.targets_of(backend)}:
                memory |= code.memory(stored)
                tools += backend.tools
        return {
            "format": "llmc.plan",
            "model": model,
            "targets": self.targets,
            "tokenizer": tokenizer_section(assets),
            "generation_config": generation_section(self.checkpoint.generation_config),
            "weights": [weight_section(e) for e in table.entries],
            "memory": memory,
            "budget": self.budget.manifest() if self.budget else None,
            "calibration": self.calibration.text.manifest() if self.calibration else None,
            "accuracy": accuracy_section(result, self.options.eval_text),
            "provenance": provenance_section(self.checkpoint, report, self.options.cxx, tools, self.stored),
        }


def _check_end_tokens(assets: TokenizerAssets | None, config: Any) -> None:
    """Raises UserError for an end of generation that the model cannot produce: answers would not end."""
    beyond = [token for token in (assets.eos_token_ids if assets else ()) if not 0 <= token < config.vocab_size]
    if beyond:
        raise UserError(
            f"the checkpoint ends a generation at token {beyond[0]}, and its vocabulary has {config.vocab_size}; "
            "mend eos_token_id in config.json and generation_config.json"
        )


def peak_memory() -> int:
    """Peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if platform.system() == "Darwin" else 1024)
