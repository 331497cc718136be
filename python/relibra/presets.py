"""Hardware and models by name, every number with its source.

Rates are effective ones. Those of the H100 are the defaults of the design ("H100/H200-class
hardware: eff 600 TFLOP/s, NVLink 360 GB/s a direction, NIC 42.5 GB/s, HBM 2.85 TB/s effective"):
0.61, 0.80, 0.85 and 0.85 of the nominal rates. Other GPUs take the same shares of their nominal
rates. Nothing here is measured by this project; every number is a field and can be replaced.

Letters: D model dim, F expert dim, E experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from relibra.limits import MAX_LAYERS, MAX_WIDTH
from relibra.shape import ModelShape
from relibra_kernels.checks import check_int
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Preset = TypeVar("_Preset")
# Far beyond every machine, and so that modelled picoseconds neither vanish nor leave int64.
_RATES = (1e-3, 1e12)
_OTHER = {"push_latency_us": (0.0, 1e6), "slot_us": (0.0, 1e6), "memory_gb": (1e-6, 1e12)}
_SIZES = {
    "num_layers": (1, MAX_LAYERS),
    "dense_layers": (0, MAX_LAYERS),
    "dense_size": (0, MAX_WIDTH),
    "shared_size": (0, MAX_WIDTH),
    "projection_params": (1, 1 << 40),
    "score_size": (1, MAX_WIDTH),
    "vocabulary": (1, 1 << 30),
}


@dataclass(frozen=True)
class Hardware:
    """Effective rates of one GPU and its links.

    Args:
        name: of the preset.
        gemm_tflop_per_s: of a grouped GEMM in bf16.
        dense_tflop_per_s: of attention and projections in bf16.
        hbm_gb_per_s: of memory.
        nvlink_gb_per_s: one direction, inside a domain.
        nic_gb_per_s: one direction, between domains, of the rank's own rail.
        push_gb_per_s: one direction, of weights to replicas.
        push_latency_us: t0, of a push or a return.
        slot_us: c0, time that one more slot with rows costs.
        memory_gb: of the GPU.
        domain_ranks: ranks that share an NVLink domain.
        sources: where each number comes from, by field.

    Raises:
        PlanError: a rate below 1e-3 or above 1e12, a t0 or c0 outside 0..1e6, or a memory
            below 1e-6.

    Example:
        >>> HARDWARE["H100"].with_values(nic_gb_per_s=25.0).nic_gb_per_s
        25.0
    """

    name: str
    gemm_tflop_per_s: float
    dense_tflop_per_s: float
    hbm_gb_per_s: float
    nvlink_gb_per_s: float
    nic_gb_per_s: float
    push_gb_per_s: float
    push_latency_us: float
    slot_us: float
    memory_gb: float
    domain_ranks: int
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Checks every number."""
        for each in fields(self):
            value: Any = getattr(self, each.name)
            if each.name in ("name", "sources"):
                continue
            low, high = _OTHER.get(each.name, _RATES)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise PlanError(f"{each.name}: need a number {low:g}..{high:g}, got {value!r}")
            if each.name == "domain_ranks" and value != int(value):
                raise PlanError(f"domain_ranks: need an integer, got {value!r}")
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    def with_values(self, **values: float) -> Hardware:
        """The same with other numbers.

        Args:
            **values: fields by name.

        Raises:
            PlanError: no such field, or a number out of range.
        """
        known = [each.name for each in fields(self) if each.name not in ("name", "sources")]
        for name in values:
            if name not in known:
                raise PlanError(f"hardware: need one of {', '.join(known)}, got {name!r}")
        sources = {**self.sources, **dict.fromkeys(values, "given by the caller")}
        changed: Any = values
        return replace(self, sources=sources, **changed)

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"sources": dict(self.sources)}


@dataclass(frozen=True)
class ModelPreset:
    """Sizes of a published model.

    Args:
        name: of the preset.
        hidden_size: D.
        expert_size: F.
        num_experts: E.
        top_k: K.
        num_layers: decoder layers.
        dense_layers: of them without experts, the first ones.
        dense_size: inner size of their feed-forward part.
        shared_size: inner size of the shared experts together, 0 = none.
        projection_params: parameters of the attention projections of a layer.
        score_size: sum over heads of the sizes of a key and a value: FLOPs of attention are
            2 * score_size for each pair of positions.
        window: positions that the windowed layers see, None = all layers see everything.
        windowed_share: part of the layers that have the window.
        vocabulary: tokens.
        source: where the sizes come from.

    Raises:
        PlanError: a size out of range.

    Example:
        >>> MODELS["Qwen3-30B-A3B"].shape().expert_bytes
        9437184
    """

    name: str
    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int
    num_layers: int
    dense_layers: int
    dense_size: int
    shared_size: int
    projection_params: int
    score_size: int
    vocabulary: int
    source: str
    window: int | None = None
    windowed_share: float = 0.0

    def __post_init__(self) -> None:
        """Checks every size."""
        try:
            for name, (low, high) in _SIZES.items():
                check_int(name, getattr(self, name), minimum=low, maximum=high)
            if self.window is not None:
                check_int("window", self.window, minimum=1, maximum=1 << 40)
        except (TypeError, ValueError) as error:
            raise PlanError(str(error)) from None
        if self.dense_layers >= self.num_layers:
            raise PlanError(
                f"dense_layers: need fewer than num_layers {self.num_layers}, got "
                f"{self.dense_layers}"
            )
        self.shape()
        if not 0 <= self.windowed_share <= 1:
            raise PlanError(f"windowed_share: need 0..1, got {self.windowed_share!r}")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layer numbers with experts."""
        return tuple(range(self.dense_layers, self.num_layers))

    def shape(self, num_layers: int | None = None, num_experts: int | None = None) -> ModelShape:
        """What the planner needs.

        Args:
            num_layers: MoE layers to take, the first ones; None = all.
            num_experts: E of the loads where it differs; None = the model's.
        """
        return ModelShape(
            self.num_experts if num_experts is None else num_experts,
            self.top_k,
            self.moe_layers if num_layers is None else range(num_layers),
            self.hidden_size,
            self.expert_size,
        )

    @property
    def expert_params(self) -> int:
        """Parameters of one expert, 3*D*F."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def total_params(self) -> int:
        """Parameters of the model, embeddings and head included, norms and biases left out."""
        moe = len(self.moe_layers)
        experts = moe * (
            self.num_experts * self.expert_params + self.num_experts * self.hidden_size
        )
        shared = moe * 3 * self.hidden_size * self.shared_size
        dense = self.dense_layers * 3 * self.hidden_size * self.dense_size
        vocabulary = 2 * self.vocabulary * self.hidden_size
        return experts + shared + dense + vocabulary + self.num_layers * self.projection_params


def _grouped_query(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """Attention with grouped keys: projections q, k, v, o; scores over all heads."""
    params = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    return {"projection_params": params, "score_size": 2 * heads * head_dim}


def _latent() -> dict[str, int]:
    """DeepSeek-V3's latent attention: ranks 1536 and 512, 128 heads of 128 + 64 and 128."""
    query = 7168 * 1536 + 1536 * 128 * (128 + 64)
    key_value = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    params = query + key_value + 128 * 128 * 7168
    return {"projection_params": params, "score_size": 128 * (128 + 64 + 128)}


_CONFIG = "config.json of huggingface.co/{}"

MODELS: Mapping[str, ModelPreset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            ModelPreset(
                "Qwen3-30B-A3B", 2048, 768, 128, 8, 48, 0, 0, 0,
                vocabulary=151936, source=_CONFIG.format("Qwen/Qwen3-30B-A3B"),
                **_grouped_query(2048, 32, 4, 128),
            ),
            ModelPreset(
                "Qwen3-235B-A22B", 4096, 1536, 128, 8, 94, 0, 0, 0,
                vocabulary=151936, source=_CONFIG.format("Qwen/Qwen3-235B-A22B"),
                **_grouped_query(4096, 64, 4, 128),
            ),
            ModelPreset(
                "GLM-4.5-Air", 4096, 1408, 128, 8, 46, 1, 10944, 1408,
                vocabulary=151552, source=_CONFIG.format("zai-org/GLM-4.5-Air"),
                **_grouped_query(4096, 96, 8, 128),
            ),
            ModelPreset(
                "DeepSeek-V3", 7168, 2048, 256, 8, 61, 3, 18432, 2048,
                vocabulary=129280, source=_CONFIG.format("deepseek-ai/DeepSeek-V3"), **_latent(),
            ),
            ModelPreset(
                "gpt-oss-120b", 2880, 2880, 128, 4, 36, 0, 0, 0,
                vocabulary=201088, source=_CONFIG.format("openai/gpt-oss-120b"),
                window=128, windowed_share=0.5, **_grouped_query(2880, 64, 8, 64),
            ),
            ModelPreset(
                "gpt-oss-20b", 2880, 2880, 32, 4, 24, 0, 0, 0,
                vocabulary=201088, source=_CONFIG.format("openai/gpt-oss-20b"),
                window=128, windowed_share=0.5, **_grouped_query(2880, 64, 8, 64),
            ),
        )
    }
)  # fmt: skip

_H100_SOURCES = {
    "gemm_tflop_per_s": "design default; published: torch grouped GEMM on H200 600-624 TFLOP/s",
    "dense_tflop_per_s": "as gemm_tflop_per_s",
    "hbm_gb_per_s": "design default, 0.85 of 3,350 GB/s (NVIDIA H100 SXM data sheet)",
    "nvlink_gb_per_s": "design default, 0.80 of 450 GB/s a direction (NVLink 4, data sheet)",
    "nic_gb_per_s": "design default, 0.85 of 50 GB/s (400 Gb/s NIC a GPU)",
    "push_gb_per_s": "as nvlink_gb_per_s; the design expects 300-350 of an SM kernel, 380 of the "
    "copy engine",
    "push_latency_us": "upper end of the design's 5-10 us",
    "slot_us": "assumed: no measurement yet",
    "memory_gb": "data sheet, 80 GB",
    "domain_ranks": "8 GPUs a node",
}


def _share_of_nominal(
    name: str, tflop: float, hbm: float, nvlink: float, memory: float, domain: int, sheet: str
) -> Hardware:
    """A GPU with the shares of its nominal rates that the H100 defaults have."""
    gemm, link = round(tflop * 600 / 989.4), nvlink * 0.8
    share = f"{sheet}; share of nominal as for the H100"
    sources = _H100_SOURCES | {
        "gemm_tflop_per_s": f"0.61 of {tflop:g} TFLOP/s dense bf16 ({share})",
        "hbm_gb_per_s": f"0.85 of {hbm:g} GB/s ({share})",
        "nvlink_gb_per_s": f"0.80 of {nvlink:g} GB/s a direction ({share})",
        "push_gb_per_s": "as nvlink_gb_per_s",
        "memory_gb": sheet,
        "domain_ranks": sheet,
    }
    return Hardware(
        name, gemm, gemm, hbm * 0.85, link, 42.5, link, 10.0, 1.0, memory, domain, sources
    )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Hardware(
                "H100", 600.0, 600.0, 2850.0, 360.0, 42.5, 360.0, 10.0, 1.0, 80.0, 8, _H100_SOURCES
            ),
            _share_of_nominal("H200", 989.4, 4800, 450, 141, 8, "NVIDIA H200 SXM data sheet"),
            _share_of_nominal("B200", 2250, 8000, 900, 180, 8, "NVIDIA HGX B200 data sheet"),
            _share_of_nominal("NVL72", 2500, 8000, 900, 186, 72, "NVIDIA GB200 NVL72 data sheet"),
        )
    }
)


def find_hardware(name: str) -> Hardware:
    """A preset by name, upper or lower case.

    Args:
        name: such as `H100`.

    Raises:
        PlanError: an unknown name; lists the known ones.

    Example:
        >>> find_hardware("nvl72").domain_ranks
        72
    """
    return _find("hardware", HARDWARE, name)


def find_model(name: str) -> ModelPreset:
    """A preset by name, upper or lower case.

    Args:
        name: such as `Qwen3-30B-A3B`.

    Raises:
        PlanError: an unknown name; lists the known ones.

    Example:
        >>> find_model("qwen3-30b-a3b").num_layers
        48
    """
    return _find("model", MODELS, name)


def _find(what: str, known: Mapping[str, _Preset], name: str) -> _Preset:
    for own, preset in known.items():
        if own.lower() == str(name).lower():
            return preset
    raise PlanError(f"{what}: need one of {', '.join(known)}, got {name!r}")
