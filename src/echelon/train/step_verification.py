"""Ranks compute the same share in pairs and compare, every `trainer.verify_steps` steps: a device
that computes wrong numbers without an error is found, and named.

A check is a forward and a backward pass beside the step, with the weights, buffers and samples of
one rank and with random numbers of its own. What all bits of it add up to is compared. Where two
ranks differ, all compute that share again, and the majority is right. The check comes before its
step, and leaves nothing behind: a verified run has the numbers of any other, to the bit.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from echelon.cudagraph.host_state import HostState, find_host_change, read_host_state
from echelon.data.batch_structure import list_tensors
from echelon.data.batch_transform import BatchTransform
from echelon.data.batches import Batch, BlockSlice
from echelon.data.sample_seeds import derive_batch_seed
from echelon.data.sharded_stream import find_stream
from echelon.errors import EchelonError, ExitCode, Fault, TransientError
from echelon.experiment.trained_parameters import read_trained_flags, set_trained_flags
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.process_group import RankGroup, broadcast_buffers
from echelon.parallel.tensor_digest import digest_tensors
from echelon.parallel.user_collectives import count_collectives
from echelon.snapshot.state import broadcast_tree, seed_all
from echelon.train.restore import BUILD_TIMEOUT_S
from echelon.train.sanity_check import leave_no_trace
from echelon.utils.text import format_count
from echelon.world.rounds import format_slots

if TYPE_CHECKING:
    from echelon.train.loop import Training


class WrongNumbersError(EchelonError, TransientError):
    """This rank has computed wrong numbers. It is replaced, as far as ranks can be."""


class RankPlace(NamedTuple):
    """Where a rank computes. Sent between ranks as JSON."""

    host: str
    device: str
    kind: str
    """What decides how numbers are rounded: the processor, its instructions, the libraries."""

    def __str__(self) -> str:
        return f"{self.host} ({self.device}, {self.kind.partition(';')[0]})"


class PassDigest(NamedTuple):
    """What a rank has used and computed in a check, in the order in which one follows from the
    other; each number stands for all bits of its tensors."""

    weights: int
    samples: int
    loss: int
    gradients: int


_TITLES = ("weights before it", "samples", "losses", "gradients")


class SharePass(NamedTuple):
    """A forward and a backward pass over the share of a rank."""

    digest: PassDigest
    loss: Tensor
    gradients: dict[str, Tensor]


class Settlement(NamedTuple):
    """What follows from two computations of a share on which ranks differed."""

    wrong: list[int]
    """The ranks that are wrong; empty: which are wrong cannot be said."""
    reference: int
    """A rank that is right, or one to compare with."""


def find_verification_faults(t: Training) -> list[Fault]:
    """Return why the steps of this training cannot be verified, as far as its settings do not
    say it."""
    if find_stream(t.experiment.train_data) is None:
        return []
    return [
        Fault(
            f"trainer.verify_steps={t.config.trainer.verify_steps}, but train_data is a stream, "
            "from which a rank cannot read another's samples",
            "leave trainer.verify_steps out, or give data with a length",
        )
    ]


def make_step_verifier(t: Training, *, is_start: bool) -> StepVerifier | None:
    """Return what verifies the steps of a training. A collective.

    Raises where the devices of the ranks round differently. A run that goes on in another round is
    not ended for that: it goes on without.
    """
    every = t.config.trainer.verify_steps
    assert every is not None
    if faults := find_verification_faults(t):
        raise EchelonError(*faults)
    text = json.dumps(_describe_place(t.device))
    texts = t.group.exchange("described by its device", text, BUILD_TIMEOUT_S)
    places = [RankPlace(*json.loads(text)) for text in texts]
    other = next((r for r, place in enumerate(places) if place.kind != places[0].kind), None)
    if other is None:
        return StepVerifier(every, places, t.step)
    fault = Fault(
        f"trainer.verify_steps={every} compares numbers to the bit, but rank 0 on "
        f"{places[0].host} computes with {places[0].kind}, and rank {other} on "
        f"{places[other].host} with {places[other].kind}: these may round differently",
        "use machines of one kind with the same torch and launch.threads, or leave it out",
    )
    if is_start:
        raise EchelonError(fault)
    if t.group.world.rank == 0:
        print(f"warning: steps are no longer verified: {fault.what}", file=sys.stderr)
    return None


def assign_shares(check: int, world_size: int) -> list[int]:
    """Return for every rank the rank whose share it computes in a check.

    Ranks are paired anew in each check; where their number is odd, three are together.
    """
    ring = [(place + check) % world_size for place in range(world_size)]
    shares = [0] * world_size
    for place, rank in enumerate(ring):
        pair = min(place // 2, max(0, world_size // 2 - 1))
        shares[rank] = ring[2 * pair]
    return shares


def settle_difference(
    first: Mapping[int, PassDigest], second: Sequence[PassDigest]
) -> Settlement | None:
    """Return which ranks are wrong about a share: those that differ from the majority.

    `first` is what the ranks computed that differed, `second` what all ranks computed then. Of two
    ranks, the one that did not get its own numbers again is wrong. None: it cannot be said.
    """
    size = len(second)
    right, count = Counter(second).most_common(1)[0]
    if 2 * count > size:
        wrong = {rank for rank in first if first[rank] != right}
        wrong |= {rank for rank in range(size) if second[rank] != right}
    else:
        wrong = {rank for rank in first if size == 2 and first[rank] != second[rank]}
    if not wrong or 2 * len(wrong) > size:
        return None
    return Settlement(sorted(wrong), min(set(range(size)) - wrong))


class StepVerifier:
    """Verifies the steps of a training that are due."""

    def __init__(self, every: int, places: Sequence[RankPlace], step: int) -> None:
        self._every, self._places = every, places
        self._agreed_step = step
        """The last step in which all ranks agreed, or that they began after."""
        self._has_checked = False

    def verify_next_step(self, t: Training) -> None:
        """Verify the step that comes next, if it is due. All ranks take part.

        A rank that is wrong raises `WrongNumbersError`, and the others go on: they notice that it
        has left as they notice any loss. Where it cannot be said which one is wrong, all raise.
        """
        step = t.step + 1
        if step % self._every:
            return
        assert isinstance(t.replica, DDPReplica)
        size, rank = t.group.world.size, t.group.world.rank
        # First all compute the same share, so that collectives of the user meet in equal shapes,
        # and can be refused.
        is_first = not self._has_checked
        shares = [0] * size if is_first else assign_shares(step // self._every, size)
        before = read_host_state(t.experiment) if is_first else None
        own = _compute_share(t, shares[rank])
        if before is not None and rank == 0:
            self._warn_about_counters(before, t)
        self._has_checked = True
        digests = _exchange_digests(t.group, own.digest)
        if size == 1:
            digests.append(_compute_share(t, 0).digest)
            shares = [0, 0]
        differing = _find_differing_share(shares, digests)
        if differing is None:
            self._agreed_step = step
        elif size == 1:
            raise self._make_flaky_error(step, *digests)
        else:
            first = {r: digests[r] for r in range(size) if shares[r] == differing}
            self._settle(t, own, first, differing)
        if t.replica.step_timer is not None:
            t.replica.step_timer.record("given")  # the step itself begins now

    def _settle(
        self, t: Training, own: SharePass, first: Mapping[int, PassDigest], share: int
    ) -> None:
        """Let all ranks compute a share, and raise on those that are wrong about it."""
        rank, step = t.group.world.rank, t.step + 1
        own = own._replace(gradients={k: v.cpu() for k, v in own.gradients.items()})
        again = _compute_share(t, share)
        second = _exchange_digests(t.group, again.digest)
        settled = settle_difference(first, second)
        if settled is None:
            other = next(r for r in first if first[r] != first[share])
            amount = _measure_difference(t, own, share, first[share], list(first.values()))
            amount = t.group.broadcast_json(amount, other)
            title = _get_title(first[share], first[other])
            difference = f"the {title} of ranks {share} and {other} differ{amount}"
            raise self._make_unsettled_error(step, first, second, difference)
        right = second[settled.reference]
        mine = own if rank in first and first[rank] != right else again
        known = [*first.values(), *second]
        amount = _measure_difference(t, mine, settled.reference, right, known)
        if rank in settled.wrong:
            others = [r for r in range(len(second)) if r not in settled.wrong]
            is_again = "" if again.digest != right else "; computed again, they were right"
            what = (
                f"rank {rank} on {self._places[rank]} computes wrong numbers: in step {step} its "
                f"{_get_title(mine.digest, right)} differ from those of {format_slots(others)}"
                f"{amount}"
            )
            fault = Fault(what + is_again, self._suggest_remedy([rank], step))
            raise WrongNumbersError(fault, exit=ExitCode.WRONG_NUMBERS)
        if rank == settled.reference and (spoiled := self._name_unverified_steps(step)):
            print(
                f"warning: {format_slots(settled.wrong)} computed wrong numbers in step "
                f"{step}; {spoiled}",
                file=sys.stderr,
            )

    def _make_unsettled_error(
        self,
        step: int,
        first: Mapping[int, PassDigest],
        second: Sequence[PassDigest],
        difference: str,
    ) -> EchelonError:
        """Return the error for ranks of which nobody can say which one is wrong."""
        suspects = sorted(first)
        who = " and ".join(f"rank {r} on {self._places[r]}" for r in suspects)
        is_steady = all(first[r] == second[r] for r in suspects)
        why = "each gets its own numbers again, and " if is_steady else ""
        why += "there is no third rank to settle it" if len(second) == 2 else "no majority agrees"
        what = f"{who} compute different numbers: in step {step} {difference}; {why}"
        remedy = self._suggest_remedy(suspects, step)
        if not is_steady:
            remedy += f"; {_NONDETERMINISM}"
        return EchelonError(Fault(what, remedy), exit=ExitCode.WRONG_NUMBERS)

    def _make_flaky_error(self, step: int, one: PassDigest, other: PassDigest) -> EchelonError:
        """Return the error for a process that is alone and gets different numbers."""
        what = (
            f"rank 0 on {self._places[0]} computes different numbers for the same samples: in step "
            f"{step} the {_get_title(one, other)} differed the second time"
        )
        remedy = f"{self._suggest_remedy([0], step)}; {_NONDETERMINISM}"
        return EchelonError(Fault(what, remedy), exit=ExitCode.WRONG_NUMBERS)

    def _suggest_remedy(self, ranks: Sequence[int], step: int) -> str:
        """Return what to do about ranks that may be wrong."""
        hosts = " and ".join(dict.fromkeys(self._places[rank].host for rank in ranks))
        spoiled = self._name_unverified_steps(step)
        return f"test memory and devices of {hosts}, or leave it out" + (spoiled and f"; {spoiled}")

    def _name_unverified_steps(self, step: int) -> str:
        """Return which steps before a check that failed may be wrong as well."""
        first, last = self._agreed_step + 1, step - 1
        if first > last:
            return ""
        which = f"step {first} was" if first == last else f"steps {first} to {last} were"
        sure = (
            f"a snapshot of step {self._agreed_step} or before"
            if self._agreed_step
            else "the start"
        )
        return f"{which} not verified and may be wrong: to be sure, go on from {sure}"

    def _warn_about_counters(self, before: HostState, t: Training) -> None:
        """Say on rank 0 what a check cannot undo: attributes that a pass changes."""
        then, now = (_leave_out_buffers(s) for s in (before, read_host_state(t.experiment)))
        if (change := find_host_change(then, now)) is not None:
            print(
                f"warning: trainer.verify_steps={self._every}: {change}, and a check changes it "
                "too, which is not undone: numbers that depend on it are others than without",
                file=sys.stderr,
            )


_NONDETERMINISM = (
    "or an operation of the model or its data gives other numbers each time, which "
    "cannot be verified"
)


def _leave_out_buffers(state: HostState) -> HostState:
    """Return a state without buffers, parameters and generators, which are brought back."""
    names = ("_buffers", "_parameters")
    return {k: v for k, v in state[0].items() if not k.endswith(names)}, None


def _find_differing_share(shares: Sequence[int], digests: Sequence[PassDigest]) -> int | None:
    """Return the first rank about whose share there are different digests; None if there is
    none."""
    found: dict[int, PassDigest] = {}
    for share, digest in zip(shares, digests, strict=True):
        if found.setdefault(share, digest) != digest:
            return share
    return None


def _find_aspect(one: PassDigest, other: PassDigest) -> int:
    """Return the first field in which two digests differ; the number of fields, if in none."""
    return next((i for i in range(len(one)) if one[i] != other[i]), len(one))


def _get_title(one: PassDigest, other: PassDigest) -> str:
    return _TITLES[_find_aspect(one, other)]


def _exchange_digests(group: RankGroup, digest: PassDigest) -> list[PassDigest]:
    """Return the digests of all ranks. A collective."""
    rows = group.gather(torch.tensor(digest), to_all=True)
    return [PassDigest(*row.tolist()) for row in rows]


def _measure_difference(
    t: Training, own: SharePass, reference: int, right: PassDigest, known: Sequence[PassDigest]
) -> str:
    """Return by how much the pass of this rank differs from that of the reference, as the end of
    a sentence. A collective; `known` are the digests of all passes, so all know what to send."""
    aspect = min(_find_aspect(digest, right) for digest in known)
    weights = {name: p.detach() for name, p in t.experiment.model.named_parameters()}
    tensors = (weights, {}, {"": own.loss}, own.gradients)[aspect]
    is_reference = t.group.world.rank == reference
    sent = broadcast_tree(_to_dense(tensors) if is_reference else None, t.group, reference)
    largest = (0.0, "", 0, 0)
    for name, here in _to_dense(tensors).items():
        if (there := sent.get(name)) is None or there.shape != here.shape or not here.numel():
            continue
        distance = (here.double() - there.double()).abs().nan_to_num(torch.inf, torch.inf)
        count = int((distance > 0).sum())
        largest = max(largest, (distance.max().item(), name, count, distance.numel()))
    most, name, count, total = largest
    place = f" in {name} ({count:,} of {format_count(total, 'number')})" if name else ""
    return f" by up to {most:.3g}{place}" if most > 0 else ""


def _to_dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU that are whole; rows of tables are left out."""
    return {k: v.cpu() for k, v in tensors.items() if v.layout is torch.strided}


# --- one pass over a share ---


def _compute_share(t: Training, share: int) -> SharePass:
    """Compute the loss and the gradients of a rank's share of the next step; nothing of it stays.
    A collective, for the buffers: a step begins with those of rank 0."""
    model, replica = t.experiment.model, t.replica
    assert isinstance(replica, DDPReplica)
    t.heartbeat.beat()
    buffers = list(model.buffers())
    shared = [buffer.detach().clone() for buffer in buffers]
    broadcast_buffers(shared)  # not in place: a rank may be lost meanwhile
    batch = _read_share(t, share)
    flags = read_trained_flags(model)
    with leave_no_trace(model, t.group.world), _use_deterministic_kernels():
        for buffer, value in zip(buffers, shared, strict=True):
            buffer.copy_(value)
        seed_all(derive_batch_seed(t.config.seed, t.step, share))
        before = count_collectives()
        loss, gradients = replica.compute_gradients(batch.data, batch.sample_count)
        if count_collectives() != before:
            raise _make_collectives_error(t)
        digest = PassDigest(
            digest_tensors(model.parameters()),
            digest_tensors(list_tensors(batch.data) or ()),
            digest_tensors([loss]),
            digest_tensors(gradients.values()),
        )
    set_trained_flags(model, flags)
    t.heartbeat.beat()
    return SharePass(digest, loss, gradients)


def _read_share(t: Training, share: int) -> Batch | BlockSlice:
    """Return a rank's share of the next step."""
    epoch, number = t.plan.locate(t.step, t.samples)
    order = t.plan.make_order(epoch, share, t.group.world.size, t.source.storage_device)
    batch = t.source.fetch_batch(order, number, t.device)
    function = t.experiment.batch_transform
    if function is None:
        return batch
    return BatchTransform(function, t.config.seed, share, t.device).transform(batch, t.step)


@contextmanager
def _use_deterministic_kernels() -> Iterator[None]:
    """Have torch choose kernels that give the same bits each time, as far as it has them."""
    cudnn = torch.backends.cudnn
    is_set = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.deterministic, cudnn.benchmark
    if not is_set:
        torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_set, warn_only=warns_only)
        cudnn.deterministic, cudnn.benchmark = flags


def _make_collectives_error(t: Training) -> EchelonError:
    return EchelonError(
        Fault(
            f"trainer.verify_steps={t.config.trainer.verify_steps}, but the experiment exchanges "
            "tensors between its processes, so that none can compute another's share alone",
            "leave trainer.verify_steps out",
        )
    )


# --- where a rank computes ---


def _describe_place(device: torch.device) -> RankPlace:
    """Return where this rank computes."""
    if device.type == "cuda":
        name, cuda = torch.cuda.get_device_name(device), torch.version.cuda
        kind = f"{name}; torch {torch.__version__}, CUDA {cuda}, cuDNN {_get_cudnn_version()}"
        return RankPlace(socket.gethostname(), str(device), kind)
    threads = format_count(torch.get_num_threads(), "thread")
    instructions = torch.backends.cpu.get_cpu_capability()
    kind = f"{_read_cpu_name()}; {instructions}, {threads}, torch {torch.__version__}"
    return RankPlace(socket.gethostname(), str(device), kind)


def _get_cudnn_version() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def _read_cpu_name() -> str:
    """Return the name of the processor, as Linux knows it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    lines = (line.partition(":") for line in text.splitlines())
    return next((v.strip() for key, _, v in lines if key.strip() == "model name"), "CPU")
