"""Trains heads on a frozen base.

    accelerate launch train/train_heads.py --config configs/x.yaml [key=value …]

One loop: read the states of a step, heads, loss, gradient, optimizer. A step's rows, and all that is random in it,
depend on the seed and the step's number alone, so a run that was stopped goes on bit for bit, and processes share a
step without changing it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UserError
from train.batches import plan_epoch, share_rows, steps_in_epoch
from train.checkpoint import Interrupt, data_digest, latest_checkpoint, load_checkpoint, save_checkpoint
from train.config import TrainingConfig, load_config
from train.data import choose_rows, held_out
from train.families import make_trainer
from train.finish import check_output, finish
from train.losses import head_weights
from train.optimizers import make_optimizers
from train.progress import Meter, Totals, peak_memory
from train.sources import open_source
from train.states import LiveStates


def train(config: TrainingConfig) -> Path:
    """Trains to the end (or to an interruption, which leaves a checkpoint). Returns the heads' directory."""
    check_output(config)
    accelerator = Accelerator(
        cpu=None if torch.accelerator.is_available() else True,  # processes without a GPU talk through gloo
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        log_with=config.tracker,
        step_scheduler_with_optimizer=False,
    )
    config.optimizer.check_precision(accelerator.mixed_precision)
    set_seed(config.seed)
    say = accelerator.print
    base = Base.load(
        config.base,
        dtype=config.base_dtype,
        device=accelerator.device,
        revision=config.base_revision,
        prepack=False,
    )
    source = open_source(config, base)
    ids = [example.row_id for example in source.examples]
    eval_rows = [r for r, row_id in enumerate(ids) if held_out(row_id, config.data.held_out)]
    left = sorted(set(range(len(ids))) - set(eval_rows))
    chosen = choose_rows([ids[r] for r in left], [source.sizes[r] for r in left], config.data.max_positions)
    train_rows = [left[i] for i in chosen]
    if not train_rows:
        raise ConfigError("no rows to train on")
    sizes = [source.sizes[r] for r in train_rows]
    lengths = [len(source.examples[r]) for r in train_rows] if config.features.directory is None else None

    trainer = make_trainer(config, base, [source.examples[r] for r in train_rows])
    if config.features.directory is None:
        base.prepack()  # after the trainer was made, which may copy layers
    trainer.check_source(source)
    heads = trainer.heads
    say(
        f"base {base.name}: {base.num_parameters:,} parameters; heads: {heads.num_parameters:,} "
        f"({heads.num_parameters / base.num_parameters:.2%} of the base)"
    )
    say(
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, {accelerator.mixed_precision} precision"
    )
    say(f"{len(train_rows):,} rows with {sum(sizes):,} positions to train on, {len(eval_rows):,} rows held out")

    settings = config.optimizer
    optimizers = make_optimizers(trainer, settings)
    steps_per_epoch = steps_in_epoch(sizes, config.positions_per_step)
    total = config.epochs * steps_per_epoch
    total = total if config.max_steps is None else min(total, config.max_steps)
    factor = partial(learning_rate_factor, total=total, warmup=settings.warmup_steps, final=settings.final_fraction)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    model, *optimizers = accelerator.prepare(trainer, *optimizers)
    accelerator.register_for_checkpointing(*schedulers)
    step, before = 0, Totals()
    data = data_digest(((ids[r], size) for r, size in zip(train_rows, sizes, strict=True)), heads.draft_ids)
    checkpoint = latest_checkpoint(config.run_directory) if config.resume else None
    if checkpoint is not None:
        step, before = load_checkpoint(accelerator, checkpoint, config, data)
        say(f"resumed from {checkpoint} at step {step} of {total}")

    weights = torch.tensor(head_weights(trainer.depth, config.loss.head_decay))
    parts = accelerator.num_processes * config.gradient_accumulation_steps
    mine = range(accelerator.process_index, parts, accelerator.num_processes)
    plan: list[list[int]] = []
    planned_epoch = -1
    interrupt = Interrupt()
    with Meter(accelerator, config, total, step, before) as meter, interrupt:
        while step < total:
            epoch, place = divmod(step, steps_per_epoch)
            if epoch != planned_epoch:
                plan = plan_epoch(sizes, config.positions_per_step, config.seed, epoch, lengths)
                planned_epoch = epoch
            # Each head's loss is a mean over its pairs in the whole step; accelerate takes means over processes and
            # micro-batches, which `parts` undoes.
            rows = [train_rows[i] for i in plan[place]]
            pairs = torch.tensor(source.pairs(rows, len(weights)))
            scale = (weights / pairs.clamp_min(1) * parts).to(accelerator.device)
            shares = share_rows(rows, source.sizes, parts)
            for part in mine:
                batch = trainer.read(source, shares[part]).to(accelerator.device)
                with accelerator.accumulate(model):
                    loss, figures = model(batch, scale, step)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(trainer.parameters(), settings.max_grad_norm)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                meter.add(figures, tokens=sum(len(source.examples[r]) for r in shares[part]))
            for scheduler in schedulers:
                scheduler.step()
            step += 1
            meter.step(step, step / steps_per_epoch, float(schedulers[0].get_last_lr()[0]))
            stop = interrupt.agreed(accelerator)
            # At the end too: an evaluation that failed is begun again without training anew.
            if stop or step % config.checkpoint_every == 0 or step == total:
                save_checkpoint(accelerator, config, step, data, meter.totals())
            if stop:
                say(f"stopped at step {step} of {total}; the same command goes on from there")
                raise SystemExit(130)
    run = meter.totals().summary()
    session = meter.totals() - before
    if isinstance(source, LiveStates) and session.steps:
        run["base_tokens_per_second"] = accelerator.num_processes * source.tokens / source.seconds
        run["share_of_base_speed"] = source.seconds / session.seconds
        say(
            f"read {session.tokens / session.seconds:.0f} tokens/s; the base's forward alone, on the same batches, "
            f"{run['base_tokens_per_second']:.0f} ({run['share_of_base_speed']:.0%})"
        )
    say(peak_memory(accelerator.device))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        finish(config, trainer, source, train_rows, eval_rows, run, say)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return Path(config.output)


def learning_rate_factor(step: int, total: int, warmup: int, final: float) -> float:
    """Linear warm-up to 1, then a cosine that reaches `final` at step `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train heads on a frozen base.")
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. optimizer.learning_rate=1e-3")
    options = parser.parse_args(arguments)
    try:
        train(load_config(options.config, options.overrides))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
