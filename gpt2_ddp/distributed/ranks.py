"""Collective helpers: work on the main process, errors on all ranks, agreement and sums."""

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.errors import UserError, is_main_process, truncate

P = ParamSpec("P")
T = TypeVar("T")

CONTROL = "control"  # description of the control group
COLLECTIVE = timedelta(minutes=30)  # timeout of collectives where no watchdog runs
# timeout of collectives that a watchdog ends earlier, and of work of unknown length
LONGEST = timedelta(days=7)
WATCHED: WeakSet[dist.ProcessGroup] = WeakSet()
"""The groups of processes whose collectives the watchdog ends if a rank is late."""


def let_wait(group: object) -> dist.ProcessGroup:
    """The group, once it is connected: from now on, its collectives may take `LONGEST`. Others'
    have no ranks here."""
    if isinstance(group, dist.ProcessGroup):
        group.set_timeout(LONGEST)
        WATCHED.add(group)
    return cast(dist.ProcessGroup, group)


def has_others() -> bool:
    """Whether other ranks are connected to this one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def on_main(function: Callable[[], T]) -> T:
    """The picklable result of `function` on the main process, on every rank. Raises its UserError
    on every rank."""
    group = control_group()
    return gather(function if not group or is_main_process() else lambda: None, group)[0]  # pyright: ignore


def runs_on_main(function: Callable[P, T]) -> Callable[P, T]:
    """The function as a collective one, by `on_main`. Nothing that runs on the main process alone
    may call it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return on_main(partial(function, *args, **kwargs))

    return run


def from_main(value: T) -> T:
    """The main process's picklable value, on every rank."""
    return on_main(lambda: value)


def control_group() -> dist.ProcessGroup | None:
    """The gloo group of all ranks, besides the default group, whose collectives may run on GPUs;
    None for a process alone. Its first use makes it. Each rank keeps a connection to all others in
    a group, so a training has no further one. All ranks start the group's collectives in the same
    order; several may be under way, since gloo numbers them. They may wait for work of unknown
    length, and end at once if a rank ends."""
    if not has_others():
        return None
    for group in WATCHED:
        if group.group_desc == CONTROL:
            return group
    return let_wait(dist.new_group(backend="gloo", group_desc=CONTROL))


def on_every_rank(function: Callable[[], T]) -> T:
    """This rank's result of `function`, once all ranks have succeeded. Raises, on every rank, any
    rank's first UserError."""
    group = control_group()  # before the work, since connecting has a shorter timeout
    result, error = _attempt(function)  # the result may be no object to send
    _raise_on_every_rank(gather(lambda: error, group))
    return result  # pyright: ignore[reportReturnType]


def gather(function: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """The picklable results of `function` on the ranks of a gloo group, on each of them; None: of
    this rank alone. Raises, on every rank of the group, any rank's first UserError."""
    if not group:
        return [function()]
    outcome = _attempt(function)
    outcomes = [outcome] * group.size()
    dist.all_gather_object(outcomes, outcome, group=group)
    _raise_on_every_rank([error for _, error in outcomes])
    return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]


def check_ranks_agree(
    here: Mapping[str, Any], is_same: Callable[[Any, Any], bool] = operator.eq
) -> None:
    """Checks that all ranks have the same values or hashes, by names for the user. Raises
    UserError: on every rank, with each name whose values differ, rank 0's value and the other."""
    first, *others = gather(lambda: dict(here), control_group())
    mistakes: dict[str, str] = {}
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if not is_same(first.get(name), other.get(name)):
                hint = f"rank {rank} has {truncate(other.get(name))}; give all ranks the same"
                mistakes.setdefault(name, UserError(name, first.get(name), hint).mistakes[0])
    if mistakes:
        _raise_on_every_rank([UserError.join([*mistakes.values()])])


def sum_over_ranks(accelerator: Accelerator, value: Tensor) -> Tensor:
    """The sum of a tensor over ranks, with its shape and dtype; collective."""
    total: Any = accelerator.reduce(value.clone(), reduction="sum")
    return total


def _attempt(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return function(), None
    except UserError as error:
        return None, error


def _raise_on_every_rank(errors: Sequence[UserError | None]) -> None:
    for error in errors:
        if error is not None:
            error.on_every_rank = True
            raise error


class LateSum:
    """Sums of fp64 values over all ranks that are read later than they are started: no rank waits
    for another in between, and none for a GPU. A single process has its own values.

    `control_group` connects it, so making one is collective. Every rank starts equally many sums,
    in the same order as other work of the control group.
    """

    def __init__(self):
        self._group = control_group()
        self._started: deque[tuple[Tensor, dist.Work | None]] = deque()

    def start(self, values: Sequence[float]) -> None:
        """Starts a sum."""
        total = torch.tensor(values, dtype=torch.float64)
        work = None
        if self._group:
            work = dist.all_reduce(total, group=self._group, async_op=True)
        self._started.append((total, work))

    def result(self) -> list[float]:
        """The oldest sum whose result was not read yet. Waits for all ranks to have started it."""
        total, work = self._started.popleft()
        if work:
            work.wait()
        return total.tolist()
