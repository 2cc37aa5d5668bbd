"""What a training run of the demo model does, and when: settings, clock, learning rate and mix of data.

Everything follows one number, the part of the training that is done. It is measured by the clock, or by steps
where their count is given, so a faster machine takes more steps on the same schedule.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from demo_batches import Mix
from demo_model import DemoConfig


@dataclass(frozen=True)
class Settings:
    """What a run does; `seed` fixes the data, not the bits of the weights."""

    minutes: float = 7.0
    steps: int | None = None  # stop after these, and let them drive the schedule in place of the clock
    rows: int = 32
    row_tokens: int = 2048
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    text_epochs: float = 32.0
    text_dropout: float = 0.15
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3
    longest_gap_tokens: int = 1600
    exams: int = 10
    cases: int = 100  # of recall, for each kind and distance
    exam_documents: int | None = None  # all of them
    seed: int = 0
    workers: int = 0
    device: str = "cpu"
    compile: bool = False
    model: DemoConfig = field(default_factory=DemoConfig)

    @property
    def closing_seconds(self) -> float:
        """Kept back from the clock for writing and examining."""
        return min(30.0, 6.0 * self.minutes)


def small(settings: Settings) -> Settings:
    """The same run at a size for a few steps on a CPU."""
    model = DemoConfig(
        hybrid_override_pattern="ME*-M",
        vocab_size=1024,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        mamba_num_heads=4,
        ssm_state_size=32,
        chunk_size=64,
        intermediate_size=128,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=128,
        max_position_embeddings=256,
    )
    return replace(
        settings,
        model=model,
        rows=2,
        row_tokens=256,
        warmup_steps=2,
        exams=1,
        cases=2,
        exam_documents=2,
        longest_gap_tokens=64,
    )


class Clock:
    """How much of the training is done, by time or by steps."""

    def __init__(self, settings: Settings, started: float) -> None:
        self._settings = settings
        self._started = started
        self._end = started + settings.minutes * 60 - settings.closing_seconds
        self._first_step = time.monotonic()

    def start(self) -> None:
        """Everything before now was preparation."""
        self._first_step = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def progress(self, step: int) -> float:
        if self._settings.steps is not None:
            return step / self._settings.steps
        return (time.monotonic() - self._first_step) / max(1.0, self._end - self._first_step)

    def steps_left(self, step: int) -> float:
        done = self.progress(step)
        return step * (1 - done) / done if done > 0 and step else float("inf")


def learning_rate(settings: Settings, step: int, progress: float) -> float:
    """Warm up, stay, and fall in a straight line to 0 over the second half."""
    return settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps, 2.0 * max(0.0, 1.0 - progress))


def turn_mix(mix: Mix, settings: Settings, progress: float, *, text_rows_left: float, rows_left: float) -> None:
    """Text evenly over the rest of the run; gaps grow up to a quarter of it."""
    gap = 64 + (settings.longest_gap_tokens - 64) * min(1.0, progress / 0.25)
    mix.set(
        text_share=min(0.5, max(0.0, text_rows_left) / max(1.0, rows_left)) if rows_left < float("inf") else 0.25,
        gap_tokens=gap,
        long_share=0.7 * min(1.0, progress / 0.15),
    )
