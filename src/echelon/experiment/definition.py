"""`Experiment`, the public class that a user's experiment function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.experiment.error_hints import make_batch_type_error

if TYPE_CHECKING:
    from torchmetrics import Metric

    from echelon.experiment.loss_counts import Count

    Metrics = Metric | Mapping[str, Metric]


Predict = Callable[[nn.Module, Any], tuple[Any, Any]]
Evaluate = Callable[[nn.Module, Iterator[Any]], Mapping[str, tuple[Any, Any]]]
Step = Callable[[Any, Any], Mapping[str, Any] | None]


@dataclass
class Experiment:
    """The parts to train. They are the same on every rank and at any scale.

    An experiment function returns an Experiment. Its first parameter is the settings object. With a
    second parameter named `devices`, it also receives the devices of its process, to place layers
    on them; with one named `training`, an echelon.TrainingInfo: epochs, steps, rank. The function
    is called once in every process, so it must build the same parts on each rank: random numbers
    are seeded alike everywhere before the call.

        def experiment(cfg):
            model = Net(cfg.width)
            return echelon.Experiment(
                model=model,
                optimizer=torch.optim.AdamW(model.parameters(), lr=cfg.lr),
                loss=torch.nn.functional.cross_entropy,
                train_data=(images, labels),
            )

    Echelon wraps the model for several processes, splits the data between them, saves snapshots and
    resumes. So an experiment contains no code for ranks, devices or checkpoints.

    Parameters:

    model       The nn.Module to train. It is moved to its device for you and put in training mode,
                except for frozen parts that are in eval mode. With step, several by name are
                accepted: {"generator": generator, "discriminator": discriminator}.
    optimizer   A torch.optim.Optimizer of the model's parameters. Models with sparse embeddings use
                echelon.optim.RowAdam or RowSGD. With step, several by name are accepted.
    loss        A function: loss(output, target) returns a tensor with one number, the mean over the
                samples of the batch, as most losses of torch.nn.functional do. For torch's own
                losses other means are known too: ignore_index, class weights, reduction="sum".
                For a loss of your own that is another mean, give count.
    train_data  A tuple of tensors or numpy arrays, (*inputs, target), with one row per sample; or
                a Dataset with a length. Batches of trainer.batch_size are made of it, shuffled anew
                in every epoch, and fetched ahead by trainer.loader_workers processes. What a sample
                draws from random, numpy and torch depends on the seed, the epoch and the sample.
                A stream, which has no length, is accepted too, with trainer.steps: an
                IterableDataset, or echelon.data.stream(make_shard).
    eval_data   The data for evaluation, with a length. Without it nothing is evaluated.
    metrics     A torchmetrics.Metric, or several as {name: Metric}. They are updated with
                (output, target) of every batch of eval_data. A function that returns them is also
                accepted. It is called only where something is evaluated, so that nothing else waits
                for the import of torchmetrics.
    schedule    A learning-rate schedule of your own (torch.optim.lr_scheduler). It is stepped once
                per optimizer step, not per epoch: echelon.TrainingInfo counts the steps. Without
                it, trainer.schedule and trainer.warmup_steps decide. ReduceLROnPlateau is stepped
                after every evaluation, with the number that trainer.best names. With step, several
                by name are accepted.
    scaler      A torch.amp.GradScaler for half precision. It scales the loss, and skips a step
                whose gradients overflow. With trainer.precision=fp16 one is made for you.
    predict     predict(model, batch) returns (output, target). Without it a batch is
                (*inputs, target) and the output is model(*inputs). Use it where batches are
                something else, such as dicts, or where the model returns more than the loss takes:

                    def predict(model, batch):
                        return model(batch["tokens"]).logits, batch["label"]

    collate_fn  Makes a batch of a list of samples, of train_data and eval_data, as for torch's
                DataLoader. Without it torch's default_collate does.
    sampler     Gives the indices of train_data in the order of an epoch, as for torch's DataLoader,
                such as a WeightedRandomSampler. It gives the order of all processes together;
                Echelon cuts it into batches of trainer.batch_size, and those into shares. It has to
                give the same order for the same epoch: random, numpy, torch and its own `generator`
                are seeded before, and its set_epoch(epoch) is called. Without it every epoch is
                shuffled.
    batch_sampler  The same with lists of indices, each a batch of all processes together.
                trainer.batch_size then counts in evaluations only.
    loader      A dict of further options of torch's DataLoader for trainer.loader_workers
                processes: multiprocessing_context, persistent_workers (True by default),
                pin_memory, prefetch_factor, timeout, worker_init_fn.
    count       What the mean of your own loss is over, where it is not over samples. count(output,
                target) returns that number, such as the tokens that are not padding. Parts of a
                batch, which processes and trainer.accumulate make, are then weighted by it. For a
                loss that is a sum, give "sum".

                    def count(output, target):
                        return (target != PADDING).sum()
    evaluate    An evaluation of your own, in the place of loss and metrics: evaluate(model,
                batches) is called on every rank, with the model in eval mode and an iterator over
                this rank's batches of eval_data; without eval_data there are none. It returns the
                sum over its samples and their count for each number. Sums and counts of all ranks
                are added, and divided:

                    def evaluate(model, batches):
                        right = samples = 0
                        for images, labels in batches:
                            views = model(images) + model(images.flip(-1))
                            right += (views.argmax(1) == labels).sum()
                            samples += len(labels)
                        return {"accuracy": (right, samples)}

                Set trainer.best to one of its names, unless there is a "loss" among them.
    state       More that belongs to a snapshot, by name: {"replay": buffer}. Each part has
                state_dict() and load_state_dict(), as torch's Stateful; their content is dicts,
                lists, tuples, numbers, texts and tensors. Rank 0's parts are saved, and restored on
                every rank, so they must be equal on all ranks. Where they are not, saving fails
                with a sentence.
    batch_transform  batch_transform(batch) returns a training batch with random changes, such as
                mixup, crops or flips of all its images at once. It is called with this process's
                share of the batch, on the device, and returns as many samples. What it draws from
                random, numpy and torch depends on the seed, the step and the rank:

                    def batch_transform(batch):
                        images, labels = batch
                        share = torch.rand(len(images), 1, 1, 1, device=images.device)
                        return images * share + images.flip(0) * (1 - share), labels
    step        A step of your own, in the place of loss, for several losses, models or optimizers:
                step(batch, session) is called with this process's share of every batch and an
                echelon.Session. It computes the gradients with session.backward, steps with
                session.step, and returns the numbers to log, or None:

                    def step(batch, session):
                        images, _ = batch
                        loss_d = judge(images) + judge(generator(draw(images)).detach())
                        session.backward(loss_d)
                        session.step(optimizer_d)
                        loss_g = fool(generator(draw(images)))
                        session.backward(loss_g)
                        session.step(optimizer_g, clip=1.0)
                        return {"loss_d": loss_d, "loss_g": loss_g}

                No gradients are left from one call to the next. train_data may be left out: batch
                is then the number of the step, from 1, and trainer.steps says how many there are.
                eval_data is evaluated by evaluate, which gets several models as an nn.ModuleDict.
    """

    # Any, where with `step` a mapping of names is given as well: nearly all of Echelon sees one
    # model, one optimizer and a loss.
    model: Any
    optimizer: Any
    loss: Any = None
    train_data: Any = None
    eval_data: Any = None
    metrics: Metrics | Callable[[], Metrics] | None = None
    schedule: Any = None
    scaler: torch.amp.GradScaler | None = None
    predict: Predict | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[int] | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None
    loader: Mapping[str, Any] | None = None
    count: Count | None = None
    evaluate: Evaluate | None = None
    state: Mapping[str, Any] | None = None
    batch_transform: Callable[[Any], Any] | None = None
    step: Step | None = None


def get_parts_by_name(kind: str, given: Any) -> dict[str, Any]:
    """Return what an experiment gives as one part, or as several by name, under the names of parts
    of a snapshot: {"optimizer": …}, or {"optimizer-generator": …, "optimizer-discriminator": …}."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {f"{kind}-{name}": part for name, part in given.items()}
    return {kind: given}


def default_predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Calls the model with all columns of the batch but the last, which is the target."""
    if not isinstance(batch, (tuple, list)):  # a dict or a tensor can be unpacked too, to nonsense
        raise make_batch_type_error(batch)
    *inputs, target = batch
    return model(*inputs), target
