"""Train the demo model: one command, one GPU, a few minutes.

    python examples/train_demo.py --text DIR --out DIR --minutes 7 --device cuda --compile

The clock rules: `--minutes` bounds everything from the start of the process to the last file, and the learning
rate, the curriculum and the share of text all follow the part of the training time that has passed. So a faster
machine takes more steps on the same schedule. Gaps between facts and questions grow over the first quarter; text
is spread evenly so that its epochs are the same on any machine, and only text is regularised by dropout.

Snapshots are examined now and then on documents kept out of training for this (not the held-out ones), and the
best one is rounded to bf16, written, read back and examined on the held-out data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_batches import ANSWER, CHAT, TEXT, Batch, Batches, Mix, Source, load_batches, to_device
from demo_checkpoint import load_checkpoint, save_checkpoint
from demo_data import filler_lines, fraction, split_text
from demo_eval import Exam, make_exam, take_exam
from demo_model import Block, DemoModel
from demo_report import plot_loss, write_card, write_json
from demo_schedule import Clock, Settings, learning_rate, small, turn_mix
from demo_tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

VALIDATION_TEXT = 0.02  # of the training documents
TAG_WEIGHTS = {TEXT: 1.0, ANSWER: 2.0, CHAT: 0.1}  # each tag's mean loss counts this much


def batch_loss(model: DemoModel, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """The loss, and the mean negative log-likelihood of each head [2] and tag [4], in nats.

    A tag's mean counts by its weight, however many tokens the batch has of it: answers are few.
    """
    keep = (1.0 - settings.text_dropout * batch.is_text.float())[:, None, None]
    weights = torch.zeros(len(TAG_WEIGHTS) + 1, device=keep.device)
    for tag, weight in TAG_WEIGHTS.items():
        weights[tag] = weight
    tokens = batch.ids.shape[1] - len(batch.heads)
    means = []
    hidden_states = model.hidden_states(batch.ids[:, :-1], keep)
    for ahead, (hidden, targets) in enumerate(zip(hidden_states, batch.heads, strict=True), start=1):
        logits = model.logits(hidden.flatten(0, 1)[targets.position])
        wanted = batch.ids[:, ahead : ahead + tokens].flatten()[targets.position]
        nats = F.cross_entropy(logits.float(), wanted, reduction="none")
        zeros = torch.zeros_like(weights)
        count = zeros.index_add(0, targets.tag, torch.ones_like(nats))
        means.append(zeros.index_add(0, targets.tag, nats) / count.clamp(min=1.0))
    loss = (means[0] * weights).sum() + settings.mtp_weight * (means[1] * weights).sum()
    return loss, torch.stack(means).detach()


def make_optimizer(model: DemoModel, settings: Settings) -> torch.optim.Optimizer:
    """AdamW that decays matrices only: not norms, biases, decays or the convolution's taps."""
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.ndim > 1 and "conv1d" not in name]
    others = [p for name, p in named if p.ndim < 2 or "conv1d" in name]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=settings.device != "cpu")


def compile_layers(model: DemoModel, trial: Batch, settings: Settings) -> bool:
    """Compile layer by layer, equal kinds sharing their code; where that fails, say so and stay eager."""
    layers = [module for module in model.modules() if isinstance(module, Block)]
    try:
        for layer in layers:
            layer.compile(dynamic=False)
        _forward_backward(model, trial, settings)
    except Exception as error:  # whatever the compiler raises, training goes on without it
        print(f"no compilation: {type(error).__name__}: {error}"[:2000], flush=True)
        for layer in layers:
            layer._compiled_call_impl = None
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


class Trainer:
    """Model, optimizer and batches of a run, and the record it leaves in `history` and `exams`."""

    def __init__(self, settings: Settings, source: Source) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.model = DemoModel(settings.model).to(settings.device).train()
        self.optimizer = make_optimizer(self.model, settings)
        self.mix = Mix()
        batches = Batches(source, self.mix, rows=settings.rows, row_tokens=settings.row_tokens, seed=settings.seed)
        self.batches = load_batches(batches, workers=settings.workers, pin=settings.device != "cpu")
        self.text_rows_left = settings.text_epochs * source.text_tokens / settings.row_tokens
        self.history: list[dict[str, float]] = []
        self.exams: list[dict[str, float]] = []

    def train(self, clock: Clock, exam: Exam) -> DemoModel:
        """Run until the clock has run out; returns the best of the examined snapshots, on the CPU."""
        best, best_score, step = snapshot_of(self.model), -float("inf"), 0
        clock.start()
        while (progress := clock.progress(step)) < 1.0:
            self._step(step, progress, clock)
            step += 1
            progress = clock.progress(step)
            if progress >= min(1.0, (len(self.exams) + 1) / self.settings.exams):
                snapshot = snapshot_of(self.model)
                scores = take_exam(snapshot, exam, device=self.settings.device)
                self.exams.append({"step": step, "seconds": clock.seconds(), "progress": progress, **scores})
                report("exam", self.exams[-1])
                if (score := _overall(scores)) > best_score:
                    best, best_score = snapshot, score
        return best.cpu()

    def _step(self, step: int, progress: float, clock: Clock) -> None:
        rows_left = clock.steps_left(step) * self.settings.rows
        turn_mix(self.mix, self.settings, progress, text_rows_left=self.text_rows_left, rows_left=rows_left)
        batch = next(self.batches)
        self.text_rows_left -= int(batch.is_text.sum())
        rate = learning_rate(self.settings, step, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        means = _forward_backward(self.model, to_device(batch, self.settings.device), self.settings)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for router in self.model.routers():
            router.balance(self.settings.balance_rate)
        if step < 10 or step % 50 == 0:  # reading a loss waits for the device
            self._record(step, clock, rate, means, norm)

    def _record(self, step: int, clock: Clock, rate: float, means: Tensor, norm: Tensor) -> None:
        seconds, steps = clock.seconds(), 0
        if self.history:
            steps, seconds = step - self.history[-1]["step"], seconds - self.history[-1]["seconds"]
        (main, draft), tokens = means.tolist(), steps * self.settings.rows * self.settings.row_tokens
        entry = {
            "step": step,
            "seconds": clock.seconds(),
            "learning_rate": rate,
            "text": main[TEXT],
            "answer": main[ANSWER],
            "chat": main[CHAT],
            "mtp_text": draft[TEXT],
            "mtp_answer": draft[ANSWER],
            "gradient_norm": norm.item(),
            "tokens_per_second": tokens / seconds,
        }
        self.history.append(entry)
        report("step", entry)


def snapshot_of(model: DemoModel) -> DemoModel:
    """A copy with its own weights that nothing has compiled."""
    copied = DemoModel(model.config).to(next(model.parameters()).device)
    copied.load_state_dict(model.state_dict())
    return copied


def report(kind: str, values: dict[str, float]) -> None:
    print(kind, " ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)


def probe(settings: Settings, source: Source) -> None:
    """Print what the machine does: batches drawn, and tokens trained eagerly and compiled, with peak memory."""
    trainer = Trainer(settings, source)
    trainer.mix.set(text_share=0.1, gap_tokens=settings.longest_gap_tokens, long_share=0.7)
    tokens = settings.rows * settings.row_tokens
    next(trainer.batches)
    drawn = _seconds_each(lambda: next(trainer.batches), 150, settings.device)
    batch = to_device(next(trainer.batches), settings.device)
    print(f"drawing {tokens / drawn:,.0f} tokens/s", flush=True)
    for name in ("eager", "compiled"):
        started = time.monotonic()
        if name == "compiled" and not compile_layers(trainer.model, batch, settings):
            return
        preparing = time.monotonic() - started
        each = _seconds_each(lambda: _forward_backward(trainer.model, batch, settings), 20, settings.device)
        memory = torch.cuda.max_memory_allocated() / 2**30 if settings.device != "cpu" else 0.0
        print(f"{name} {tokens / each:,.0f} tokens/s, {memory:.1f} GiB, {preparing:.0f} s to prepare", flush=True)


def prepare(settings: Settings, text: Path, tokenizer_folder: Path | None) -> tuple[Tokenizer, Source, Exam, Exam]:
    """The tokenizer, what rows are drawn from, and the exams: on validation and on held-out documents."""
    documents, held_out = split_text(text)
    validation = [d for d in documents if fraction("validation", d) < VALIDATION_TEXT]
    training = [d for d in documents if fraction("validation", d) >= VALIDATION_TEXT]
    if tokenizer_folder is None:
        tokenizer = train_tokenizer(training, vocabulary=settings.model.vocab_size)
    else:
        tokenizer = load_tokenizer(tokenizer_folder)
    source = Source.from_text(tokenizer, training, filler_lines(training))

    def exam(documents: list[str], cases: int, seed: int) -> Exam:
        documents, window = documents[-(settings.exam_documents or 0) :], settings.row_tokens
        lines = filler_lines(documents)
        return make_exam(tokenizer, documents, lines, cases=cases, seed=seed, window_tokens=window)

    return tokenizer, source, exam(validation, max(1, settings.cases // 3), 1), exam(held_out, settings.cases, 0)


def main(arguments: list[str] | None = None) -> None:
    started = time.monotonic()
    options = parse(arguments)
    if options.plot_only:
        plot_loss(options.out)
        return
    settings = settings_of(options)
    tokenizer, source, validation, held_out = prepare(settings, options.text, options.tokenizer)
    clock = Clock(settings, started)
    print(f"prepared after {clock.seconds():.0f} s: {source.text_tokens:,} tokens of training text", flush=True)
    if options.probe:
        probe(settings, source)
        return
    trainer = Trainer(settings, source)
    if settings.compile:
        compile_layers(trainer.model, to_device(next(trainer.batches), settings.device), settings)
        print(f"compiled after {clock.seconds():.0f} s", flush=True)
    best = trainer.train(clock, validation)
    save_checkpoint(best, options.out)
    save_tokenizer(tokenizer, options.out)
    scores = take_exam(load_checkpoint(options.out).to(settings.device), held_out, device=settings.device)
    report("held out", scores)
    record = {"settings": asdict(settings), "steps": trainer.history, "exams": trainer.exams, "scores": scores}
    write_json(options.out / "loss.json", record)
    write_card(options.out, record, parameters=sum(p.numel() for p in best.parameters()))
    plot_loss(options.out)
    print(f"done after {clock.seconds():.0f} s", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--text", type=Path, help="folder with kjv.txt, shakespeare.txt and speeches.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, card and loss")
    parser.add_argument("--tokenizer", type=Path, help="folder with a trained tokenizer; without it, one is trained")
    parser.add_argument("--minutes", type=float, default=7.0, help="bound on the whole run")
    parser.add_argument("--steps", type=int, help="stop after these steps, whatever the clock says")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--epochs", type=float, default=32.0, help="passes over the text in the whole run")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=0, help="processes that draw batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--small", action="store_true", help="a tiny model and batch, for a try on a CPU")
    parser.add_argument("--probe", action="store_true", help="print the speed of this machine and stop")
    parser.add_argument("--plot-only", action="store_true", help="draw OUT/loss.png from OUT/loss.json and stop")
    options = parser.parse_args(arguments)
    if options.text is None and not options.plot_only:
        parser.error("--text is needed")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    settings = Settings(
        minutes=options.minutes,
        steps=options.steps,
        rows=options.rows,
        text_epochs=options.epochs,
        learning_rate=options.learning_rate,
        workers=options.workers,
        device=options.device,
        compile=options.compile,
    )
    return small(settings) if options.small else settings


def _forward_backward(model: DemoModel, batch: Batch, settings: Settings) -> Tensor:
    device = batch.ids.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
        loss, means = batch_loss(model, batch, settings)
    loss.backward()
    return means


def _overall(scores: dict[str, float]) -> float:
    """One number for a snapshot: mean recall, less the bits per byte."""
    recall = [value for name, value in scores.items() if name.count("/") == 2]
    return sum(recall) / len(recall) - scores["bits_per_byte"]


def _seconds_each(action: Callable[[], object], times: int, device: str) -> float:
    action()
    _wait(device)
    started = time.monotonic()
    for _ in range(times):
        action()
    _wait(device)
    return (time.monotonic() - started) / times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
