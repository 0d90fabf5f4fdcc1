"""How fast a model decodes on a GPU, by batch size: reads from memory, and computing. Pure.

Every step reads all weights once, whatever the batch, and the KV cache of each sequence; it computes each sequence's
token. So a larger batch costs little until the computing takes longer than the reading.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from operator import itemgetter

from gateway.features.plan.capacity import Fit, Settings, Workload, bytes_per_sequence
from gateway.features.plan.gpus import Gpu
from gateway.features.plan.model import ModelShape

# The shares of the data sheet's figures that kernels reach: fitted to a published profile of Llama 3.1 8B on an H100.
_READS_WEIGHTS = 0.75
_READS_CACHE = 0.83
_COMPUTES = 0.54
_ATTENDS = 0.41
_HOST_SECONDS = 2e-3  # of each step: scheduling, launches, sampling
_EXCHANGE_SECONDS = 8e-6  # tensor parallel, twice a layer, at least
_OVERLAP = 0.5  # the part of the computing that reading hides
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """One row: `batch` requests decode at the same time on one engine."""

    batch: int
    tokens_per_second: float  # of answers, including the time of prompts
    _: KW_ONLY
    decode_tokens_per_second: float
    seconds_per_token: float
    limit: str  # the part that takes most of the time
    fits: bool


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on the GPUs of one engine, each with the same share."""

    shape: ModelShape
    settings: Settings
    gpu: Gpu
    _: KW_ONLY
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def weight_seconds(self, batch: int) -> float:
        """Reading the weights that a batch needs; of the experts, only the ones that its tokens use."""
        parameters = self.shape.parameters
        whole = parameters.bytes(self.shape.dtype_bytes, self.settings.quantization)
        table = self.shape.vocabulary * self.shape.hidden
        dense = replace(parameters, experts=0).bytes(self.shape.dtype_bytes, self.settings.quantization)
        unread = max(0, parameters.embeddings - table) * self.shape.dtype_bytes  # of a table, one row a token
        used = 1 - (1 - parameters.used_share) ** batch
        read = dense - unread + used * (whole - dense)
        return read / self.tensor_parallel / (self.gpu.bytes_per_second * _READS_WEIGHTS)

    def compute_seconds(self, tokens: int) -> float:
        """The multiplications for this number of tokens, without attention."""
        parameters = self.shape.parameters
        table = self.shape.vocabulary * self.shape.hidden
        active = parameters.linear + table + parameters.experts * parameters.used_share
        return 2 * active * tokens / self.tensor_parallel / (self.gpu.flops * _COMPUTES)

    def exchange_seconds(self, tokens: int) -> float:
        """The exchange between the GPUs of a split, in each layer."""
        gpus = self.tensor_parallel
        if gpus == 1:
            return 0.0
        size = tokens * self.shape.hidden * self.shape.dtype_bytes * 2 * (gpus - 1) / gpus
        return 2 * self.shape.layers * (_EXCHANGE_SECONDS + size / self.gpu.link_bytes_per_second)

    def decode_parts(self, batch: int, context_tokens: float) -> dict[str, float]:
        """The seconds of one token for each of a batch, by cause. Through a pipeline, its parts follow one another."""
        part = max(1, -(-batch // self.pipeline_parallel))
        computing, reading = self.compute_seconds(part), self.weight_seconds(part)
        cache = part * bytes_per_sequence(self.shape, int(context_tokens), self.settings.kv_value_bytes)
        heads = 1 if self.shape.stored is not None and self.shape.stored.latent else self.tensor_parallel
        return {
            "reading weights": reading,
            "computing": max(_OVERLAP * computing, computing - reading),
            "reading the KV cache": cache / heads / (self.gpu.bytes_per_second * _READS_CACHE),
            "the exchange between GPUs": self.exchange_seconds(part),
            "the host": self.pipeline_parallel * _HOST_SECONDS,
        }

    def prefill_seconds(self, tokens: int) -> float:
        """A prompt of which nothing is cached, without the step's constant part."""
        stored = self.shape.stored
        of_head = (
            self.shape.hidden // self.shape.heads if stored is None or stored.latent else stored.values_per_head // 2
        )
        attention = 4 * self.shape.heads * of_head * self.shape.layers
        attending = attention * tokens * (tokens + 1) / 2 / self.tensor_parallel / (self.gpu.flops * _ATTENDS)
        exchanged = self.exchange_seconds(tokens) if tokens else 0.0
        return (self.compute_seconds(tokens) + attending + exchanged) / self.pipeline_parallel

    def at(self, batch: int, workload: Workload, fits: bool = True) -> BatchSpeed:
        """While `batch` requests of the workload run, and another begins for each that ends."""
        output = max(1, workload.output_tokens)
        parts = self.decode_parts(batch, workload.prompt_tokens + output / 2)
        step = sum(parts.values())
        prefill = batch * self.prefill_seconds(workload.prompt_tokens - workload.shared_prefix_tokens) / output
        limit = max({**parts, "prefill": prefill}.items(), key=itemgetter(1))[0]
        return BatchSpeed(
            batch,
            batch / (step + prefill),
            decode_tokens_per_second=batch / step,
            seconds_per_token=step + prefill,
            limit=limit,
            fits=fits,
        )


def batch_curve(roofline: Roofline, option: Fit, workload: Workload) -> list[BatchSpeed]:
    """From one request to the largest size that fits, and the next one, which does not."""
    own = {option.max_num_seqs} | (
        {min(_share(option, workload), option.max_num_seqs)} if workload.concurrency else set()
    )
    beyond = next((size for size in _BATCHES if size > option.sequences), None)
    sizes = {size for size in _BATCHES if size <= option.sequences} | own | ({beyond} if beyond else set())
    return [roofline.at(size, workload, size <= option.sequences) for size in sorted(sizes) if size]


def fleet_tokens_per_second(roofline: Roofline, option: Fit, workload: Workload) -> float:
    """All backends of an option with the expected concurrency, or as many requests as they take."""
    batch = min(option.max_num_seqs, _share(option, workload))
    return option.replicas * roofline.at(batch, workload).tokens_per_second if option.sequences else 0.0


def _share(option: Fit, workload: Workload) -> int:
    """The concurrent requests on one backend."""
    wanted = option.max_num_seqs * option.replicas if workload.concurrency is None else workload.concurrency
    return max(1, -(-wanted // option.replicas))
