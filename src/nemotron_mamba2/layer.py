"""The Mamba-2 layer of Nemotron-H: residual + out_proj(gated_norm(scan(conv(in_proj(norm(hidden)))))).

One call runs any mix of prompt and step rows over any slots. Prompt rows pass four public stages, each with `out=`, so
that a caller can run the projections over slices of a long buffer and the recurrence once:

    project_in → convolve → scan → project_out            step rows:  project_in → step → project_out

The layer owns no state: everything per sequence lives in a `StatePool`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch, Role, Rows, Step
from .config import Mamba2Config
from .errors import ShapeError
from .ops import Linear, backend
from .plan import Capabilities, HostStep, Plan
from .state import StatePool
from .weights import Mamba2Weights


class NemotronMamba2Layer:
    """One Mamba-2 layer, ready to run.

    config: its shape. weights: as the checkpoint has them. plan: from `make_plan`. index: which of the pool's layers
    holds its state. Shapes are checked here, once. Raises: ShapeError, NoKernel.
    """

    capabilities = Capabilities(kind="M", state=True)
    host_step: HostStep | None = None

    def __init__(self, config: Mamba2Config, weights: Mamba2Weights, plan: Plan, *, index: int = 0) -> None:
        self.config = config
        self.weights = weights
        self.plan = plan
        self.index = index
        self._ops = backend(plan.device)
        _check_shapes(config, weights)
        linears = plan.prepare(weights)
        self._in_proj, self._out_proj = linears["in_proj"], linears["out_proj"]

    def __call__(self, hidden: Tensor, batch: Batch | Step, pool: StatePool) -> Tensor:
        """Run the layer over every row of a step.

        hidden: [T, hidden] in the plan's dtype. batch: a Step (inside `pool.step`, shared by all layers), or, when the
        pool serves this layer alone, a Batch: then the step is begun and ended here. Returns: [T, hidden].
        """
        rows = batch.batch.total_rows if isinstance(batch, Step) else batch.total_rows
        if hidden.shape != (rows, self.config.hidden_size) or hidden.dtype != self.plan.dtype:
            raise ShapeError(
                f"layer: the batch needs {self.plan.dtype} hidden [{rows}, {self.config.hidden_size}], "
                f"found {hidden.dtype} {list(hidden.shape)}"
            )
        if (pool.layout.config, pool.layout.dtype) != (self.config, self.plan.dtype):
            raise ShapeError(
                f"layer: the pool was made for {pool.layout.config} in {pool.layout.dtype}, "
                f"this layer is {self.config} in {self.plan.dtype}"
            )
        if isinstance(batch, Step):
            return self._run(hidden, batch, pool)
        if pool.layout.layers != 1:
            raise ShapeError(
                f"layer: a pool of {pool.layout.layers} layers needs one step for all of them; "
                "use `with pool.step(batch) as step` and pass the step"
            )
        out = torch.empty_like(hidden)
        for step, index in pool.steps(batch):
            mine = index if isinstance(index, slice) else _on_device(index, hidden.device)
            out[mine] = self._run(hidden[mine], step, pool)
        return out

    def reference(self) -> NemotronMamba2Layer:
        """The same layer in plain torch, on the device where its weights lie: what kernels are compared with.

        It shares weights and plan, makes no copies, and keeps activations as they are in both roles.
        """
        plain = object.__new__(NemotronMamba2Layer)
        plain.config, plain.weights, plain.plan, plain.index = self.config, self.weights, self.plan, self.index
        plain._ops = backend(torch.device("cpu"))
        plain._in_proj, plain._out_proj = Linear(self.weights.in_proj), Linear(self.weights.out_proj)
        return plain

    def project_in(self, hidden: Tensor, role: Role, *, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """RMSNorm and in_proj of any rows → z [T, d_inner], xBC [T, conv_dim], dt [T, H], views of one buffer.

        out: the buffer [T, in_proj_rows] to fill, or None.
        """
        c = self.config
        projected = self._ops.norm_linear(
            hidden, self.weights.norm, self._in_proj, eps=c.layer_norm_epsilon, role=role, out=out
        )
        return projected.split([c.d_inner, c.conv_dim, c.mamba_num_heads], -1)

    def convolve(
        self, xbc: Tensor, dt: Tensor, rows: Rows, pool: StatePool, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolution of prompt rows and softplus of dt, live window rows in front (`ops.reference.conv`)."""
        w = self.weights
        return self._ops.conv(
            xbc,
            dt,
            pool.layer_state(self.index),
            rows,
            weight=w.conv1d_weight,
            bias=w.conv1d_bias,
            dt_bias=w.dt_bias,
            time_step_limit=self.config.time_step_limit,
            out=out,
        )

    def scan(self, xbc: Tensor, dt: Tensor, rows: Rows, pool: StatePool, *, out: Tensor | None = None) -> Tensor:
        """The recurrence over what `convolve` returned → y [T, d_inner]."""
        w = self.weights
        return self._ops.scan(
            xbc,
            dt,
            pool.layer_state(self.index),
            rows,
            A_log=w.A_log,
            D=w.D,
            reproducible=self.plan.reproducible,
            out=out,
        )

    def step(self, xbc: Tensor, dt: Tensor, rows: Rows, pool: StatePool, *, out: Tensor | None = None) -> Tensor:
        """Convolution and recurrence of step rows → y [T, d_inner]."""
        w = self.weights
        return self._ops.step(
            xbc,
            dt,
            pool.layer_state(self.index),
            rows,
            conv_weight=w.conv1d_weight,
            conv_bias=w.conv1d_bias,
            dt_bias=w.dt_bias,
            A_log=w.A_log,
            D=w.D,
            time_step_limit=self.config.time_step_limit,
            out=out,
        )

    def project_out(self, y: Tensor, z: Tensor, residual: Tensor, role: Role, *, out: Tensor | None = None) -> Tensor:
        """Gated group norm, out_proj and residual of any rows → [T, hidden]."""
        return self._ops.norm_linear_residual(
            y,
            z,
            self.weights.gated_norm,
            self._out_proj,
            residual,
            groups=self.config.n_groups,
            eps=self.config.layer_norm_epsilon,
            role=role,
            out=out,
        )

    def _run(self, hidden: Tensor, step: Step, pool: StatePool) -> Tensor:
        parts = [self._run_share(hidden[rows.slice], role, rows, pool) for role, rows in step.shares]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else hidden.clone()

    def _run_share(self, hidden: Tensor, role: Role, rows: Rows, pool: StatePool) -> Tensor:
        if role == "step":
            z, xbc, dt = self.project_in(hidden, role)
            return self.project_out(self.step(xbc, dt, rows, pool), z, hidden, role)
        out = torch.empty_like(hidden)
        for piece in rows.pieces:
            here = slice(piece.first_row - rows.first_row, piece.slice.stop - rows.first_row)
            z, xbc, dt = self.project_in(hidden[here], role)
            xbc, dt = self.convolve(xbc, dt, piece, pool)
            self.project_out(self.scan(xbc, dt, piece, pool), z, hidden[here], role, out=out[here])
        return out


def _on_device(rows: list[int], device: torch.device) -> Tensor:
    """Row indices, int64 [·]; a list used as an index would be copied by a call that waits for the device."""
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


def _check_shapes(config: Mamba2Config, weights: Mamba2Weights) -> None:
    heads, d_inner = config.mamba_num_heads, config.d_inner
    expected: dict[str, tuple[int, ...]] = {
        "norm": (config.hidden_size,),
        "in_proj": (config.in_proj_rows, config.hidden_size),
        "conv1d_weight": (config.conv_dim, config.conv_kernel),
        "conv1d_bias": (config.conv_dim,),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "gated_norm": (d_inner,),
        "out_proj": (config.hidden_size, d_inner),
    }
    for name, shape in expected.items():
        value = getattr(weights, name)
        if value is None and name == "conv1d_bias":
            continue
        if tuple(value.shape) != shape:
            raise ShapeError(f"layer weight {name}: expected {list(shape)}, found {list(value.shape)}")
        if isinstance(value, Tensor) and value.dtype != torch.float32:
            raise ShapeError(f"layer weight {name}: expected float32, found {value.dtype}; use {name}.float()")
