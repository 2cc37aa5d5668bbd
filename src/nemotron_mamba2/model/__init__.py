"""The whole model: the layers besides Mamba-2, the layer pattern, logits, and what is kept per sequence."""

from .attention import AttentionLayer
from .caches import Caches, CacheSnapshot, CacheStep, cache_bytes
from .mlp import MlpLayer
from .moe import MoeLayer
from .mtp import MtpHead
from .nemotron_h import NemotronH, host_steps
from .pages import PAGE_TOKENS, KvSnapshot, PagePool
from .tables import PageTable

__all__ = [
    "PAGE_TOKENS",
    "AttentionLayer",
    "CacheSnapshot",
    "CacheStep",
    "Caches",
    "KvSnapshot",
    "MlpLayer",
    "MoeLayer",
    "MtpHead",
    "NemotronH",
    "PagePool",
    "PageTable",
    "cache_bytes",
    "host_steps",
]
